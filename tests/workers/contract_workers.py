"""What runs in the ranks of the contract test: loops of one's own over `Trainer`."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import contract_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.model.weights import weights_sha256


def _trainer(argument: dict[str, Any], attempt: str = "") -> Trainer:
    torch.set_num_threads(1)
    world = World.from_environment()
    if world.store:
        world = replace(world, store=world.store + attempt)
    tasks = import_module(argument.get("module", "contract_tasks"))
    task = getattr(tasks, argument["task"])(**argument.get("fields", {}))
    return Trainer(task, Job(**argument["job"]), world=world)


def train_and_save(argument: dict[str, Any]) -> None:
    """Train; every rank saves its weights."""
    with _trainer(argument) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        weights = {name: tensor.contiguous() for name, tensor in trainer.weights()}
        save_file(weights, Path(argument["out"]) / f"rank-{trainer.world.rank}.safetensors")


def go_on_from_a_state(argument: dict[str, Any]) -> None:
    """k steps, a state, k more; then another trainer goes on from that state: equal bits."""
    steps = argument["steps"]
    with _trainer(argument, "-first") as trainer:
        for batch in trainer.batches(steps=steps):
            trainer.step(batch)
        state = copy.deepcopy(trainer.state())
        for batch in trainer.batches(steps=2 * steps):
            trainer.step(batch)
        assert trainer.progress.batch_index == 2 * steps
        wanted = weights_sha256(trainer.weights())
    with _trainer(argument, "-second") as trainer:
        trainer.load_state(state)
        for batch in trainer.batches(steps=2 * steps):
            trainer.step(batch)
        assert trainer.progress.batch_index == 2 * steps
        assert weights_sha256(trainer.weights()) == wanted


def stop_or_resume(argument: dict[str, Any]) -> None:
    """Train to `until`, from the state in the file `load` if there is one; the leader saves it."""
    with _trainer(argument) as trainer:
        if argument["load"]:
            trainer.load_state(torch.load(argument["load"], weights_only=True))
        for batch in trainer.batches(steps=argument["until"]):
            trainer.step(batch)
        if trainer.world.is_leader:
            torch.save(trainer.state(), argument["save"])


def first_bucket_leaves_early(argument: dict[str, Any]) -> None:
    """The first bucket of `ddp` is under way before backward has reached the first layer."""
    with _trainer(argument) as trainer:
        buckets = trainer.strategy.buckets  # type: ignore[attr-defined]
        order: list[str] = []
        launch, finished = buckets._order._leave, buckets.gradient_finished

        def launched(bucket: int) -> None:
            order.append("launch")
            launch(bucket)

        def gradient(position: int) -> None:
            finished(position)
            if position == 0:
                order.append("first layer")

        buckets._order._leave = launched
        trainer.strategy.step.on_gradient = gradient
        trainer.step(next(trainer.batches()))
        assert len(buckets.flats) > 2
        assert order.index("launch") < order.index("first layer"), order


def join_by_hand(argument: None) -> None:
    """A process group of one's own is used if the environment agrees with it, else refused."""
    world = World.from_environment()
    store = torch.distributed.FileStore(world.store, world.size)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=2)
    task = contract_tasks.Plain()
    with pytest.raises(RequestError, match="rank 0 of 1"):  # each would have trained alone
        Trainer(task, world=World())
    with Trainer(task, world=world) as trainer:
        trainer.step(next(trainer.batches()))
    assert torch.distributed.is_initialized(), "the group belongs to whoever made it"
    torch.distributed.destroy_process_group()
