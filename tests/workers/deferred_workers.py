"""Ranks that build a model, and measure what they hold meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
SLOW_S = 0.3  # of a constructor, in which another rank would begin if it could


@dataclass(kw_only=True)
class Large(Words):
    """A GPT of 53 MB, of whose weights the largest has 8; notes when it was built."""

    on_meta: bool = False
    built: list[float] = field(default_factory=list)

    def model(self) -> nn.Module:
        begun = time.monotonic()
        with torch.device("meta" if self.on_meta else "cpu"):
            model = GPT(SHAPE)
        time.sleep(SLOW_S)
        self.built[:] = begun, time.monotonic()
        return model


class Peak:
    """The bytes that tensors on the host had, at most and at the end, as the allocator says."""

    bytes = 0
    at_the_end = 0


@contextmanager
def measured() -> Iterator[Peak]:
    found = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            found.at_the_end += event.nbytes()
            found.bytes = max(found.bytes, found.at_the_end)


def halves_of_a_large_model(argument: dict[str, Any]) -> None:
    """Each rank writes what it held, when it built, and its half of each weight."""
    fake_sharded.register()
    task = Large(on_meta=argument["on_meta"])
    with measured() as peak:
        trainer = Trainer(task, Job(strategy=fake_sharded.NAME, seed=5))
    with trainer:
        strategy: Any = trainer.strategy
        halves: dict[str, Tensor] = {n: p.detach() for n, p in strategy.held.items()}
        rank = trainer.comm.rank
    folder = Path(argument["folder"])
    torch.save(halves, folder / f"{rank}.pt")
    record = {"peak": peak.bytes, "at_the_end": peak.at_the_end, "built": task.built}
    (folder / f"{rank}.json").write_text(json.dumps(record))
