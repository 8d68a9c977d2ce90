"""The sums of one step become its `StepResult`: overflow, bad-step policy, loss scale.

All ranks hold the same sums after a step, so all decide alike without a message.
"""

from __future__ import annotations

from typing import Any

from allranks.job.job import Job
from allranks.job.loss_scale import parse_loss_scale
from allranks.tensorflow.data.batches import Batch
from allranks.tensorflow.step.inputs import StepSums
from allranks.training.guard import Finding, Guard, weightless
from allranks.training.progress import Asked, StepResult


class StepResultBuilder:
    """Of the steps of one job. `whose` is what a part of a batch belongs to: rank, replica."""

    def __init__(self, job: Job, whose: str) -> None:
        self.whose = whose
        self.guard = Guard(job.on_bad_step, job.spike, self._who)
        self.loss_scale = parse_loss_scale(job.loss_scale) if job.precision == "fp16" else None
        self.updates_bad = job.on_bad_step == "warn" and self.loss_scale is None
        self._bad: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """By what the loss of the next step is multiplied."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def result(self, batch: Batch, found: StepSums) -> StepResult:
        """The result of a step. Raises `BadStep` where the job ends with it."""
        if found.weight <= 0:
            raise weightless(batch, found.weight)
        scale, updated, text = self.loss_scale, found.fine, ""
        overflow = scale is not None and scale.explains(found.loss, found.norm)
        used = None if scale is None else scale.value
        if not overflow:
            self._bad = found.bad
            bad = self.guard.judge(found.loss, found.norm)
            if bad is not None:
                text = self.guard.decide(batch, bad).text
            updated = found.fine or self.updates_bad
        if scale is not None and overflow:
            scale.overflowed()
        elif scale is not None and updated:
            scale.went_well()
        return StepResult(
            batch.index,
            batch.epoch,
            found.loss,
            found.samples,
            found.weight,
            found.rate,
            updated,
            found.norm,
            Asked(found.stop, found.save),
            text,
            used,
            overflow,
        )

    def _who(self, batch: Any, spiked: bool) -> tuple[Finding, ...]:
        """Which replicas brought a bad step in, as they said themselves with the sum."""
        if spiked or not self._bad:
            return ()
        names = ", ".join(f"{self.whose} {number}" for number in self._bad)
        return (Finding(f"it came in with {names}"),)
