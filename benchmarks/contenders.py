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

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from workloads import Workload, batches, task_of

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer

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


class Loop(Contender):
    """The loop of every tutorial; `prepare` makes its `model` and `optimizer`."""

    model: Any
    optimizer: Any

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def logged(self, loss: torch.Tensor) -> float:
        return loss.item()

    def run(self, steps: int) -> None:
        for inputs, labels in islice(self.batches, steps):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(inputs), labels)
            self.backward(loss)
            self.optimizer.step()
            self.losses.append(self.logged(loss))


class DDPLocal(Loop):
    """As in the tutorial of torch, with the rank's own loss."""

    options: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        self.model = DistributedDataParallel(self.workload.model(), **self.options)
        self.optimizer = self.workload.optimizer(self.model)


class DDPGlobal(DDPLocal):
    """As in the tutorial of torch, with the mean loss over all ranks."""

    def logged(self, loss: torch.Tensor) -> float:
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / self.world.size


class DDPTuned(DDPGlobal):
    """With the options that save time."""

    options: ClassVar[dict[str, Any]] = {
        "gradient_as_bucket_view": True,
        "forward_sync_buffers": False,
    }


class FabricLocal(Loop):
    """Lightning Fabric, as in its guide."""

    def prepare(self) -> None:
        self.fabric = Fabric(accelerator="cpu", strategy="ddp", devices=self.world.size)
        self.fabric.launch()
        model = self.workload.model()
        self.model, self.optimizer = self.fabric.setup(model, self.workload.optimizer(model))

    def backward(self, loss: torch.Tensor) -> None:
        self.fabric.backward(loss)


class FabricGlobal(FabricLocal):
    """With the mean loss over all ranks."""

    def logged(self, loss: torch.Tensor) -> float:
        mean: Any = self.fabric.all_reduce(loss.detach(), reduce_op="mean")
        return float(mean)


class AccelerateLocal(Loop):
    """Accelerate, as in its guide."""

    def prepare(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        assert self.accelerator.num_processes == self.world.size
        model = self.workload.model()
        optimizer = self.workload.optimizer(model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)


class AccelerateGlobal(AccelerateLocal):
    """With the mean loss over all ranks."""

    def logged(self, loss: torch.Tensor) -> float:
        mean: Any = self.accelerator.reduce(loss.detach(), "mean")
        return float(mean)


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


CONTENDERS: dict[str, Callable[[Workload, World], Contender]] = {
    "raw": Raw,
    "ddp-local": DDPLocal,
    "ddp-global": DDPGlobal,
    "ddp-global-again": DDPGlobal,
    "ddp-tuned": DDPTuned,
    "fabric-local": FabricLocal,
    "fabric-global": FabricGlobal,
    "accelerate-local": AccelerateLocal,
    "accelerate-global": AccelerateGlobal,
    "allranks": AllRanks,
    "allranks-8": AllRanks8,
    "allranks-bitwise": Bitwise8,
    "allranks-bitwise-N": BitwiseN,
}
