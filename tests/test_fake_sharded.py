"""A strategy that cuts weights keeps the contract, and is a file, a card and a line:
all in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.catalog import STRATEGIES, TORCH
from allranks.errors import AllranksError, RequestError
from allranks.strategies.cards import CARDS
from conftest import Train
from fake_sharded import CARD, NAME
from test_check import Check, check
from test_every_strategy import (
    STEPS,
    TASKS,
    check_that_it_goes_on_after_a_kill,
    difference,
    reference_for,
    references,
)

__all__ = ["check", "references"]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARDS, NAME, CARD)
    monkeypatch.setitem(STRATEGIES[TORCH], NAME, "fake_sharded:FakeSharded")


@pytest.mark.slow(but=1, most=4)
@pytest.mark.thinned(1, ("data", ["each", "same"]), ("ranks", [1, 2, 4, 8]), ("task", TASKS))
def test_exact(data: str, ranks: int, task: str, train: Train, references: dict[str, Any]) -> None:
    wanted, weights = reference_for(task, train, references)
    result = train(
        f"sharded_tasks:{task}",
        strategy=f"{NAME}:data={data}",
        ranks=ranks,
        precision="fp64",
        steps=STEPS,
    )
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["steps"] == wanted["steps"]
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-10)
    if task != "Uneven":
        sent = found["sent_bytes"]["gradients"] / found["steps"]
        assert found["card_bytes_per_step"] == pytest.approx(sent, abs=1)


@pytest.mark.slow
@pytest.mark.cases("data", ["each"], exhaustive=["same"])
def test_ranks_with_fewer_micro_batches_pass_for_the_others(
    data: str, train: Train, references: dict[str, Any]
) -> None:
    """101 samples by 24, 3 at once, on 4 ranks:
    the last batch of an epoch leaves two without any."""
    strategy = f"{NAME}:data={data}"
    wanted, weights = reference_for("Words", train, references)
    result = train(
        "sharded_tasks:Words",
        strategy=strategy,
        ranks=4,
        precision="fp64",
        steps=STEPS,
        micro_batch=3,
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert result.summary["eval"] == pytest.approx(wanted["eval"], rel=1e-10)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    ("task", "done", "strategy"),
    [("Words", 4, NAME), ("Pairs", 4, NAME), ("Pairs", 4, "ddp"), ("Uneven", 10, NAME)],
)
def test_a_rank_without_a_sample_after_resuming_goes_through_the_model_too(
    task: str, done: int, strategy: str, train: Train
) -> None:
    """The first step after `done` ones leaves a rank of four without any: it has seen none yet."""
    flags: dict[str, Any] = {"strategy": strategy, "ranks": 4, "precision": "fp64"}
    half = train(f"sharded_tasks:{task}", steps=done, checkpoint_every=done, **flags)
    result = train(f"sharded_tasks:{task}", steps=done + 3, resume=str(half.run_dir), **flags)
    wanted = train(f"contract_tasks:{task}", strategy="single", precision="fp64", steps=done + 3)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (result, wanted))
    assert difference(ours, theirs) < 1e-10
    assert result.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "ranks"), [("each", 4), ("same", 2)])
def test_weights_that_are_unfrozen_between_steps_are_trained(
    data: str, ranks: int, train: Train
) -> None:
    program, flags = ("sharded_tasks:Unfreezes", "at=4"), {"precision": "fp64", "steps": 9}
    wanted = train(*program, strategy="single", **flags)
    found = train(*program, strategy=f"{NAME}:data={data}", ranks=ranks, **flags)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("within", ["loss", "model"])
def test_a_pass_for_the_others_brings_in_exactly_nothing(within: str, train: Train) -> None:
    """Its sample was infinite in the step that had it, which was skipped; 4 others go on."""
    program = "sharded_tasks:Infinite", f"within={within}"
    flags: dict[str, Any] = {"precision": "fp64", "on_bad_step": "skip"}
    wanted = train(*program, strategy="single", **flags)
    found = train(*program, strategy=NAME, ranks=2, **flags)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert wanted.summary["steps"] == found.summary["steps"] == 3 * 10, "one of 11 is skipped"
    assert difference(ours, theirs) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_state_can_be_taken_up_again(ranks: int, on_ranks: Callable[..., Any]) -> None:
    argument = {"task": "Images", "job": {"strategy": NAME}, "steps": 3}
    on_ranks(ranks, "sharded_tasks:go_on_from_a_state", argument)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((NAME, 4), (NAME, 2)),
        ((NAME, 2), ("ddp", 3)),
        (("ddp", 3), (NAME, 2)),
        ((NAME, 2), (NAME, 1)),
    ],
)
def test_a_checkpoint_is_taken_up_by_other_ranks_and_strategies(
    first: tuple[str, int],
    second: tuple[str, int],
    train: Train,
    references: dict[str, Any],
) -> None:
    """7 steps, a checkpoint, and 3 more in another way are 10 steps of one process."""
    _, weights = reference_for("Images", train, references)
    (strategy, ranks), common = first, {"precision": "fp64", "checkpoint_every": 7}
    half = train("sharded_tasks:Images", strategy=strategy, ranks=ranks, steps=7, **common)
    strategy, ranks = second
    result = train(
        "sharded_tasks:Images",
        strategy=strategy,
        ranks=ranks,
        steps=STEPS,
        resume=str(half.run_dir),
        **common,
    )
    assert result.summary["resumed_from_step"] == 7
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow
def test_an_average_crosses_over(train: Train) -> None:
    """The moving average of the weights is cut as they are: halves on two ranks, whole on one."""
    common: dict[str, Any] = {"precision": "fp64", "checkpoint_every": 7}
    program, ema = "sharded_tasks:Images", "ema=0.9"
    wanted = train(program, ema, strategy="single", steps=12, **common)
    half = train(program, ema, strategy=NAME, ranks=2, steps=7, **common)
    found = train(
        program, ema, strategy="single", ranks=1, steps=12, resume=str(half.run_dir), **common
    )
    for name in ("weights", "average"):
        ours, theirs = (load_file(run.run_dir / f"{name}.safetensors") for run in (found, wanted))
        assert difference(ours, theirs) < 1e-10, name


@pytest.mark.slow
@pytest.mark.cases("data", ["each", "same"])
def test_check_calls_it_equal(data: str, check: Check) -> None:
    verdict = check("sharded_tasks:Words", strategy=f"{NAME}:data={data}", ranks=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow
def test_check_finds_a_gradient_that_is_not_summed(check: Check) -> None:
    verdict = check("sharded_tasks:Words", strategy=f"{NAME}:data=each,forgets=true", ranks=2)
    assert not verdict.equal
    assert "gradient" in str(verdict)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_job_goes_on(
    train: Train, references: dict[str, Any]
) -> None:
    _, weights = reference_for("Images", train, references)
    check_that_it_goes_on_after_a_kill(train, "sharded_tasks:Images", NAME, weights)


@pytest.mark.slow
def test_replicas_of_a_half_are_compared(train: Train) -> None:
    """Ranks 0 and 2 hold the same half: a bit that turns over in one is found."""
    with pytest.raises(AllranksError, match="ranks that must hold the same weights do not"):
        train(
            "sharded_tasks:Images",
            strategy=NAME,
            ranks=4,
            steps=6,
            verify_every=1,
            inject="corrupt@rank=2,step=3",
        )


@pytest.mark.slow
def test_a_bad_step_stops_all_ranks_alike(train: Train) -> None:
    with pytest.raises(AllranksError, match="none looks for the samples"):
        train("sharded_tasks:Images", strategy=NAME, ranks=2, steps=6, inject="nan@rank=1,step=3")


def test_a_rank_without_a_partner_is_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="a rank without a partner"):
        train("sharded_tasks:Images", strategy=NAME, ranks=3)


@pytest.mark.slow
def test_more_ranks_than_shards_where_pairs_read_the_same(train: Train) -> None:
    """What counts is how many parts the global batch is cut into: 4 pairs on 4 shards."""
    result = train(
        "sharded_tasks:Images", "shards=4", strategy=f"{NAME}:data=same", ranks=8, steps=2
    )
    assert result.summary["steps"] == 2
    with pytest.raises(RequestError, match="shards = 4"):
        train("sharded_tasks:Images", "shards=4", strategy=f"{NAME}:data=each", ranks=8, steps=2)
