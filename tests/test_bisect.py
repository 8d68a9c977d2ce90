"""`allranks bisect`: a fault that was planted is named by its step, its tensor and its operator."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.files import as_json
from allranks.errors import RequestError
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import Result
from allranks.tools.bisect import bisect

Train = Callable[..., Result]
PROGRAM = "bit_flips:Planted"
JOB: dict[str, Any] = {
    **{"strategy": "ddp", "ranks": 2, "bitwise": True, "steps": 8, "first_check": "off"},
    **{"digest_every": 3, "checkpoint_every": 4, "witness": "off"},
}


def faulty(train: Train, kind: str, at: int = 6, **job: Any) -> Path:
    settings = (f"fault={kind}", f"at={at}", "rank=1", "of=0")
    return train(PROGRAM, *settings, **{**JOB, **job}).run_dir


@pytest.fixture
def sound(train: Train) -> Path:
    return train(PROGRAM, **JOB).run_dir


@pytest.mark.slow(but=1, most=4)
@pytest.mark.parametrize(
    ("kind", "strategy", "stage", "operator"),
    [
        (
            *("moment", "zero1", "state after the callbacks"),
            ", in the next step: aten.lerp_.Scalar of exp_avg of '0.weight' (update), "
            "[3:6, 0:2, 0:3, 0:3]",
        ),
        ("function", "ddp", "losses", "planted.activation.default in 7 (forward), bit_flips.py"),
        (
            *("weight", "ddp", "state after the callbacks"),
            ", in the next step: aten.convolution.default in 0 (forward)",
        ),
        (
            *("gradient", "ddp", "gradient"),
            ": aten.add_.Tensor of gradient of '0.weight' (accumulation)",
        ),
        (
            *("generator", "ddp", "generator after the callbacks"),
            ": aten.rand.default in Plant.on_step() (callbacks), bit_flips.py",
        ),
    ],
)
def test_step_tensor_and_operator_are_named(
    server: ForkServer, train: Train, kind: str, strategy: str, stage: str, operator: str
) -> None:
    """On rank 1 of two; the runs are digested every third step."""
    sound = train(PROGRAM, **{**JOB, "strategy": strategy}).run_dir
    result = bisect(sound, faulty(train, kind, strategy=strategy), server)
    assert result.first is not None and not result.notes
    assert (result.step, result.before, result.first.stage) == (6, 5, stage)
    assert result.first.ranks == (() if kind == "gradient" else (1,))
    assert "task.fault" in " ".join(result.settings)
    line = "operator: " if kind == "function" else "first operator with other inputs"
    assert f"\n{line}{operator}" in str(result)
    assert json.loads(as_json(result.to_data()))["first"]["stage"] == stage


@pytest.mark.slow
def test_what_the_newest_checkpoint_does_not_hold_is_made_again_from_an_older_one(
    server: ForkServer, train: Train
) -> None:
    """A moment of rank 1 alone changes after step 3: step 4 updates with it, and step 5 shows it.

    The digests of step 3 do not: another rank digests that tensor.
    """
    job = {**JOB, "ranks": 3, "steps": 9}
    sound = train(PROGRAM, **job).run_dir
    run = train(PROGRAM, "fault=moment", "at=3", "rank=1", "of=2", **job).run_dir
    result = bisect(sound, run, server)
    assert result.known == 5 and result.first is not None and not result.notes
    assert (result.step, result.first.ranks) == (3, (1,))


@pytest.mark.slow
def test_a_function_that_lies_on_one_rank_is_named_from_one_run(
    server: ForkServer, train: Train
) -> None:
    """The run is made again on its ranks, and beside it in one process."""
    result = bisect(faulty(train, "function"), None, server)
    assert result.step == 6 and result.first is not None and result.first.operators is not None
    assert result.first.operators.name == "planted.activation.default"


def test_equal_runs_are_equal_on_other_ranks(server: ForkServer, train: Train, sound: Path) -> None:
    other = train(PROGRAM, **{**JOB, "strategy": "zero1", "ranks": 3}).run_dir
    result = bisect(sound, other, server)
    assert result.is_equal and (result.digests, result.losses) == (4, 8)
    assert "equal in all that both have" in str(result)


@pytest.mark.slow
def test_a_fault_that_does_not_come_again_is_the_answer(
    server: ForkServer, train: Train, sound: Path
) -> None:
    """A bit of a weight on rank 0 flips before the sixth step, and never again."""
    run = train(PROGRAM, **JOB, inject="corrupt@step=5").run_dir
    result = bisect(run, None, server)
    assert result.step == 6 and "loss" in result.names
    assert "A cannot be made again here" in str(result)
    result = bisect(sound, run, server)
    assert (result.step, result.known) == (6, 6), "its loss is written"
    assert "B cannot be made again here" in str(result)


@pytest.mark.slow
def test_a_norm_that_differs_on_its_own_ranks_comes_before_a_later_loss(
    server: ForkServer, train: Train
) -> None:
    """One process does not compare norms, and without digests sees the loss of the next step."""
    flags = {**JOB, "digest_every": 0, "checkpoint_every": None}
    run = train(PROGRAM, **flags, inject="flip@rank=1,of=gradient,step=5").run_dir
    result = bisect(run, None, server)
    assert result.known > 6 and (result.step, result.names) == (6, ["grad_norm"])


def test_what_cannot_be_compared_is_refused(train: Train, sound: Path, tmp_path: Path) -> None:
    def refused(*runs: Path) -> str:
        with pytest.raises(RequestError) as error:
            bisect(*runs)
        assert error.value.asked.startswith("bisect")
        return error.value.found

    other = train("contract_tasks:Plain", **JOB).run_dir
    assert "runs of bit_flips:Planted and of contract_tasks:Plain" in refused(sound, other)
    job = (sound / "job.toml").read_text()
    copy = tmp_path / "rounded"
    shutil.copytree(sound, copy)
    (copy / "job.toml").write_text(job.replace("bitwise = true", "bitwise = false"))
    assert "on 2 ranks" in refused(sound, copy)
    (copy / "job.toml").write_text(job)
    flags = {**JOB, "steps": 10, "checkpoint_every": 10, "resume": str(sound)}
    branch = train(PROGRAM, **flags).run_dir
    assert bisect(branch, branch).is_equal
    shutil.rmtree(sound / "checkpoints")
    shutil.rmtree(branch / "checkpoints")
    assert "is gone or does not hold" in refused(branch, branch)
    for name in ("digests.jsonl", "metrics.jsonl"):
        (copy / name).unlink()
    assert "no step of which both have digests" in refused(sound, copy)
    assert "no job.toml" in refused(sound, tmp_path)
