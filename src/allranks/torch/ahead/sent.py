"""What the row of a step says, once it is read: the numbers of a `StepResult`, and of the tally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allranks.launcher.heartbeat import Heartbeat, SaveThreadHeartbeat
from allranks.torch.ahead.rows import Row
from allranks.torch.data.batch import Batch
from allranks.torch.step.tally import TallyLayout, Totals
from allranks.training.progress import StepResult

HELD = "held back: the next step says what is wrong with it"
OWN = 4  # numbers before those of the tally


def numbers_of(
    held: Tensor, loss: Tensor, norm: Tensor, regularizer: float | Tensor, head: Tensor
) -> Tensor:
    """The row of a step, in 64 bits; nobody waits."""
    own = torch.stack([number.to(head) for number in (held, loss, norm)])
    if not isinstance(regularizer, Tensor):
        regularizer = torch.full((), regularizer, dtype=head.dtype, device=head.device)
    return torch.cat([own, regularizer.to(head).view(1), head])


def is_held(numbers: Sequence[float]) -> bool:
    """Whether the device has held this step back."""
    return numbers[0] > 0


@dataclass(frozen=True)
class Sent:
    """The row of a step on `batch`. Called, it reads the result; no communication."""

    row: Row
    layout: TallyLayout
    batch: Batch
    rate: float
    loss_scale: float | None
    heartbeat: Heartbeat | SaveThreadHeartbeat | None

    def _numbers(self) -> list[float]:
        return self.row.read(self.heartbeat)

    @property
    def is_held(self) -> bool:
        return is_held(self._numbers())

    @property
    def regularizer(self) -> float:
        """What this rank gave for the regularizer, of the step before."""
        return self._numbers()[3]

    def totals(self) -> Totals:
        """The sums of all ranks; raises `ProgramError` if they are not all of this step."""
        return self.layout.totals(self._numbers()[OWN:], self.batch.index)

    def __call__(self) -> StepResult:
        held, loss, norm, _, _, weight, samples, *_ = self._numbers()
        bad = f"step {self.batch.index}: {HELD}" if held else ""
        return StepResult(
            self.batch.index,
            self.batch.epoch,
            loss,
            int(samples),
            weight,
            self.rate,
            not held,
            norm,
            bad=bad,
            loss_scale=self.loss_scale,
        )
