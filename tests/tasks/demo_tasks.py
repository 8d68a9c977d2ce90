"""Tasks for DeMo: SGD without momentum makes its step of signs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, Optimizer

import contract_tasks
from allranks.programs.digits import Digits


@dataclass(kw_only=True)
class Signed(contract_tasks.Plain):
    """A weight decay too, which is decoupled; `momentum` is refused."""

    momentum: float = 0.0

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1e-2, momentum=self.momentum, weight_decay=0.1)


class SignedPenalised(Signed, contract_tasks.Penalised):
    """With a regularizer, which is refused."""


@dataclass(kw_only=True)
class SignedDigits(Digits):
    """`digits` at its own rate, by SGD."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr)
