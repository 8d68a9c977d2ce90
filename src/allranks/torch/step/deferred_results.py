"""Results of steps that the host reads later, and a flag that lets the device skip updates.

A step is assumed good, and the host goes on. The first step that is not plainly good sets the flag
`skip` to 1 on the device; it stays set, and no later update changes anything. Each step copies a
row of numbers into one of two pinned slots, which the host reads while the next step runs. If the
row says that the step was skipped, both steps run again, and are read at once (`in_flight`).

An optimizer that cannot skip its update on the device waits for the row of its own step before it
updates: one wait for all numbers of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

import allranks.torch.accelerator as accelerator
from allranks.launcher.heartbeat import Heartbeat, SaveThreadHeartbeat
from allranks.torch.accelerator import is_accelerator
from allranks.torch.comm.comm import in_exchange
from allranks.torch.data.batch import Batch
from allranks.torch.step.tally import TallyLayout, Totals
from allranks.training.progress import StepResult

SLOTS = 2
FUSED = (SGD, Adam, AdamW)  # those of torch with a fused kernel on devices


class StepRow:
    """The numbers of one step, being copied to the host; `computed`: the event after its passes.

    Over NCCL, reading a sum over ranks waits for the other ranks. So the heartbeat is in `compute`
    until this rank's own passes are over, and in `exchange` from then on.
    """

    def __init__(self, slot: Tensor, there: Any, computed: Any) -> None:
        self._slot, self._there, self._computed = slot, there, computed
        self._numbers: list[float] | None = None

    def read(self, heartbeat: Heartbeat | SaveThreadHeartbeat | None) -> list[float]:
        """The numbers; waits for the device. No communication."""
        if self._numbers is None:
            if self._there is not None:
                with in_exchange(heartbeat, self._computed):
                    self._there.synchronize()
            self._numbers = self._slot.tolist()
        return self._numbers


class DeferredResults:
    """The rows of a training on `device`, and the flag `skip`, which only the device reads.

    `is_on`: the current step may stay unread; the same on all ranks. With `updates_wait`, its row
    is read before its update.
    """

    def __init__(self, device: torch.device, *, updates_wait: bool = False) -> None:
        self.device, self.is_on, self.updates_wait = device, False, updates_wait
        self.skip = torch.zeros((), dtype=torch.float32, device=device)  # as fused kernels want it
        self._slots: list[Tensor] = []
        self._turn = 0

    def skip_unless(self, is_good: Tensor) -> Tensor:
        """Set the flag, so that updates are skipped from now on, unless this step is good."""
        self.skip.copy_(torch.maximum(self.skip, (~is_good).to(self.skip)))
        return self.skip

    def send(self, numbers: Tensor, computed: Any) -> StepRow:
        """Start copying numbers to the host, without waiting; `computed` is an event or `None`."""
        if not self._slots or self._slots[0].shape != numbers.shape:
            size, pin = numbers.numel(), is_accelerator(self.device)
            self._slots = [
                accelerator.pinned_zeros(size, numbers.dtype, pin=pin) for _ in range(SLOTS)
            ]
        self._turn = (self._turn + 1) % SLOTS
        slot = self._slots[self._turn]
        slot.copy_(numbers, non_blocking=True)
        return StepRow(slot, accelerator.recorded_event(self.device), computed)


@contextmanager
def fused_update(
    optimizer: Optimizer, *, skip: Tensor | None, divisor: Tensor | None
) -> Iterator[None]:
    """Within, an update divides gradients first, and does nothing where `skip` is 1.

    Uses the interface of `torch.amp.GradScaler`. Only if the optimizer `can_skip_on_device`.
    """
    optimizer.found_inf, optimizer.grad_scale = skip, divisor  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether its update reads `found_inf` on the device: torch's optimizers with `fused=True`.

    A subclass that calls such a step may do more in it, which would not be skipped.
    """
    is_of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    return is_of_torch and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def notes_on_update(optimizer: Optimizer, device: torch.device) -> list[str]:
    """Advice for an optimizer that supports `fused` and was created without it."""
    is_asked = is_accelerator(device) and isinstance(optimizer, FUSED)
    if not is_asked or optimizer.defaults.get("fused"):
        return []
    name = type(optimizer).__name__
    return [
        f"optimizer {name} is not fused: the host waits for the numbers of each step before its "
        f"update, and the device waits for the host; make it with {name}(…, fused=True)"
    ]


# --- pending results -----------------------------------------------------------------------------
# The contents of a step's row, once it is read: the numbers of a `StepResult`, and of the tally.


SKIPPED = "held back: the next step says what is wrong with it"
HEAD = 4  # numbers before those of the tally


def numbers_of(
    skip: Tensor, loss: Tensor, norm: Tensor, regularizer: float | Tensor, head: Tensor
) -> Tensor:
    """The row of a step, in 64 bits; does not wait for the device."""
    first = torch.stack([number.to(head) for number in (skip, loss, norm)])
    if not isinstance(regularizer, Tensor):
        regularizer = torch.full((), regularizer, dtype=head.dtype, device=head.device)
    return torch.cat([first, regularizer.to(head).view(1), head])


def is_skipped(numbers: Sequence[float]) -> bool:
    """Whether the device skipped the update of this step."""
    return numbers[0] > 0


@dataclass(frozen=True)
class PendingResult:
    """The row of a step on `batch`. A call reads the result; no communication."""

    row: StepRow
    layout: TallyLayout
    batch: Batch
    rate: float
    loss_scale: float | None
    heartbeat: Heartbeat | SaveThreadHeartbeat | None

    def _numbers(self) -> list[float]:
        return self.row.read(self.heartbeat)

    @property
    def is_skipped(self) -> bool:
        return is_skipped(self._numbers())

    @property
    def regularizer(self) -> float:
        """The value of the regularizer on this rank, in the step before."""
        return self._numbers()[3]

    def totals(self) -> Totals:
        """The sums of all ranks; raises `ProgramError` if they are not all of this step."""
        return self.layout.totals(self._numbers()[HEAD:], self.batch.index)

    def __call__(self) -> StepResult:
        skip, loss, norm, _, _, weight, samples, *_ = self._numbers()
        bad = f"step {self.batch.index}: {SKIPPED}" if skip else ""
        return StepResult(
            batch_index=self.batch.index,
            epoch=self.batch.epoch,
            loss=loss,
            samples=int(samples),
            weight=weight,
            learning_rate=self.rate,
            updated=not skip,
            grad_norm=norm,
            bad=bad,
            loss_scale=self.loss_scale,
        )
