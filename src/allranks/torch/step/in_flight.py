"""The steps of a training, one late where the host would wait: made, read, and made again.

    step n     forward, backward, exchange, update: all queued; its row leaves for the host
    step n+1   queued as well; then the row of n is read, which is there by now
               n was held back: nothing was updated since, so n is made again, read at once, as
               it would have been, and n+1 after it

So what becomes of a bad step, of an overflow, of parameters that are unfrozen, is decided in one
place (`step.apply`), on every device alike, and costs two more steps where it happens. What is
known of a step one late: that it was bad, and that a rank was asked to stop or to save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from allranks.job.job import Job
from allranks.torch.accelerator import is_accelerator
from allranks.torch.checkpoint.tree import is_dtensor
from allranks.torch.data.batch import Batch
from allranks.torch.model.reals import real_type
from allranks.torch.optimizers.made import hook_of
from allranks.torch.step.deferred_results import DeferredResults, Sent, can_be_held_back
from allranks.torch.strategies.base import Strategy
from allranks.training.progress import NOTHING, Progress, RankRequests, StepResult, UnreadResult

DIVISOR_BYTES = 4  # of what a fused kernel divides by: too short for gradients of 64 bits
READ_AT_ONCE = {"cpu"}
"""The devices of which the host reads numbers as soon as they are there: a read costs nothing."""


@dataclass(frozen=True)
class Made:
    """A step that is unread, and what it began with."""

    batch: Batch
    before: Progress
    asked: RankRequests
    loss_scale: dict[str, Any] | None
    result: UnreadResult
    sent: Sent


class InFlightSteps:
    """Makes the steps of a training; every rank makes the same calls.

    `progress` is how far it is. `rate_factor()` is what the rates of the schedule are times.
    """

    def __init__(self, strategy: Strategy, job: Job, rate_factor: Callable[[], float]) -> None:
        self.strategy, self.progress, self._rate_factor = strategy, Progress(), rate_factor
        self._last: Made | None = None
        self._heard: RankRequests = NOTHING
        step = strategy.step
        is_fused, device = can_be_held_back(step.optimizer), strategy.comm.device
        self.rows = DeferredResults(device, updates_wait=not is_fused)
        if can_read_at_end(strategy, job):
            is_short = all(real_type(p.dtype).itemsize <= DIVISOR_BYTES for p in step.parameters)
            is_plain = not any(is_dtensor(p) for p in step.parameters)  # others: not tried
            step.update_divides = is_fused and is_accelerator(device) and is_short and is_plain
            if device.type not in READ_AT_ONCE:
                step.rows = self.rows

    def make(self, batch: Batch, *, ahead: bool = False) -> StepResult:
        """One step; it may stay unread if `ahead`. What was unread until now is settled."""
        if self.strategy.step.rows is None:
            return self._train_with_rates(batch)
        ahead = ahead and self._can_stay_unread(batch)
        if self.rows.updates_wait:
            return self._read_before_update(batch) if ahead else self._train(batch, ahead=False)
        if not ahead:  # it would not be held back with the step before it
            self.settle()
        result = self._train(batch, ahead)  # if it raises, what is unread still is
        last, self._last = self._last, None
        if last is not None and self._is_again(last):
            result = self._train(batch, ahead and self._can_stay_unread(batch))
        self.progress = self.progress.settled()
        heard, self._heard = self._heard, NOTHING
        if isinstance(result, UnreadResult):
            vars(result).update(asked=heard)
            self._last = self._made(batch, result)
        elif heard is not NOTHING:
            both = RankRequests.of(heard.stop or result.asked.stop, heard.save or result.asked.save)
            result = dataclasses.replace(result, asked=both)
        return result

    def _read_before_update(self, batch: Batch) -> StepResult:
        """A step whose numbers are read together; it is made again, one by one, if it is bad."""
        result = self._train(batch, ahead=True)
        assert isinstance(result, UnreadResult)
        made = self._made(batch, result)
        if made.sent.is_held:
            self._undo(made)
            return self._train(batch, ahead=False)
        return dataclasses.replace(result.read(), asked=self._asked_with(made))

    def settle(self) -> None:
        """Read what is unread, and make it again if it was held back; every rank calls this."""
        last, self._last = self._last, None
        if last is not None:
            self._is_again(last)
            self.progress = self.progress.settled()

    def begin_anew(self) -> None:
        """Settle; a state is loaded next, whose optimizer may have none: every rank calls this."""
        self.settle()
        self.strategy.step.layout.was_updated = False

    def _train_with_rates(self, batch: Batch) -> StepResult:
        rates = self.strategy.step.rates
        rates.set(self.progress.updates_unless_bad, self._rate_factor())
        return self.strategy.train_step(batch)

    def _can_stay_unread(self, batch: Batch) -> bool:
        step = self.strategy.step
        known = step.layout.leaves is not None and step.layout.was_updated
        is_usual = batch.sizes is not None and step.probe is None
        if self.strategy.reads_at_once(batch):
            return False
        return known and is_usual and (self.rows.updates_wait or not hook_of(step.optimizer))

    def _train(self, batch: Batch, ahead: bool) -> StepResult:
        step = self.strategy.step
        self._scale_was = None if step.loss_scale is None else step.loss_scale.state()
        self.rows.is_on = ahead
        try:
            return self._train_with_rates(batch)
        finally:
            self.rows.is_on = False

    def _made(self, batch: Batch, result: UnreadResult) -> Made:
        asked = self.strategy.step.asked
        return Made(batch, self.progress, asked, self._scale_was, result, vars(result)["_read"])

    def _is_again(self, last: Made) -> bool:
        """Take in what the row says; whether the step was made again, and all after it must be."""
        step = self.strategy.step
        if not last.sent.is_held:
            self._hear(self._asked_with(last))
            return False
        self.progress = last.before
        self._undo(last)
        asked, step.asked = step.asked, last.asked
        result = self._train(last.batch, ahead=False)
        step.asked = asked
        last.result.take(result)
        self._hear(result.asked)
        self.progress = last.before.after(result, last.batch.epoch, last.batch.step_in_epoch)
        return True

    def _asked_with(self, made: Made) -> RankRequests:
        """What was asked with a good step, which is over; raises for sums that are no mean."""
        step, totals = self.strategy.step, made.sent.totals()
        step.check(made.batch, totals, made.sent.regularizer)
        step.guard.judge(made.result.loss, float(made.result.grad_norm or 0.0))
        return self.strategy.after_read(made.sent(), totals.asked)

    def _undo(self, made: Made) -> None:
        """A step that was held back never was."""
        step = self.strategy.step
        self.rows.held.zero_()
        if step.loss_scale is not None and made.loss_scale is not None:
            step.loss_scale.load_state(made.loss_scale)

    def _hear(self, asked: RankRequests) -> None:
        self._heard = RankRequests.of(
            self._heard.stop or asked.stop, self._heard.save or asked.save
        )


class OnSteps:
    """What a trainer shows of the steps that it makes."""

    _steps: InFlightSteps

    @property
    def progress(self) -> Progress:
        """How far the training is; numbers of a step that is unread are waited for."""
        return self._steps.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self._steps.progress = progress

    def settle(self) -> None:
        """Read what is unread: weights are those of the last step from here on.

        Every rank calls this. Nothing is to be done where the device is the processor.
        """
        self._steps.settle()


def can_read_at_end(strategy: Strategy, job: Job) -> bool:
    """Whether a step needs no number of itself before its update: the same on all ranks."""
    step, task = strategy.step, strategy.task
    return (
        strategy.can_run_ahead
        and job.spike is None  # which looks at the steps before
        and not (task.clip_norm is not None and strategy.shard_alone)  # an exact norm is read
        and not step.sparse.positions
        and not step.scope.looked_up
        and not any(isinstance(g["lr"], torch.Tensor) for g in step.optimizer.param_groups)
    )
