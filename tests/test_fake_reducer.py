"""A reducer sees the shapes of gradients and keeps state:
shown by one that lives in tests alone."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from allranks.catalog import REDUCERS
from allranks.strategies.cards import CARDS
from conftest import Train
from fake_reducer import NAME, card


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARDS, "ddp", card())
    monkeypatch.setitem(REDUCERS, NAME, "fake_reducer:Coarse")


@pytest.mark.slow
def test_what_was_not_sent_is_in_the_checkpoint(train: Train) -> None:
    """5 steps, a checkpoint and 7 more are 12 steps, to the bit."""
    program, strategy = "sharded_tasks:Images", f"ddp:reduce={NAME}"
    whole = train(program, strategy=strategy, ranks=2, steps=12)
    half = train(program, strategy=strategy, ranks=2, steps=5, checkpoint_every=5)
    resumed = train(program, strategy=strategy, ranks=2, steps=12, resume=str(half.run_dir))
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    exact = train(program, strategy="ddp", ranks=2, steps=12)
    assert exact.summary["weights_sha256"] != whole.summary["weights_sha256"], "nothing was rounded"


@pytest.mark.slow
def test_what_was_not_sent_stays_when_other_parameters_are_unfrozen(train: Train) -> None:
    """A model beside it is trained from the fifth step on: the first goes on as without it."""
    flags = {"strategy": f"ddp:reduce={NAME}", "ranks": 2, "steps": 9}
    program = "sharded_tasks:Unfreezes"
    alone, beside = (
        load_file(train(program, f"at={at}", **flags).run_dir / "weights.safetensors")
        for at in (0, 4)
    )
    assert (beside["beside.weight"] != alone["beside.weight"]).all(), "nothing was unfrozen"
    for name in ("first.weight", "first.bias"):
        assert beside[name].tobytes() == alone[name].tobytes(), name
