"""Optimizers that look at whole tensors, where ranks hold parts of them: as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.errors import ProgramError, RequestError
from conftest import Train
from test_check import Check, check
from test_every_strategy import difference

__all__ = ["check"]

STEPS = 12
NAMES = ["lars", "lamb", "muon", "adafactor", "rowwise", "by group"]
SETTINGS = [
    *(("zero1", 3), ("zero1:reduce=tree", 3), ("zero2", 2), ("fsdp", 3), ("fsdp:reduce=tree", 2)),
    *(("hsdp:shard=2", 4), ("tensor", 2), ("tensor", 3), ("tensor:data=2", 4), ("1f1b", 2)),
]


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    """What `single` made with each optimizer, once for all tests."""
    return {}


def weights_of(train: Train, name: str, strategy: str, ranks: int, **job: Any) -> Any:
    result = train(
        "whole_tasks:Whole", f"name={name}", strategy=strategy, ranks=ranks, precision="fp64", **job
    )
    average = load_file(result.run_dir / "average.safetensors")
    found = {f"average of {n}": tensor for n, tensor in average.items()}
    return {**load_file(result.run_dir / "weights.safetensors"), **found}, result


@pytest.mark.slow(but=1, most=5)
@pytest.mark.thinned(1, ("strategy,ranks", SETTINGS), ("name", NAMES))
def test_updates_are_those_of_one_process(
    name: str, strategy: str, ranks: int, train: Train, wanted: dict[str, Any]
) -> None:
    if name not in wanted:
        wanted[name], _ = weights_of(train, name, "single", 1, steps=STEPS)
    found, result = weights_of(train, name, strategy, ranks, steps=STEPS)
    assert difference(found, wanted[name]) < 1e-10
    sent = result.summary["sent_bytes"]["gradients"] / STEPS
    assert result.summary["card_bytes_per_step"] == pytest.approx(sent, rel=0.05)


@pytest.mark.slow
def test_checkpoints_cross_over(train: Train, wanted: dict[str, Any]) -> None:
    """What is cut, what is whole, and what one rank has whole: 12 steps of one process."""
    if "by group" not in wanted:
        wanted["by group"], _ = weights_of(train, "by group", "single", 1, steps=STEPS)
    job: dict[str, Any] = {"checkpoint_every": 2}
    chain = [("zero2", 3), ("zero2", 2), ("single", 1), ("tensor", 2), ("fsdp", 3), ("1f1b", 2)]
    for number, (strategy, ranks) in enumerate(chain, 1):
        found, run = weights_of(train, "by group", strategy, ranks, steps=2 * number, **job)
        job["resume"] = str(run.run_dir)
    assert difference(found, wanted["by group"]) < 1e-10


@pytest.mark.slow
def test_bits_are_those_of_one_process(train: Train) -> None:
    program, job = "whole_tasks:Whole", {"bitwise": True, "checkpoint_every": 3}
    whole = train(program, strategy="single", steps=9, **job)
    run = train(program, strategy="zero2", ranks=3, steps=3, **job)
    run = train(program, strategy="zero1", ranks=2, steps=6, resume=str(run.run_dir), **job)
    run = train(program, strategy="fsdp", ranks=2, steps=9, resume=str(run.run_dir), **job)
    assert run.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.slow(most=2)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor"])
def test_what_is_kept_lies_whole_on_one_rank(strategy: str, on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "whole_tasks:state_lies_whole_on_one_rank", {"strategy": strategy})


@pytest.mark.slow
def test_check_calls_it_equal(check: Check) -> None:
    verdict = check("whole_tasks:Whole", strategy="zero2", ranks=3, steps=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor"])
def test_hyper_parameters_that_a_callback_sets_are_asked_about(
    strategy: str, train: Train, wanted: dict[str, Any]
) -> None:
    """With a decay, from the fourth step on, it needs weights whole; what it has kept is cut."""
    if "by decay" not in wanted:
        wanted["by decay"], _ = weights_of(train, "by decay", "single", 1, steps=6)
    found, _ = weights_of(train, "by decay", strategy, 2, steps=6)
    assert difference(found, wanted["by decay"]) < 1e-10
    with pytest.raises(ProgramError, match="before its first step with these hyper-parameters"):
        weights_of(train, "by decay, kept", strategy, 2, steps=6)


def test_what_is_kept_from_the_start_is_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="before its first step"):
        train("whole_tasks:Whole", "name=kept from the start", strategy="zero1", ranks=2, steps=1)


def test_stages_refuse_what_looks_at_several_parameters(train: Train) -> None:
    with pytest.raises(RequestError, match="updates every parameter by itself"):
        train("tensor_tasks:WholeTensors", strategy="1f1b", ranks=2, steps=1)


PARTS = (("zero1", 3), ("fsdp", 2), ("tensor", 2), ("gpipe", 2), ("fsdp:tensor=2", 2))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), PARTS)
def test_an_optimizer_is_made_as_for_whole_weights(strategy: str, ranks: int, train: Train) -> None:
    """Rates that follow from shapes are those of one process; what is drawn is so, or refused."""
    job: dict[str, Any] = {"precision": "fp64", "steps": 3}
    by_parts: dict[str, Any] = {**job, "strategy": strategy, "ranks": ranks}

    def weights(by: str, **flags: Any) -> dict[str, Any]:
        run = train("zero_tasks:Chosen", "width=9", f"by={by}", **flags)
        return load_file(run.run_dir / "weights.safetensors")

    assert difference(weights("shape", **by_parts), weights("shape", **job)) < 1e-10
    if strategy == "zero1":
        for by in ("draws", "numbers"):
            assert difference(weights(by, **by_parts), weights(by, **job)) < 1e-10
        return
    with pytest.raises(RequestError, match=r"other numbers in '0\.weight' after it"):
        weights("draws", **by_parts)
    words = "take no rate from the numbers of a weight"
    if strategy == "gpipe":  # of the weights of others it has no numbers
        words = r"line \d+ of .*zero_tasks.py reads the numbers of a weight: rates = "
    for by in ("numbers", "arrays") if strategy == "gpipe" else ("numbers",):
        with pytest.raises(RequestError, match=words):
            weights(by, **by_parts)
