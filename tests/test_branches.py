"""Branches on ranks: equal to one process, at the same time, and refused where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.errors import AllranksError, RequestError
from conftest import Train
from test_check import Check, check
from test_every_strategy import (
    STEPS,
    check_that_it_goes_on_after_a_kill,
    difference,
    reference_for,
    references,
)

__all__ = ["check", "references"]


@pytest.mark.slow(but=1)
@pytest.mark.cases(
    ("task", "ranks", "flags"),
    [
        ("Towers", 3, {}),
        ("Adversarial", 2, {}),
        ("Towers", 2, {"micro_batch": 6, "activation_checkpointing": True}),
        ("Placed", 2, {}),
        ("Frozen", 3, {}),
    ],
)
def test_equal_to_one_process(
    task: str, ranks: int, flags: dict[str, Any], train: Train, references: dict[str, Any]
) -> None:
    wanted, weights = reference_for(task, train, references, "branch_tasks")
    result = train(
        f"branch_tasks:{task}",
        strategy="branches",
        ranks=ranks,
        precision="fp64",
        steps=STEPS,
        **flags,
    )
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-10)
    sent = found["sent_bytes"]["gradients"] / found["steps"]
    assert found["card_bytes_per_step"] == pytest.approx(sent, abs=1)


@pytest.mark.slow
def test_branches_of_two_ranks_are_on_their_way_at_once(train: Train, tmp_path: Path) -> None:
    """In forward and in backward: each goes on only when the other one is there."""
    common: dict[str, Any] = {"precision": "fp64", "steps": 4}
    wanted = train("branch_tasks:Meetings", strategy="single", **common)
    met = tmp_path / "met"
    met.mkdir()
    found = train("branch_tasks:Meetings", f"meet={met}", strategy="branches", ranks=2, **common)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10
    assert {path.name for path in met.iterdir()} == {
        f"{name}-{where}-{call}"
        for name in "ab"
        for where in ("forward", "backward")
        for call in (2, 3, 4)
    }


@pytest.mark.slow
def test_a_training_goes_through_strategies(train: Train) -> None:
    """`branches` on 3 ranks, `ddp` on 2, `branches` on 2, `single`: 20 steps of one process."""
    common: dict[str, Any] = {"precision": "fp64", "checkpoint_every": 5}
    wanted = train("branch_tasks:Towers", "ema=0.9", strategy="single", steps=20, **common)
    resume: dict[str, Any] = {}
    for number, (strategy, ranks) in enumerate(
        [("branches", 3), ("ddp", 2), ("branches", 2), ("single", 1)], start=1
    ):
        found = train(
            "branch_tasks:Towers",
            "ema=0.9",
            strategy=strategy,
            ranks=ranks,
            steps=5 * number,
            **common,
            **resume,
        )
        resume = {"resume": str(found.run_dir)}
    for name in ("weights", "average"):
        ours, theirs = (load_file(run.run_dir / f"{name}.safetensors") for run in (found, wanted))
        assert difference(ours, theirs) < 1e-10, name


@pytest.mark.slow
def test_check_calls_it_equal(check: Check) -> None:
    verdict = check("branch_tasks:Towers", strategy="branches", ranks=2, steps=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("task", "found"),
    [
        ("Nested", "'towers.a.first' within 'towers.a'"),
        ("Listed", "'towers', a ModuleDict"),
        ("Unknown", "'towers.d' in branches"),
        ("Far", "'towers.b' on rank 2, of 2"),
        ("Unnamed", "no branches of Net"),
        ("OneDropout", "a Dropout that 'left' and 'right' share"),
        ("Inplace", "into 'right' is written in place by it"),
        ("Counting", "writes right.2.count"),
        ("Piecewise", "weights of a branch of another rank"),
        ("Written", "into 'left' is written in place after it is called"),
        ("Applied", "an autograd.Function that forward applies"),
    ],
)
def test_what_cannot_be_run_apart_is_refused(task: str, found: str, train: Train) -> None:
    with pytest.raises(AllranksError, match=found):
        train(f"branch_tasks:{task}", strategy="branches", ranks=2, steps=3)


@pytest.mark.slow
def test_more_ranks_than_branches_and_bits_are_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="3 branches, and none for rank 3"):
        train("branch_tasks:Towers", strategy="branches", ranks=4, steps=1)
    with pytest.raises(RequestError, match="bitwise"):
        train("branch_tasks:Towers", strategy="branches", ranks=2, steps=1, bitwise=True)


def test_a_rank_holds_its_branches_and_the_trunk(on_ranks: Callable[..., Any]) -> None:
    job = {"strategy": "branches", "steps": 3}
    on_ranks(2, "branch_tasks:bytes_and_memory", {"task": "Pairs", "job": job})


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_job_goes_on(
    train: Train, references: dict[str, Any]
) -> None:
    _, weights = reference_for("Towers", train, references, "branch_tasks")
    check_that_it_goes_on_after_a_kill(train, "branch_tasks:Towers", "branches", weights)
