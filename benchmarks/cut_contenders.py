"""The loops that `strategies.py` runs side by side where each rank holds a part of every pass.

    ddp, ddp-again   DistributedDataParallel, with the mean loss over all ranks
    tensor-by-hand   `parallelize_module` of torch: Linear layers by columns and by rows, in turns
    gpipe-by-hand, 1f1b-by-hand
                     `torch.distributed.pipelining`, the layers cut into runs of as many weights
    allranks NAME    our Trainer with that strategy

Every rank reads the whole global batch but under `ddp`; a pipeline cuts it into as many
micro-batches as the task has shards. All keep the mean loss over all samples of every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from contenders import DDP_GLOBAL, DEFAULT_SHARDS, Contender, OfPeer
from sharded_contenders import OfStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.optim import Optimizer
from torch_loop import PeerLoop
from workloads import Workload, batches

from allranks.launcher.world import World


class OfWholeBatches(Contender):
    """Every rank reads all samples of a step."""

    def __init__(self, workload: Workload, world: World, **more: Any) -> None:
        super().__init__(workload, world, **more)
        self.batches = batches(replace(workload, batch=workload.batch * world.size), 0, 1)


class TensorByHand(PeerLoop):
    """As in the tutorial of torch."""

    def prepare(self, model: nn.Module, optimizer_of: Callable[[Any], Optimizer]) -> None:
        mesh = init_device_mesh("cpu", (self.ranks,))
        linear = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
        pairs = zip(linear[:-1:2], linear[1:-1:2], strict=False)
        plan: dict[str, Any] = {}
        for first, second in pairs:
            plan |= {first: ColwiseParallel(), second: RowwiseParallel()}
        self.model = parallelize_module(model, mesh, plan)
        self.optimizer = optimizer_of(self.model)


class OfPeerOnWholeBatches(OfWholeBatches, OfPeer):
    """A loop of a peer in which the loss of each rank is that of all samples."""


class PipelineByHand(OfWholeBatches):
    """As in the tutorial of torch; the last stage tells the others the loss, which all keep."""

    schedule: ClassVar[Callable[..., Any]]

    def prepare(self) -> None:
        rank, size = self.world.rank, self.world.size
        children = list(self.workload.model().children())
        self.model = nn.Sequential(*_part(children, size)[rank])
        stage = PipelineStage(self.model, rank, size, torch.device("cpu"))
        self.pipeline = type(self).schedule(stage, DEFAULT_SHARDS, loss_fn=F.cross_entropy)
        self.optimizer = self.workload.optimizer(self.model)

    def run(self, steps: int) -> None:
        rank, last = self.world.rank, self.world.size - 1
        for inputs, labels in islice(self.batches, steps):
            self.optimizer.zero_grad()
            losses: list[Tensor] = []
            given = (inputs,) if rank == 0 else ()
            wanted = {"target": labels, "losses": losses} if rank == last else {}
            self.pipeline.step(*given, **wanted)
            self.optimizer.step()
            mean = torch.stack(losses).detach().mean() if losses else torch.zeros(())
            dist.broadcast(mean, last)
            self.losses.append(mean.item())


class GPipeByHand(PipelineByHand):
    """All forward passes, then all backward passes."""

    schedule = ScheduleGPipe


class OneForwardOneBackwardByHand(PipelineByHand):
    """Forward and backward passes in turn."""

    schedule = Schedule1F1B


def _part(children: list[nn.Module], parts: int) -> list[list[nn.Module]]:
    """Runs of layers with about as many weights each."""
    total = sum(p.numel() for child in children for p in child.parameters())
    found: list[list[nn.Module]] = [[] for _ in range(parts)]
    seen = 0
    for child in children:
        own = sum(p.numel() for p in child.parameters())
        found[min(parts - 1, int((seen + own / 2) / total * parts))].append(child)
        seen += own
    return found


OURS = ("tensor", "gpipe", "1f1b")
CONTENDERS: dict[str, Callable[[Workload, World], Contender]] = {
    "ddp": DDP_GLOBAL,
    "ddp-again": DDP_GLOBAL,
    "tensor-by-hand": partial(OfPeerOnWholeBatches, make=TensorByHand, is_local=True),
    "gpipe-by-hand": GPipeByHand,
    "1f1b-by-hand": OneForwardOneBackwardByHand,
    **{
        f"allranks {name}": partial(OfStrategy, strategy=name, shards=DEFAULT_SHARDS)
        for name in OURS
    },
}
