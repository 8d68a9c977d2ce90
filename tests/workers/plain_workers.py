"""What runs in the ranks that are held beside a plain loop: one task, several settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import plain_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.model.reals import write_tensors
from allranks.training.rank_program import fit


def trained(task: Any, job: Job, world: World) -> dict[str, torch.Tensor]:
    """The weights and buffers after the job, and the average as `average/…`."""
    with Trainer(task, job, world=world) as trainer:
        assert fit(trainer)
        found = {name: tensor.clone() for name, tensor in trainer.weights()}
        average = trainer.strategy.step.average
        if average is not None:
            with average.in_place():
                averages = {n: t.clone() for n, t in trainer.weights() if n in average.names}
            found |= {f"average/{name}": tensor for name, tensor in averages.items()}
    return found


def settings_in_turn(argument: dict[str, Any]) -> None:
    """Train `task` once with each of `settings`; every rank saves what it has at the end."""
    torch.set_num_threads(1)
    world = World.from_environment()
    for number, setting in enumerate(argument["settings"]):
        job = Job(precision="fp64", steps=plain_tasks.STEPS, **setting)
        own = replace(world, store=f"{world.store}-{number}" if world.store else "")
        found = trained(getattr(plain_tasks, argument["task"])(), job, own)
        write_tensors(Path(argument["out"]) / f"{number}-{world.rank}.safetensors", found)


def refused(argument: dict[str, Any]) -> None:
    """Every rank refuses to train `task`, at the step and in the words that are given.

    Without the witness: it compares the ranks one step earlier, and says that they drift.
    """
    torch.set_num_threads(1)
    job = Job(precision="fp64", steps=plain_tasks.STEPS, witness="off", **argument["setting"])
    with Trainer(getattr(plain_tasks, argument["task"])(), job) as trainer:
        with pytest.raises(RequestError, match=argument["match"]):
            fit(trainer)
        assert trainer.progress.updates == argument["updates"]


def stop_and_go_on(argument: dict[str, Any]) -> None:
    """A training that saves itself and one that goes on from there:
    the bits of one that does not."""
    torch.set_num_threads(1)
    world = World.from_environment()
    make = getattr(plain_tasks, argument["task"])
    weights = []
    for number, parts in enumerate(([plain_tasks.STEPS], [argument["stop"], plain_tasks.STEPS])):
        for part, steps in enumerate(parts):
            run_dir = str(Path(argument["out"]) / f"run-{number}")
            job = Job(precision="fp64", steps=steps, run_dir=run_dir, **argument["setting"])
            store = f"{world.store}-{number}-{part}" if world.store else ""
            with Trainer(make(), job, world=replace(world, store=store)) as trainer:
                trainer.resume()
                assert fit(trainer)
                trainer.save()
                found = {name: tensor.clone() for name, tensor in trainer.weights()}
                average = trainer.strategy.step.average
                if average is not None:
                    with average.in_place():
                        found |= {f"average/{n}": t.clone() for n, t in trainer.weights()}
        weights.append(found)
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
