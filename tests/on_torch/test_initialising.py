"""Weights that the whole first batch decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kinds_tasks
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.tools.check.against_single import CheckPlan, check_against_one
from allranks.torch import Trainer
from conftest import Train


@pytest.mark.slow
def test_every_rank_is_given_the_whole_first_batch(train: Train) -> None:
    flags = {"precision": "fp64", "steps": 6}
    wanted = train("kinds_tasks:ActNormed", **flags)
    for more in ({"ranks": 1, "micro_batch": 4}, {"ranks": 3}, {"ranks": 2, "bitwise": True}):
        found = train("kinds_tasks:ActNormed", **flags, **more)
        for name in ("weights.safetensors", "average.safetensors"):
            ours, theirs = (load_file(r.run_dir / name) for r in (found, wanted))
            assert float(ours["1.seen"]) == 22
            for key, tensor in theirs.items():
                torch.testing.assert_close(ours[key], tensor, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_the_bits_are_equal(train: Train) -> None:
    jobs = [train("kinds_tasks:ActNormed", bitwise=True, steps=3, ranks=n) for n in (1, 3)]
    assert len({job.summary["weights_sha256"] for job in jobs}) == 1


def test_it_is_done_once_and_not_when_a_training_goes_on() -> None:
    task = kinds_tasks.ActNormed()
    with Trainer(task, Job(steps=4)) as trainer:
        state = None
        for batch in trainer.batches():
            trainer.step(batch)
            if batch.index == 1:
                state = trainer.state()
        wanted = {name: tensor.clone() for name, tensor in trainer.weights()}
    assert state is not None
    with Trainer(task, Job(steps=4)) as trainer:
        trainer.load_state(state)
        for batch in trainer.batches():
            trainer.step(batch)
        for name, tensor in trainer.weights():
            assert torch.equal(tensor, wanted[name]), name


@pytest.mark.slow
def test_check_begins_after_it(tmp_path: Path, server: ForkServer) -> None:
    resolved = resolve("kinds_tasks:ActNormed", {"ranks": 2, "steps": 3, "precision": "fp64"}, ())
    verdict = check_against_one(resolved, tmp_path, server, CheckPlan((2,), 2, shards=8))
    assert verdict.equal, str(verdict)
    assert verdict.looks[0].comparison.largest < 1e-12


def test_parameters_are_written_in_place(train: Train) -> None:
    with pytest.raises(RequestError, match=r"write into them: parameter.copy_"):
        train("kinds_tasks:Rebinds", ranks=2, steps=2)
