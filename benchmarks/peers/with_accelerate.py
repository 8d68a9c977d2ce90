"""The training of a peer with Accelerate, as in its guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_loop import PeerLoop


class AccelerateLoop(PeerLoop):
    """`prepare`, `backward` and `reduce` are those of the `Accelerator`."""

    def __init__(self, nodes: int = 1) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.rank, self.ranks = self.accelerator.process_index, self.accelerator.num_processes

    def prepare(self, model: nn.Module, optimizer_of: Callable[[Any], Optimizer]) -> None:
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer_of(model))

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def mean(self, loss: Tensor) -> float:
        mean: Any = self.accelerator.reduce(loss.detach(), "mean")
        return float(mean)

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()
