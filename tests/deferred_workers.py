"""Ranks that build a model tensor by tensor, and measure what they hold meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fake_sharded
from allranks.job.job import Job
from allranks.programs.models.gpt import GPT, GPTShape
from allranks.torch import Trainer
from contract_tasks import Words

SHAPE = GPTShape(vocabulary=8000, context=64, width=256, layers=14, heads=4)


@dataclass(kw_only=True)
class Large(Words):
    """A GPT of 53 MB, of whose weights the largest has 8."""

    def model(self) -> nn.Module:
        return GPT(SHAPE)


class Hooked(Words):
    """A model that cannot be recorded."""

    def model(self) -> nn.Module:
        model = super().model()
        model.mix.weight.register_hook(lambda gradient: gradient)
        return model


class Peak:
    """The most bytes that tensors on the host had at once, by the events of the allocator."""

    bytes = 0


@contextmanager
def measured() -> Iterator[Peak]:
    found = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    held = 0
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            found.bytes = max(found.bytes, held)


def halves_of_a_large_model(argument: dict[str, Any]) -> None:
    """Each rank writes what it held at most, and its half of each weight."""
    fake_sharded.register()
    with measured() as peak, Trainer(Large(), Job(strategy=fake_sharded.NAME, seed=5)) as trainer:
        assert trainer.built.recorded is not None, trainer.built.why_whole
        strategy: Any = trainer.strategy
        halves: dict[str, Tensor] = {n: p.detach() for n, p in strategy.held.items()}
        rank = trainer.comm.rank
        shapes = {name: tuple(shape) for name, shape in strategy.shapes.items()}
    folder = Path(argument["folder"])
    torch.save((halves, shapes), folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps({"peak": peak.bytes}))
