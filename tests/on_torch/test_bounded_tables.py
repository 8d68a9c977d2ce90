"""Tables with a `max_norm`: their rows are what one process makes of them,
on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kinds_tasks
import plain_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from conftest import Train

STEPS = 8


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """The weights of a loop of torch alone."""
    return plain_tasks.plain(kinds_tasks.Tables(), STEPS)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("flags", [{"ranks": 1}, {"ranks": 1, "micro_batch": 4}, {"ranks": 3}])
def test_equal_to_a_plain_loop(
    flags: dict[str, Any], plain: dict[str, torch.Tensor], train: Train
) -> None:
    result = train(
        "kinds_tasks:Tables", precision="fp64", steps=STEPS, eval_every="2", verify_every=1, **flags
    )
    found = load_file(result.run_dir / "weights.safetensors")
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-13, msg=name)
    sent = result.summary["sent_bytes"]["rows"]
    ranks = flags["ranks"]
    assert sent == pytest.approx(STEPS * 2 * (ranks - 1) / ranks * 100, abs=1)


@pytest.mark.slow
def test_equal_bits(train: Train) -> None:
    jobs = ({"ranks": 1}, {"ranks": 2}, {"ranks": 3})
    found = [train("kinds_tasks:Tables", bitwise=True, steps=STEPS, **job).summary for job in jobs]
    assert len({summary["weights_sha256"] for summary in found}) == 1
    assert len({summary["eval"]["size"] for summary in found}) == 1


def test_an_evaluation_writes_nothing_and_sees_short_rows() -> None:
    with Trainer(kinds_tasks.Tables(), Job(steps=1)) as trainer:
        model: Any = trainer.strategy.model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        words = kinds_tasks.Tables().train_data()[0]
        found = model.eval()(words)
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert torch.equal(model(words), found), "torch's own, which writes"
    assert not all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_a_table_that_is_read_whole_is_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="a weight of 'out' too"):
        train("kinds_tasks:TiedTable", steps=1)
    with pytest.raises(RequestError, match="each replica would shorten"):
        train("kinds_tasks:Tables", steps=1, strategy="dp:replicas=2")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_are_shortened_are_the_engines_own(ranks: int, train: Train) -> None:
    """The witness has no word for them, and what it computes again shortens none."""
    result = train("kinds_tasks:Tables", ranks=ranks, steps=STEPS)
    assert result.summary["witness"]["found"] == []


def test_a_look_of_the_witness_shortens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.torch.witness.witness.WITNESS_EVERY", 2)
    weights = []
    for witness in ("warn", "off"):
        with Trainer(kinds_tasks.Tables(), Job(steps=STEPS, witness=witness)) as trainer:
            for batch in trainer.batches():
                trainer.step(batch)
            weights.append({name: t.clone() for name, t in trainer.weights()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
