"""What a strategy is given, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allranks.job.loss_scale import LossScale
from allranks.torch.comm.comm import Comm
from allranks.torch.model.layers import Scope
from allranks.torch.model.precision import Precision
from allranks.torch.task import Task


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy is given: the task, the ranks, the options of its card with their values."""

    task: Task
    comm: Comm
    scope: Scope
    options: Mapping[str, Any]
    precision: Precision
    bitwise: bool = False
    loss_scale: LossScale | None = None
