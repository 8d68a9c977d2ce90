"""The progress of a job, and the result of a step: plain numbers, the same on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. All counts belong to the job; a skipped update moves only the first four.

    `loss_sum` and `weight_sum` are those of the epoch that is going on.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    batch_index: int = 0
    samples_seen: int = 0
    updates: int = 0
    loss_sum: float = 0.0
    weight_sum: float = 0.0

    @staticmethod
    def of(state: dict[str, Any]) -> Progress:
        """That of a state; raises `TypeError` for what counts nothing."""
        progress = Progress(**state)
        for name, value in state.items():
            is_sum = name in ("loss_sum", "weight_sum") and type(value) is float
            if not (is_sum or (type(value) is int and value >= 0)):
                raise TypeError(f"progress.{name} is {value!r}")
        return progress

    def after(self, result: StepResult, epoch: int, step_in_epoch: int) -> Progress:
        """The progress once the step with number `step_in_epoch` of `epoch` has given `result`."""
        if not result.is_read:
            return PendingProgress(self, result, epoch, step_in_epoch)
        before = self if epoch == self.epoch and self.step_in_epoch > 0 else Progress()
        loss, weight = (result.loss * result.weight, result.weight) if result.updated else (0, 0)
        return Progress(
            epoch=epoch,
            step_in_epoch=step_in_epoch + 1,
            batch_index=self.batch_index + 1,
            samples_seen=self.samples_seen + result.samples,
            updates=self.updates + result.updated,
            loss_sum=before.loss_sum + loss,
            weight_sum=before.weight_sum + weight,
        )

    def at_epoch(self, epoch: int) -> Progress:
        """The same, at the start of an epoch."""
        return dataclasses.replace(self, epoch=epoch, step_in_epoch=0)

    @property
    def updates_unless_bad(self) -> int:
        """The same as `updates`, if a step that is unread turns out to be good; nobody waits."""
        return self.updates

    def settled(self) -> Progress:
        """The same, with all numbers read."""
        return self

    @property
    def mean_loss(self) -> float | None:
        """The loss of the epoch that is going on, over all its samples so far."""
        return self.loss_sum / self.weight_sum if self.weight_sum else None


@dataclass(frozen=True)
class RankRequests:
    """Requests of the supervisor to this rank, which are sent to all ranks with the step."""

    stop: bool = False
    save: bool = False

    @staticmethod
    def of(stop: bool, save: bool) -> RankRequests:
        """The same; in almost every step it is `NOTHING`, which is made once."""
        return RankRequests(stop, save) if stop or save else NOTHING


NOTHING = RankRequests()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of the job, the same on every rank. `loss` is the mean over the global batch.

    `samples` 0 means that no rank had a sample: a stream has ended, `loss` is nan, and `taken` is
    false, so leave this result out of what you add up. `updated` is false where the
    weights were left as they were; `grad_norm` is the length of the gradient before clipping.
    `asked` is what the supervisor of any rank wants; `bad` says what is wrong with a bad step, and
    `culprits` which rank brought in what.
    `loss_scale` is that of this step under fp16; with `overflow` it was too large,
    and is smaller now.
    """

    batch_index: int
    epoch: int
    loss: float
    samples: int
    weight: float
    learning_rate: float
    updated: bool
    grad_norm: float | None = None
    asked: RankRequests = NOTHING
    bad: str = ""
    loss_scale: float | None = None
    overflow: bool = False
    culprits: tuple[tuple[int, str], ...] = ()

    @property
    def taken(self) -> bool:
        """Whether it was a step of the job, updated or not, and no end of a stream."""
        return self.updated or self.overflow or bool(self.bad)

    @property
    def is_read(self) -> bool:
        """Whether all numbers are on the host, so that reading them does not wait."""
        return True


class PendingStep(StepResult):
    """A step whose result is still on the device: reading a field waits for it.

    `asked` holds the requests that came with the step before. `result` returns the numbers, without
    communication. For a step that the device has skipped, it returns what is known so far; the
    final numbers come with the next step of all ranks (`take`).
    """

    __slots__ = ("_change", "_is_known", "read_row")

    def __init__(
        self, batch_index: int, epoch: int, learning_rate: float, read_row: Callable[[], StepResult]
    ) -> None:
        _set(self, batch_index=batch_index, epoch=epoch, learning_rate=learning_rate)
        _set(self, asked=NOTHING, read_row=read_row, _change=None, _is_known=False)

    def __getattr__(self, name: str) -> Any:  # of a field that has no value yet
        if name not in LATER:
            raise AttributeError(name)
        self.take(self.result())
        return getattr(self, name)

    def result(self) -> StepResult:
        """Wait for the numbers, and return them."""
        result: StepResult = self.read_row()
        return result if self._change is None else self._change(result)

    def then(self, change: Callable[[StepResult], StepResult]) -> None:
        """Apply `change` to the numbers of the device when they are read."""
        _set(self, _change=change)

    def take(self, result: StepResult) -> None:
        """Set the final numbers."""
        _set(self, **{name: getattr(result, name) for name in LATER}, _is_known=True)

    def ask(self, requests: RankRequests) -> None:
        """Set the requests that came with the step before."""
        _set(self, asked=requests)

    @property
    def is_read(self) -> bool:
        return bool(self._is_known)

    @property
    def taken(self) -> bool:
        return True  # the end of a stream is read at once


class PendingProgress(Progress):
    """The progress after a pending step: which step it is, is known; other numbers are read."""

    __slots__ = ("_before", "_step")

    def __init__(self, before: Progress, result: StepResult, epoch: int, step_in_epoch: int):
        _set(self, epoch=epoch, step_in_epoch=step_in_epoch + 1)
        _set(self, batch_index=before.batch_index + 1)
        _set(self, _before=before, _step=(result, epoch, step_in_epoch))

    def __getattr__(self, name: str) -> Any:  # of a field that has no value yet
        if name not in ("samples_seen", "updates", "loss_sum", "weight_sum"):
            raise AttributeError(name)
        return getattr(self.settled(), name)

    @property
    def updates_unless_bad(self) -> int:
        return int(self._before.updates_unless_bad) + 1

    def settled(self) -> Progress:
        result, *where = self._step
        result.loss  # noqa: B018  this reads it
        settled: Progress = self._before.settled().after(result, *where)
        return settled


def _set(frozen: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(frozen, name, value)


LATER = {f.name for f in dataclasses.fields(StepResult)} - {
    "batch_index",
    "epoch",
    "learning_rate",
    "asked",
}
