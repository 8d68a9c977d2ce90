"""Trainings with the optimizers for large batches,
and a schedule that counts updates of the job."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from allranks.torch.optimizers.layerwise import LAMB, LARS
from allranks.training.schedules import linear_scaling, polynomial, product
from contract_tasks import Images


@dataclass(kw_only=True)
class LargeBatch(Images):
    """Layers of two and of four dimensions, biases, BatchNorm; a rate that changes every step."""

    name: str = "lars"

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.name == "lamb":
            return LAMB(model.parameters(), lr=0.01)
        return LARS(model.parameters(), lr=1.0, trust=0.02, weight_decay=1e-4)

    def schedule(self, step: int) -> float:
        return product(
            linear_scaling(self.batch_size, per=8, warmup=4), polynomial(20, power=2, floor=0.1)
        )(step)
