"""The loops that `step.py` runs side by side in the same processes, one class each.

All train the same model with the same optimizer on the same samples, with one thread per rank, and
keep the loss of each step as a Python number:

    raw              forward, backward, update; no communication, no loss: what a step cannot beat
    ddp-local        DistributedDataParallel, written by hand; each rank keeps its own mean loss
    ddp-global       the same; the mean over all ranks, which takes an all-reduce of its own
    ddp-global-again the same loop a second time: how much equal loops differ in this measurement
    ddp-tuned        ddp-global with gradient_as_bucket_view=True, forward_sync_buffers=False
                     (which leaves each rank with running statistics of its own)
    fabric-local, fabric-global, accelerate-local, accelerate-global
                     the same two ways to log, by each wrapper's own means; data loaders are not
                     wrapped, so only the step is compared
    allranks         our Trainer; the loss it reports is the mean over all ranks, always. Shards as
                     many as ranks, so that BatchNorm sees what it sees under DDP
    allranks-8       the same with the default of 8 shards
    allranks-bitwise, allranks-bitwise-N
                     equal bits on any number of ranks up to the shards: 8, or as many as ranks

Equal logging means `global`. Nothing is written to a file by any of them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from workloads import Workload, batches, task_of

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from torch_loop import Hand, PeerLoop
from with_accelerate import AccelerateLoop
from with_fabric import FabricLoop

DEFAULT_SHARDS = 8
STEPS_LIMIT = 10**9


class Contender(ABC):
    """A loop that can be run in blocks of steps; `losses` are those it has logged."""

    deterministic = False

    def __init__(self, workload: Workload, world: World) -> None:
        self.workload, self.world = workload, world
        self.losses: list[float] = []
        self.batches: Any = batches(workload, world.rank, world.size)
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Build the model and what goes with it; every rank calls this."""

    @abstractmethod
    def run(self, steps: int) -> None:
        """The next `steps` optimizer steps."""


class Raw(Contender):
    """The arithmetic alone."""

    def prepare(self) -> None:
        self.model = self.workload.model()
        self.optimizer = self.workload.optimizer(self.model)

    def run(self, steps: int) -> None:
        for inputs, labels in islice(self.batches, steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()


class OfPeer(Contender):
    """A loop of `peers/`, with the mean loss over all ranks or, `is_local`, the rank's own."""

    def __init__(
        self,
        workload: Workload,
        world: World,
        make: Callable[[], PeerLoop],
        is_local: bool = False,
    ) -> None:
        self.make, self.is_local = make, is_local
        super().__init__(workload, world)

    def prepare(self) -> None:
        self.loop = self.make()
        assert self.loop.ranks == self.world.size
        self.loop.batch = self.workload.batch
        self.loop.prepare(self.workload.model(), self.workload.optimizer)

    def run(self, steps: int) -> None:
        self.loop.train(islice(self.batches, steps), loss_of, self.note)

    def note(self, loss: torch.Tensor, batch: Any) -> None:
        self.losses.append(loss.item() if self.is_local else self.loop.mean(loss))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The mean loss of a rank's samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


class AllRanks(Contender):
    """The Trainer, from a script."""

    bitwise = False

    def shards(self) -> int:
        return self.world.size

    def prepare(self) -> None:
        task = task_of(self.workload, self.world.size, self.shards())
        self.trainer = Trainer(task, Job(strategy="ddp", bitwise=self.bitwise), world=self.world)
        self.batches = self.trainer.batches(steps=STEPS_LIMIT)

    def run(self, steps: int) -> None:
        for batch in islice(self.batches, steps):
            self.losses.append(self.trainer.step(batch).loss)


class AllRanks8(AllRanks):
    """With the default number of shards."""

    def shards(self) -> int:
        return DEFAULT_SHARDS


class Bitwise8(AllRanks8):
    """Equal bits on 1 to 8 ranks."""

    bitwise = deterministic = True


class BitwiseN(AllRanks):
    """Equal bits on 1 to as many ranks as there are."""

    bitwise = deterministic = True


DDP_GLOBAL = partial(OfPeer, make=Hand)
TUNED = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}
CONTENDERS: dict[str, Callable[[Workload, World], Contender]] = {
    "raw": Raw,
    "ddp-local": partial(OfPeer, make=Hand, is_local=True),
    "ddp-global": DDP_GLOBAL,
    "ddp-global-again": DDP_GLOBAL,
    "ddp-tuned": partial(OfPeer, make=partial(Hand, **TUNED)),
    "fabric-local": partial(OfPeer, make=FabricLoop, is_local=True),
    "fabric-global": partial(OfPeer, make=FabricLoop),
    "accelerate-local": partial(OfPeer, make=AccelerateLoop, is_local=True),
    "accelerate-global": partial(OfPeer, make=AccelerateLoop),
    "allranks": AllRanks,
    "allranks-8": AllRanks8,
    "allranks-bitwise": Bitwise8,
    "allranks-bitwise-N": BitwiseN,
}
