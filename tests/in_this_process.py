"""Trainings in this process, with several devices that are all the CPU, beside `single`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contract_tasks
from allranks.job.job import Job
from allranks.torch import Trainer

STEPS = 5  # the fifth batch of `contract_tasks` has 5 samples, on 5 of 8 shards


@pytest.fixture(autouse=True)
def one_thread_each(no_leaks: None) -> Iterator[None]:
    """Replicas or pieces with several threads each stand in each other's way on a small machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(task: Any, steps: int = STEPS, **job: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The state of the model after some steps in this process, and the losses."""
    with Trainer(task, Job(**{"precision": "fp64", **job})) as trainer:
        losses = [trainer.step(batch).loss for batch in trainer.batches(steps=steps)]
        state = trainer.strategy.model.state_dict()
        return {name: tensor.clone() for name, tensor in state.items()}, losses


def assert_equal(found: Any, wanted: Any) -> None:
    assert found[1] == pytest.approx(wanted[1], rel=1e-12)
    assert found[0].keys() == wanted[0].keys()
    for name, tensor in wanted[0].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=1e-11, atol=1e-13)


def with_model(make: Callable[[], nn.Module], **methods: Any) -> Any:
    return type("Changed", (contract_tasks.Plain,), {"model": lambda self: make(), **methods})()
