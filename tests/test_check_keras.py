"""`check` of the TensorFlow engine: equal of what is equal, and the first thing that is not.

The faults of the engine are planted in the processes of the job alone: each breaks one line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import read_rows
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.tools.check.against_single import CheckPlan, check_against_one, usual_strategy
from allranks.tools.check.check import check_approximate, is_approximate
from allranks.tools.check.verdict import Verdict
from tf_faults import FAULTS, FIRST

RIGHT = [
    *("tf_tasks:Dense", "tf_tasks:Convolutions", "tf_tasks:Augmented", "tf_tasks:Unreached"),
    *("tf_check_tasks:Words", "tf_check_tasks:Clamped", "tf_datasets:Batched", "digits-keras"),
]
JOINED = [
    *(("multi-worker-mirrored", 2), ("multi-worker-mirrored", 3)),
    *(("mirrored:replicas=2", 1), ("mirrored:replicas=3", 1), ("central-storage:replicas=3", 1)),
    ("parameter-server:servers=2,partition=fixed", 1),
]
Check = Callable[..., Verdict]


@pytest.fixture
def check(tf_server: ForkServer, tmp_path: Path) -> Check:
    """`check(program, *settings, **flags)`: the verdict, in float64 on the same ranks only."""

    def run(program: str, *settings: str, **flags: Any) -> Verdict:
        defaults = {"strategy": "multi-worker-mirrored", "ranks": 2, "steps": 5}
        flags = {"engine": "tensorflow", **defaults, **flags}
        own, keep = flags["ranks"], flags.pop("keep", False)
        plan = CheckPlan((own,), own, shards=8, keep=keep)
        resolved = resolve(program, flags, settings)
        checked = check_approximate if is_approximate(resolved.job, own) else check_against_one
        return checked(resolved, tmp_path, tf_server, plan)

    return run


def possible(task: str, joined: tuple[str, int], precision: str) -> bool:
    """Whether there is such a job."""
    return not (joined[0].startswith("parameter-server") and precision == "fp16")


@pytest.mark.slow(most=3)
@pytest.mark.thinned(
    1,
    ("task", RIGHT),
    ("joined", [(one,) for one in JOINED]),
    ("precision", ["fp64", "fp32", "bf16", "fp16"]),
    where=lambda task, joined, precision: possible(task, joined[0], precision),
)
def test_no_false_alarm(
    task: str, joined: tuple[tuple[str, int]], precision: str, check: Check
) -> None:
    ((strategy, ranks),) = joined
    verdict = check(task, strategy=strategy, ranks=ranks, precision=precision)
    assert verdict.equal, str(verdict)
    assert all(look.comparison.steps == 5 for look in verdict.looks), str(verdict)
    assert verdict.deciding.precision == precision
    assert any("no fixed order of sums" in note for note in verdict.not_checked)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    ("task", "stage", "tensor", "hint"),
    [
        ("tf_check_tasks:Centred", "loss", None, "samples that depend on each other"),
        ("tf_tasks:Noisy", "loss", None, "other random numbers"),
        ("tf_check_tasks:OwnMean", "gradient", "sequential/dense/bias", "a sum where the mean"),
        ("tf_check_tasks:Codebook", "buffer", "sequential/__counts/seen", "writes itself"),
        ("tf_check_tasks:Walks", "weight", "sequential/dense/kernel", "each rank updates"),
    ],
)
def test_what_differs_is_found_and_explained(
    task: str, stage: str, tensor: str | None, hint: str, check: Check
) -> None:
    first = check(task).first
    assert first is not None
    assert (first.step, first.stage, first.tensor) == (0, stage, tensor), str(first)
    assert hint in first.hint


@pytest.mark.slow(most=2)
@pytest.mark.cases("name", [*FAULTS][::3], exhaustive=sorted({*FAULTS} - {*[*FAULTS][::3]}))
def test_a_fault_planted_in_the_engine_is_found(name: str, check: Check) -> None:
    fault = FAULTS[name]
    steps = max(2, fault.step + 1)
    verdict = check("tf_check_tasks:Broken", f"fault={name}", *fault.settings, steps=steps)
    first = verdict.first
    assert first is not None, str(verdict)
    assert (first.step, first.stage, first.tensor) == (fault.step, fault.stage, fault.tensor), first
    assert fault.hint in first.hint
    assert len(verdict.looks) == 1


@pytest.mark.slow
def test_replicas_of_one_process_that_drift_are_seen(check: Check, tmp_path: Path) -> None:
    """Each has a file of rows, with its own samples and the digests of its own copy."""
    name = "each replica updates by a gradient of its own"
    joined = {"strategy": "mirrored:replicas=3", "ranks": 1}
    verdict = check("tf_check_tasks:Broken", f"fault={name}", keep=True, **joined)
    first = verdict.first
    assert first is not None and (first.step, first.stage) == (0, "weight"), str(verdict)
    assert "rank 1 does not hold what rank 0 holds" in first.text
    trace = tmp_path / "fp64-1-ranks" / "trace"
    rows = [list(read_rows(trace / f"rank-{replica:03d}.jsonl")) for replica in range(3)]
    assert [[row["step"] for row in one] for one in rows] == [[-1, 0, 1, 2, 3, 4]] * 3
    whole = next(read_rows(tmp_path / "fp64-reference/trace/rank-000.jsonl"), None)
    assert whole is not None and whole["digests"] == rows[0][0]["digests"]
    assert [len(one[1]["ids"]) for one in rows] == [9, 9, 6]  # of 24 in 8 shards
    assert len({one[1]["digests"][f"weight/{FIRST}"] for one in rows}) == 3
    assert len({one[1]["digests"][f"gradient/{FIRST}"] for one in rows}) == 1


@pytest.mark.slow
def test_16_bits_are_looked_at_as_closely_as_float32(check: Check) -> None:
    verdict = check("tf_tasks:Convolutions", precision="bf16", steps=3)
    assert verdict.equal, str(verdict)
    assert [look.tolerance.tensors for look in verdict.looks] == [1e-10, 1e-5]


@pytest.mark.slow
def test_workers_that_work_in_their_own_time_promise_nothing(check: Check) -> None:
    verdict = check("tf_tasks:Dense", strategy="parameter-server")
    assert verdict.equal is None and verdict.drift is not None and verdict.looks == ()


def test_what_is_checked_is_what_would_be_trained() -> None:
    assert usual_strategy("", "digits-keras") == "multi-worker-mirrored"
    assert usual_strategy("torch", "digits-keras") == usual_strategy("", "digits") == "ddp"
    with pytest.raises(RequestError, match="no engine 'jax'"):
        usual_strategy("jax", "digits")
