"""What every step shares, whatever the strategy: written once here, called by each of them.

forward and backward of every micro-batch        `begin`, `forward`, `backward`, … (`passes`)
(the strategy sums gradients and tally over all ranks)
division by the weight, regularizer, guard, clipping, update, BatchNorm        `apply`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.accelerator import is_accelerator, recorded_event
from allranks.torch.checkpoint.state import hyper_parameters
from allranks.torch.comm.comm import in_exchange
from allranks.torch.data.batch import Batch, Leaf
from allranks.torch.model.max_norm import sync_max_norm
from allranks.torch.optimizers.made import hook_of
from allranks.torch.step.deferred_results import (
    DeferredResults,
    PendingResult,
    fused_update,
    is_skipped,
    numbers_of,
)
from allranks.torch.step.ema import MovingAverage
from allranks.torch.step.gradients import Gradients, multiplied
from allranks.torch.step.passes import Passes
from allranks.torch.step.tally import Tally, Totals
from allranks.torch.step.trainable import has_scheduler, update
from allranks.torch.task import Task
from allranks.training.guard import Bad, Guard, StepVerdict, is_finite, weightless
from allranks.training.progress import PendingStep, StepResult

# --- rates ---------------------------------------------------------------------------------------
# The learning rates of each update: the initial rates of the groups, times the task's schedule.
#
# Others may set rates too: a callback, or a scheduler of torch that leaves no other mark
# (`ReduceLROnPlateau`). Before each update, the rates are compared with those that the engine, a
# checkpoint or the optimizer itself has set, which takes a microsecond for each group.


class Rates:
    """`initial` holds the hyper-parameters of each group, as the optimizer was created.

    `warning` is a sentence about rates that others set; empty until they first do.
    """

    def __init__(self, task: Task, optimizer: Optimizer) -> None:
        self.task, self.optimizer = task, optimizer
        self.schedule: Callable[[int], float] = task.schedule  # a trainer adds the total
        self.factor: Callable[[], float] | None = None  # on those of the schedule, by evaluations
        self.initial = hyper_parameters(optimizer)
        self.warning = ""
        self._are_scheduled = task.overrides("schedule") or task.overrides("plateau")
        self._is_first = True
        self._known = self._rates()

    def set(self, update: int) -> None:
        """Set the rates for update number `update` of the job.

        A group that was added later keeps its own initial rate. Raises `RequestError` if the task
        has a schedule and others have set rates.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.initial):
            self._note_groups()
        rates = self._rates()
        if rates != self._known and (self._are_scheduled or not self._is_first):
            pairs = zip(self._known, rates, strict=False)  # a group that is new has set nothing
            if others := [(was, now) for was, now in pairs if was != now]:
                self._others_set(update, *others[0])
        self._is_first = False
        self._known = rates
        if self._are_scheduled:
            factor = float(self.schedule(update)) * (1.0 if self.factor is None else self.factor())
            for group, initial in zip(groups, self.initial, strict=True):
                group["lr"] = float(initial["lr"]) * factor
            self.see()

    def are_set_by_others(self) -> bool:
        """Whether rates were set by others, or a scheduler of torch is on the optimizer."""
        return bool(self.warning) or has_scheduler(self.optimizer)

    def see(self) -> None:
        """Accept the current rates: the engine, a checkpoint or the optimizer has set them."""
        self._known = self._rates()

    def _rates(self) -> list[Any]:
        groups = self.optimizer.param_groups
        return [
            float(rate) if isinstance(rate := group.get("lr"), Tensor) else rate for group in groups
        ]

    def _others_set(self, update: int, was: Any, now: Any) -> None:
        """Handle a rate that others set between two updates: raise, or keep a warning."""
        when = f"from {was:g} to {now:g} after {update} update{'s' * (update != 1)}"
        if self._are_scheduled:
            raise RequestError(
                asked="schedule() or plateau() of the task",
                found=f"a learning rate that was set {when}, not by the engine",
                why="the engine sets the rates before each update: what a scheduler of torch or a "
                "callback sets would be lost",
                do="write all of it in schedule(step), and in plateau() what depends on a metric "
                "(allranks.training.schedules.Plateau), or remove both",
            )
        self.warning = self.warning or (
            f"a learning rate was set {when}, not by the engine: a checkpoint holds the rate, but "
            "no state of its scheduler; right for a function of the step, but a scheduler that "
            "counts (ReduceLROnPlateau) would start anew: write plateau() in the task"
        )

    def _note_groups(self) -> None:
        now = hyper_parameters(self.optimizer)
        if len(now) < len(self.initial):
            raise RequestError(
                asked="to go on training",
                found=f"{len(now)} groups in the optimizer, where there were {len(self.initial)}",
                why="rates and checkpoints go by the number of a group",
                do="freeze parameters that shall not be trained any more: requires_grad_(False)",
            )
        self.initial += now[len(self.initial) :]


REGULARIZER, UPDATE = -3, -2  # keys of the generator, in addition to shards
NOTHING = nullcontext()
CLIP_EPS = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to the norm


class SharedStep(Passes):
    """The parts of a step that all strategies share: its passes, and then the update."""

    def set_up(self) -> None:
        self.deferred: DeferredResults | None = None  # where steps may stay unread (`in_flight`)
        self.update_divides = False  # the kernel of the update takes the mean, and clips
        self._computed: Any = None  # the event at which this rank's own passes are over
        self._uses_all = True  # since the last update this rank's leaves used all parameters
        self.own_positions: Sequence[int] | None = None  # of the parameters that its passes meet
        self._is_awaited = is_accelerator(self.scope.device)
        self.average: MovingAverage | None = None
        self.updated_at = -1  # the step of the last update, from its beginning on
        self.before_update: Callable[[], None] | None = None  # the gradients are final
        self.guard = Guard()
        self.rates = Rates(self.task, self.optimizer)

    def apply(self, batch: Batch, tally: Tally, gradients: Gradients) -> StepResult:
        """The update, from gradients and tally that are summed over all ranks.

        A usual step communicates nothing here but what `gradients` and `updating` of the strategy
        do. Collective are also the rows of tables with a `max_norm`, newly trained parameters, and
        the search for the cause of a bad step: all ranks read the same sums, and enter them alike.
        """
        if self.scope.looked_up:
            sync_max_norm(self.model, self.scope, self.comm)
        uses_all, self._uses_all = self._uses_all, True
        if self.deferred is not None and self.deferred.is_on:
            unused = () if uses_all else tally.unused()
            return self._apply_unread(self.deferred, batch, tally, gradients, unused)
        totals = self._read(tally, batch)
        if self.on_phase is not None:
            self.on_phase("finish")
        weight, samples = totals.weight, totals.samples
        known: dict[str, Any] = {"batch_index": batch.index, "epoch": batch.epoch}
        known |= {"samples": samples, "weight": weight, "asked": totals.requests}
        known["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        if not self.is_taken(batch, samples):
            return StepResult(**known, loss=math.nan, updated=False)
        self.check(batch, totals, self.regularizers.was)
        self._settle(batch, totals, gradients)
        loss_scale = None if self.loss_scale is None else self.loss_scale.value
        factor = self._divide(gradients, batch, weight)
        with self._reading():
            loss = totals.loss / weight + float(self._add_regularizer(batch, gradients))
        if self.probe is not None:
            self.probe.gradients("gradient", self.names, multiplied(gradients.tensors(), factor))
        left_out = bool(totals.unused) and self.regularizers.is_there
        with self._reading():
            norm = gradients.norm(clips=self.task.clip_norm is not None, left_out=left_out)
        norm = norm if factor is None else norm * float(factor)
        overflow = self.loss_scale is not None and self.loss_scale.explains(loss, norm)
        verdict = StepVerdict(update=not overflow)
        if overflow:
            self.user_buffers.undo()
        elif (bad := self._judged(loss, norm)) is not None:
            verdict = self._decide(batch, bad)
        if verdict.update:
            self.updated_at = batch.index
            self._update(batch, norm, tally, gradients, factor)
            tally.update_norms()
            self.layout.was_updated = not totals.unused
        else:
            self.scope.key(batch.index, UPDATE)  # callbacks draw the same on every rank
        if totals.changed:
            self.parts.lay_out()
        self._adapt_loss_scale(overflow, verdict.update)
        return StepResult(
            **known,
            loss=loss,
            updated=verdict.update,
            grad_norm=norm,
            bad=verdict.text,
            loss_scale=loss_scale,
            overflow=overflow,
            culprits=verdict.culprits,
        )

    def _apply_unread(
        self,
        rows: DeferredResults,
        batch: Batch,
        tally: Tally,
        gradients: Gradients,
        unused: tuple[int, ...],
    ) -> StepResult:
        """The same for a step whose sums stay on the device, unread by the host.

        The device skips the update unless the loss and the norm are finite and the sums are right.
        A skipped step runs again (`in_flight`), and `apply` decides what to do.
        """
        sums = tally.unread(batch.index)
        gradients.settle(unused)
        loss_scale = None if self.loss_scale is None else self.loss_scale.value
        factor = self._divide(gradients, batch, sums.weight)
        was = self.regularizers.was
        loss = sums.loss / sums.weight + self._add_regularizer(batch, gradients)
        left_out = bool(unused) and self.regularizers.is_there
        norm = gradients.norm_unread(clips=self.task.clip_norm is not None, left_out=left_out)
        norm = norm if factor is None else norm * factor
        skip = rows.skip_unless(sums.is_right & is_finite(loss) & is_finite(norm))
        row = rows.send(numbers_of(skip, loss, norm, was, sums.head), self._computed)
        if not rows.updates_wait:
            self._update(batch, norm, tally, gradients, factor, skip)
        elif not is_skipped(row.read(self.comm.heartbeat)):
            self._update(batch, norm, tally, gradients)
        tally.update_norms(skip)
        self.user_buffers.undo_where(skip)
        self._adapt_loss_scale(overflow=False, updated=True)
        rate = float(self.optimizer.param_groups[0]["lr"])
        pending = PendingResult(row, self.layout, batch, rate, loss_scale, self.comm.heartbeat)
        return PendingStep(batch.index, batch.epoch, rate, pending)

    def _read(self, tally: Tally, batch: Batch) -> Totals:
        """Read the tally; a wait for the device counts as a wait for the other ranks."""
        with self._reading(self._computed):
            if self.stopwatch is not None:
                self.stopwatch.of_ranks = tuple(tally.tensor[self.layout.seconds].tolist())
            return tally.totals(batch.index)

    def _reading(self, computed: Any = None) -> AbstractContextManager[None]:
        """Around a read that waits for other ranks, in whatever group of the strategy."""
        return in_exchange(self.comm.heartbeat, computed) if self._is_awaited else NOTHING

    def check(self, batch: Batch, totals: Totals, regularizer: float | Tensor) -> None:
        """Raise if no mean can be taken; `regularizer` is this rank's own value of it.

        The weight is not positive, samples differ in their number of values, or ranks differ in
        their regularizer.
        """
        if self._unweighted is not None:
            self._unweighted.sum_up(totals.samples, totals.weight)
        if totals.weight <= 0:
            raise weightless(batch, totals.weight)
        self.regularizers.check(totals.regularizer, self.layout.like.dtype, float(regularizer))

    def end_leaf(self, batch: Batch, leaf: Leaf, tally: Tally) -> None:
        super().end_leaf(batch, leaf, tally)
        if self.deferred is not None:
            owned = self.own_positions
            used = self.used if owned is None else [self.used[position] for position in owned]
            self._uses_all = self._uses_all and all(used)

    def end(self, batch: Batch) -> None:
        """Record an event at the end of the rank's own passes, if they wait for no other rank."""
        super().end(batch)
        if self._is_awaited and self.comm.size > 1 and self.parts.computes_alone:
            self._computed = recorded_event(self.scope.device)

    def is_taken(self, batch: Batch, samples: int) -> bool:
        """Whether this is a step. It is not if a stream has ended: no rank had a sample, or too few
        of them, and the last batch is dropped."""
        drops = batch.sizes is None and self.task.last_batch == "drop"
        return samples > 0 and not (drops and samples < batch.nominal)

    def _settle(self, batch: Batch, totals: Totals, gradients: Gradients) -> None:
        """Give a gradient to each parameter that some rank used, and to no other one."""
        gradients.settle(totals.unused)
        if totals.changed:
            self._take_changes(batch)
            gradients.follow(self.parameters)

    def _divide(
        self, gradients: Gradients, batch: Batch, weight: float | Tensor
    ) -> float | Tensor | None:
        """Multiply the gradients by `nominal / weight`, and divide them by the loss scale.

        Returns the remaining factor if the kernel of the update multiplies by it.
        """
        factor = batch.nominal / weight
        if self.loss_scale is not None:
            factor = factor / self.loss_scale.value
        if self.update_divides and not (self.regularizers.is_there or hook_of(self.optimizer)):
            return factor
        if isinstance(factor, Tensor) or factor != 1:
            gradients.scale_(factor)
        return None

    def _divisor(self, factor: float | Tensor, norm: float | Tensor) -> Tensor | None:
        """The divisor for the kernel of the update: for the mean, and for clipping."""
        divisor = 1.0 / factor
        if self.task.clip_norm is not None:
            over = (norm + CLIP_EPS) / self.task.clip_norm
            over = over.clamp(min=1.0) if isinstance(over, Tensor) else max(over, 1.0)
            divisor = divisor * over
        if isinstance(divisor, Tensor):
            return divisor.to(self.scope.device, torch.float32)
        if divisor == 1:
            return None
        return torch.full((), divisor, dtype=torch.float32, device=self.scope.device)

    def _adapt_loss_scale(self, overflow: bool, updated: bool) -> None:
        if self.loss_scale is None:
            return
        if overflow:
            self.loss_scale.overflowed()
        elif updated:
            self.loss_scale.went_well()

    def _take_changes(self, batch: Batch) -> None:
        """Sum the gradients of parameters that are trained from this step on, over all ranks."""
        with self._reading():
            self.changes.settle(self.comm, batch, self.layout.like, self.parts.sum_apart)
        self._take_parameters()
        if self.average is not None:
            self.average.add(self.names, self.parameters)

    def _judged(self, loss: float, norm: float) -> Bad | None:
        """The problem of a step; almost every one is plainly good."""
        guard, both_finite = self.guard, math.isfinite(loss) and math.isfinite(norm)
        is_usual = both_finite and guard.spike is None and not guard.skipped_in_a_row
        return None if is_usual else guard.judge(loss, norm)

    def _decide(self, batch: Batch, bad: Bad) -> StepVerdict:
        """Decide about a bad step; without an update, buffers are put back as they were."""
        update = False
        try:
            verdict = self.guard.decide(batch, bad)
            update = verdict.update
            return verdict
        finally:
            if not update:
                self.user_buffers.undo()

    def _update(
        self,
        batch: Batch,
        norm: float | Tensor,
        tally: Tally,
        gradients: Gradients,
        factor: float | Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        divisor = None if factor is None else self._divisor(factor, norm)
        if self.task.clip_norm is not None:
            if factor is None:
                gradients.clip_(self.task.clip_norm, norm)
            if self.probe is not None:
                times = None if divisor is None else 1.0 / divisor
                clipped = multiplied(gradients.tensors(), times)
                self.probe.gradients("clipped gradient", self.names, clipped)
        self._sparse_of_step.hand_over([tally.tensor[where] for where in tally.layout.rows])
        self.scope.key(batch.index, UPDATE)
        with self.parts.updating(gradients):
            if self.before_update is not None:
                self.before_update()
            if skip is None and divisor is None:
                update(self.optimizer)
            else:
                with fused_update(self.optimizer, skip=skip, divisor=divisor):
                    update(self.optimizer)
            self.rates.see()
        rows = self.deferred
        if self.average is not None:  # it rounds alike where a step is read at once, and late
            self.average.update(None if rows is None or rows.updates_wait else rows.skip)

    def regularizer(self, batch: Batch) -> Tensor | None:
        """The regularizer of a step, the same on every rank; `None` if the task has none."""
        if not self.regularizers.is_there:
            return None
        self.scope.key(batch.index, REGULARIZER)
        return self.regularizers.of(self.model)

    def _add_regularizer(self, batch: Batch, gradients: Gradients) -> float | Tensor:
        """Add the gradient of the regularizer, alike on every rank; returns its value."""
        value = self.regularizer(batch)
        if value is None:
            return 0.0
        on_gradient, self.on_gradient = self.on_gradient, None
        gradients.add(value)
        self.on_gradient = on_gradient
        self.regularizers.was = value.detach()
        return self.regularizers.was
