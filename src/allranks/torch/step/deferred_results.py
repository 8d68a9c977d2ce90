"""What steps tell the host, and whether the device has held one back.

A step is assumed good, and the host goes on. The device knows better: with the first step that is
not plainly good `held` becomes 1 and stays so, and nothing is updated any more. Each step copies a
row of numbers into one of two pinned slots; the host reads it while the step after it runs, and if
that says that the step was held back, makes both again, reading every number at once (`in_flight`).

An optimizer that cannot be held back on the device waits for the row of its own step, before it
updates: once for all numbers of the step.
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
from allranks.torch.comm.subgroups import in_exchange
from allranks.torch.data.batch import Batch
from allranks.torch.step.tally import TallyLayout, Totals
from allranks.training.progress import StepResult

SLOTS = 2
FUSED = (SGD, Adam, AdamW)  # those of torch with a fused kernel on devices


class StepRow:
    """The numbers of one step, on their way to the host. `computed`: this rank has no more to do.

    Over NCCL a host waits for other ranks where it reads what they have summed: so the heartbeat is
    in `compute` until this rank's own passes are over, and in `exchange` from then on.
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
    """The rows of a training on `device`, and the flag `held`, which the device alone looks at.

    `is_on`: the step that is made now may stay unread; the same on all ranks. Its row is read
    before its update where that can `wait` for it alone.
    """

    def __init__(self, device: torch.device, *, updates_wait: bool = False) -> None:
        self.device, self.is_on, self.updates_wait = device, False, updates_wait
        self.held = torch.zeros((), dtype=torch.float32, device=device)  # as fused kernels want it
        self._slots: list[Tensor] = []
        self._turn = 0

    def hold_unless(self, good: Tensor) -> Tensor:
        """From now on everything is held back, unless this step is good; returns the flag."""
        self.held.copy_(torch.maximum(self.held, (~good).to(self.held)))
        return self.held

    def send(self, numbers: Tensor, computed: Any) -> StepRow:
        """Let numbers leave for the host, which goes on; `computed` is an event, or `None`."""
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
    optimizer: Optimizer, *, held: Tensor | None, divisor: Tensor | None
) -> Iterator[None]:
    """Within, an update divides gradients first, and does nothing where `held` is 1.

    As `torch.amp.GradScaler` asks for it. Only for one that `can_be_held_back`.
    """
    optimizer.found_inf, optimizer.grad_scale = held, divisor  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def can_be_held_back(optimizer: Optimizer) -> bool:
    """Whether its update looks at `found_inf` on the device: those of torch with `fused=True`.

    A class of somebody else that calls such a step may do more in it, which is not held back.
    """
    is_of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    return is_of_torch and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def notes_on_update(optimizer: Optimizer, device: torch.device) -> list[str]:
    """What a person should know of an optimizer that takes `fused`, and is made without."""
    is_asked = is_accelerator(device) and isinstance(optimizer, FUSED)
    if not is_asked or optimizer.defaults.get("fused"):
        return []
    name = type(optimizer).__name__
    return [
        f"optimizer {name} is not fused: the host waits for the numbers of each step before its "
        f"update, and the device waits for the host; make it with {name}(…, fused=True)"
    ]


# --- sent ----------------------------------------------------------------------------------------
# What the row of a step says, once it is read: the numbers of a `StepResult`, and of the tally.


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

    row: StepRow
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
