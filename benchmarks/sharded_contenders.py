"""The loops that `strategies.py` runs side by side: ours, and torch's own parts, used by hand.

    ddp              DistributedDataParallel, with the mean loss over all ranks
    ddp-again        the same loop a second time: how much equal loops differ here
    zero-by-hand     DistributedDataParallel with torch's ZeroRedundancyOptimizer
    fsdp2-by-hand    `fully_shard` on each repeated block and on the model
    allranks NAME    our Trainer with that strategy

All keep the mean loss over all ranks of every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from contenders import DDP_GLOBAL, STEPS_LIMIT, Contender, OfPeer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch_loop import PeerLoop
from workloads import Workload, task_of

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer


class ZeroByHand(PeerLoop):
    """As in the tutorial of torch."""

    def prepare(self, model: nn.Module, optimizer_of: Callable[[Any], Optimizer]) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=AdamW, lr=1e-4
        )


class FSDP2ByHand(PeerLoop):
    """As in the tutorial of torch: each repeated block is a unit, and the rest."""

    def prepare(self, model: nn.Module, optimizer_of: Callable[[Any], Optimizer]) -> None:
        mesh = init_device_mesh("cpu", (self.ranks,))
        for child in model.children():
            if isinstance(child, nn.Linear):
                fully_shard(child, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.optimizer = optimizer_of(self.model)


class OfStrategy(Contender):
    """The Trainer, from a script; with as many shards as ranks, unless said."""

    def __init__(self, workload: Workload, world: World, strategy: str, shards: int = 0) -> None:
        self.strategy, self.shards = strategy, shards or world.size
        super().__init__(workload, world)

    def prepare(self) -> None:
        task = task_of(self.workload, self.world.size, self.shards)
        self.trainer = Trainer(task, Job(strategy=self.strategy), world=self.world)
        self.batches = self.trainer.batches(steps=STEPS_LIMIT)

    def run(self, steps: int) -> None:
        for batch in islice(self.batches, steps):
            self.losses.append(self.trainer.step(batch).loss)


OURS = ("ddp", "zero1", "zero2", "fsdp")
CONTENDERS: dict[str, Callable[[Workload, World], Contender]] = {
    "ddp": DDP_GLOBAL,
    "ddp-again": DDP_GLOBAL,
    "zero-by-hand": partial(OfPeer, make=ZeroByHand),
    "fsdp2-by-hand": partial(OfPeer, make=FSDP2ByHand),
    **{f"allranks {name}": partial(OfStrategy, strategy=name) for name in OURS},
}
