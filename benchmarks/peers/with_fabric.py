"""The training of a peer with Lightning Fabric, as in its guide."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_loop import PeerLoop


class FabricLoop(PeerLoop):
    """`setup`, `backward` and `all_reduce` are those of `Fabric`."""

    def __init__(self, nodes: int = 1) -> None:
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.fabric = Fabric(accelerator="cpu", strategy="ddp", devices=devices, num_nodes=nodes)
        self.fabric.launch()
        self.rank, self.ranks = self.fabric.global_rank, self.fabric.world_size

    def prepare(self, model: nn.Module, optimizer_of: Callable[[Any], Optimizer]) -> None:
        self.model, self.optimizer = self.fabric.setup(model, optimizer_of(model))

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def mean(self, loss: Tensor) -> float:
        mean: Any = self.fabric.all_reduce(loss.detach(), reduce_op="mean")
        return float(mean)

    def barrier(self) -> None:
        self.fabric.barrier()
