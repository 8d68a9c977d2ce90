"""The steps of a training, read one step late where the host would wait: run, read, run again.

    step n     forward, backward, exchange, update: all queued; its row is copied to the host
    step n+1   queued as well; then the row of n is read, which has arrived by now
               if n was skipped, nothing was updated since: n runs again, read at once, and
               n+1 after it

So one place (`step.apply`) decides about a bad step, an overflow, or newly unfrozen parameters, on
every device alike. Each such case costs two more steps. Two facts are known one step late: that a
step was bad, and that a rank was requested to stop or to save.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch

from allranks.job.job import Job
from allranks.torch.accelerator import is_accelerator
from allranks.torch.checkpoint.state import is_dtensor
from allranks.torch.data.batch import Batch
from allranks.torch.model.reals import real_type
from allranks.torch.optimizers.made import hook_of
from allranks.torch.step.deferred_results import DeferredResults, PendingResult, can_skip_on_device
from allranks.torch.strategies.base import Steps, Strategy
from allranks.training.progress import NOTHING, PendingStep, Progress, RankRequests, StepResult

DIVISOR_BYTES = 4  # of what a fused kernel divides by: too short for gradients of 64 bits
READ_AT_ONCE = {"cpu"}
"""The devices of which the host reads numbers as soon as they are there: a read costs nothing."""


@dataclass(frozen=True)
class InFlightStep:
    """A step that is unread, and the state that it began with."""

    batch: Batch
    before: Progress
    requests: RankRequests
    loss_scale: dict[str, Any] | None
    result: PendingStep

    @property
    def pending(self) -> PendingResult:
        row: Any = self.result.read_row
        return cast(PendingResult, row)


class InFlightSteps(Steps):
    """Steps whose results may stay on the device, each read with the next one."""

    def __init__(self, strategy: Strategy, rows: DeferredResults) -> None:
        super().__init__(strategy)
        self.rows = strategy.step.deferred = rows
        self._last: InFlightStep | None = None
        self._requests: RankRequests = NOTHING

    def make(self, batch: Batch, *, ahead: bool = False) -> StepResult:
        """Run one step, which may stay unread if `ahead`; reads the step before it."""
        ahead = ahead and self._can_stay_unread(batch)
        if self.rows.updates_wait:
            return self._read_before_update(batch) if ahead else self._train(batch, ahead=False)
        if not ahead:  # it would not be skipped with the step before it
            self.settle()
        result = self._train(batch, ahead)  # if it raises, what is unread still is
        last, self._last = self._last, None
        if last is not None and self._is_again(last):
            result = self._train(batch, ahead and self._can_stay_unread(batch))
        self.progress = self.progress.settled()
        requests, self._requests = self._requests, NOTHING
        if isinstance(result, PendingStep):
            result.ask(requests)
            self._last = self._in_flight(batch, result)
        elif requests is not NOTHING:
            now = result.asked
            both = RankRequests.of(requests.stop or now.stop, requests.save or now.save)
            result = dataclasses.replace(result, asked=both)
        return result

    def _read_before_update(self, batch: Batch) -> StepResult:
        """Run a step whose numbers are read in one wait; a bad step runs again, read at once."""
        result = self._train(batch, ahead=True)
        assert isinstance(result, PendingStep)
        step = self._in_flight(batch, result)
        if step.pending.is_skipped:
            self._undo(step)
            return self._train(batch, ahead=False)
        return dataclasses.replace(result.result(), asked=self._requests_with(step))

    def settle(self) -> None:
        """Read the unread step, and run it again if it was skipped; every rank calls this."""
        last, self._last = self._last, None
        if last is not None:
            self._is_again(last)
            self.progress = self.progress.settled()

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
            return super().make(batch)
        finally:
            self.rows.is_on = False

    def _in_flight(self, batch: Batch, result: PendingStep) -> InFlightStep:
        requests = self.strategy.step.requests
        return InFlightStep(batch, self.progress, requests, self._scale_was, result)

    def _is_again(self, last: InFlightStep) -> bool:
        """Read the row of a step; returns whether it ran again, so that its successor must too."""
        step = self.strategy.step
        if not last.pending.is_skipped:
            self._merge_requests(self._requests_with(last))
            return False
        self.progress = last.before
        self._undo(last)
        requests, step.requests = step.requests, last.requests
        result = self._train(last.batch, ahead=False)
        step.requests = requests
        last.result.take(result)
        self._merge_requests(result.asked)
        self.progress = last.before.after(result, last.batch.epoch, last.batch.step_in_epoch)
        return True

    def _requests_with(self, last: InFlightStep) -> RankRequests:
        """The requests in the sums of a good step; raises for sums that are no mean."""
        step, totals = self.strategy.step, last.pending.totals()
        step.check(last.batch, totals, last.pending.regularizer)
        step.guard.judge(last.result.loss, float(last.result.grad_norm or 0.0))
        return self.strategy.after_read(last.pending(), totals.requests)

    def _undo(self, last: InFlightStep) -> None:
        """Reset what a skipped step has changed: the flag, and the loss scale."""
        step = self.strategy.step
        self.rows.skip.zero_()
        if step.loss_scale is not None and last.loss_scale is not None:
            step.loss_scale.load_state(last.loss_scale)

    def _merge_requests(self, requests: RankRequests) -> None:
        now = self._requests
        self._requests = RankRequests.of(now.stop or requests.stop, now.save or requests.save)


def steps_of(strategy: Strategy, job: Job) -> Steps:
    """The steps of a training: in flight where the host would wait for a device, else plain."""
    step, device = strategy.step, strategy.comm.device
    if not can_read_at_end(strategy, job):
        return Steps(strategy)
    is_fused = can_skip_on_device(step.optimizer)
    is_short = all(real_type(p.dtype).itemsize <= DIVISOR_BYTES for p in step.parameters)
    is_plain = not any(is_dtensor(p) for p in step.parameters)  # others: not tried
    step.update_divides = is_fused and is_accelerator(device) and is_short and is_plain
    if device.type in READ_AT_ONCE:
        return Steps(strategy)
    return InFlightSteps(strategy, DeferredResults(device, updates_wait=not is_fused))


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
