"""`--micro-batch auto`: a pass that runs out of memory gets smaller, and nothing else changes."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from allranks.errors import ProgramError, RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.job.run_folder import read_events
from allranks.launcher.start import Result
from allranks.strategies.shards import smaller_micro_batch
from allranks.torch.trainer import Trainer
from bad_tasks import Good

Train = Callable[..., Result]
NARROW = "memory_tasks:Narrow"


def restarts(result: Result) -> list[dict[str, Any]]:
    return [event for event in read_events(result.run_dir) if event["event"] == "restart"]


def tried(result: Result) -> list[int]:
    """The micro-batches that were tried, one after another."""
    return [event["micro_batch"] for event in restarts(result)]


def test_a_pass_is_halved_in_whole_shards_then_within_a_shard() -> None:
    sizes, samples = [], 20
    while (smaller := smaller_micro_batch(samples, 4, whole=False)) is not None:
        sizes.append(samples := smaller)
    assert sizes == [8, 4, 2, 1]
    assert smaller_micro_batch(5, 4, whole=True) == 4
    assert smaller_micro_batch(4, 4, whole=True) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("ddp", [8, 4]), ("zero2", [8, 4]), ("fsdp", [8, 4]), ("1f1b", [2])],
)
def test_all_ranks_take_what_the_smallest_one_has_room_for(
    train: Train, strategy: str, expected: list[int]
) -> None:
    """Of a pipeline a pass is a shard, 4 samples; of others all of a rank, 16."""
    narrow = f"narrow={3 if strategy == '1f1b' else 6}"
    flags = {"ranks": 2, "strategy": strategy, "precision": "fp64", "first_check": "off"}
    result = train(NARROW, narrow, micro_batch="auto", **flags)
    assert tried(result) == expected and result.summary["micro_batch"] == expected[-1]
    job = tomllib.loads((result.run_dir / "job.toml").read_text())
    assert (job["micro_batch"], job["micro_batch_trial"]) == (expected[-1], True)
    plain = train(NARROW, "narrow=99", "wide=99", **flags)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(result)[name], value, rtol=1e-12, atol=1e-12)


def weights(result: Result) -> dict[str, torch.Tensor]:
    return load_file(result.run_dir / "weights.safetensors")


@pytest.mark.slow
def test_bits_are_kept_and_a_shard_that_does_not_fit_is_an_error(train: Train) -> None:
    flags = {"ranks": 2, "bitwise": True}
    fits = train(NARROW, "narrow=4", micro_batch="auto", **flags)
    plain = train(NARROW, "narrow=99", **flags)
    assert fits.summary["weights_sha256"] == plain.summary["weights_sha256"] and not tried(fits)
    with pytest.raises(ProgramError, match=r"(?s)has no smaller size to try.*--set shards=N"):
        train(NARROW, "narrow=3", micro_batch="auto", **flags)


def test_later_in_the_training_it_goes_on_from_the_checkpoint_and_is_remembered(
    train: Train, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    fault = "out-of-memory@rank=1,step=7"
    flags = {"ranks": 2, "steps": 8, "checkpoint_every": 3, "run_dir": folder}
    result = train("bad_tasks:Good", inject=fault, micro_batch="auto", **flags)
    ((restart),) = restarts(result)
    assert restart["micro_batch"] == 4 and restart["resumes_from"] in (3, 6)  # or it is under way
    assert result.summary["steps"] == 8 and result.summary["restarts"] == 1
    again = resolve("bad_tasks:Good", {"run_dir": folder, "steps": 10}).job
    assert (again.micro_batch, again.micro_batch_trial) == (4, True)
    again = resolve("bad_tasks:Good", {}, (), f"{folder}/job.toml").job
    assert (again.micro_batch, again.micro_batch_trial) == (4, True)
    again = resolve("bad_tasks:Good", {"run_dir": folder, "micro_batch": "auto"}).job
    assert (again.micro_batch, again.micro_batch_trial) == (4, True)
    again = resolve("bad_tasks:Good", {"run_dir": folder, "micro_batch": "3"}).job
    assert (again.micro_batch, again.micro_batch_trial) == (3, False)


@pytest.mark.slow
def test_layers_that_need_whole_shards_keep_them(train: Train) -> None:
    result = train(NARROW, "norm=true", micro_batch="auto", ranks=2)
    assert tried(result) == [8, 4]
    with pytest.raises(ProgramError, match="has no smaller size to try"):
        train(NARROW, "norm=true", "narrow=3", micro_batch="auto", ranks=2)


def test_what_cannot_be_tried_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither a number of samples nor auto") as error:
        resolve("digits", {"micro_batch": "half"})
    assert error.value.exit_code == 2
    with pytest.raises(RequestError, match="at least 1"):
        resolve("digits", {"micro_batch": "0"})
    with pytest.raises(RequestError, match="no trial would end"):
        resolve("digits", {"micro_batch": "auto", "strategy": "ps", "ranks": 2})
    path = tmp_path / "job.toml"
    path.write_text('program = "digits"\nmicro_batch = "auto"\n')
    job = resolve("", {}, (), str(path)).job
    assert (job.micro_batch, job.micro_batch_trial) == (None, True)
    with pytest.raises(RequestError, match="a loop of one's own"):
        Trainer(Good(), dataclasses.replace(Job(), micro_batch_trial=True))
