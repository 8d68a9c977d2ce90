"""What every step shares, whatever the strategy: written once here, called by each of them.

forward and backward of every micro-batch                              `accumulate` (`passes`)
(the strategy sums gradients and tally over all ranks)
division by the weight, regularizer, guard, clipping, update, BatchNorm      `apply`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.accelerator import is_accelerator, recorded_event
from allranks.torch.checkpoint.state import hyper_parameters
from allranks.torch.comm.subgroups import in_exchange
from allranks.torch.data.batch import Batch, Leaf
from allranks.torch.model.max_norm import shorten_alike
from allranks.torch.optimizers.made import hook_of
from allranks.torch.step.deferred_results import (
    DeferredResults,
    Sent,
    fused_update,
    is_held,
    numbers_of,
)
from allranks.torch.step.ema import MovingAverage
from allranks.torch.step.gradients import Gradients, multiplied
from allranks.torch.step.passes import Passes
from allranks.torch.step.tally import Tally, Totals
from allranks.torch.step.trainable import update
from allranks.torch.task import Task
from allranks.training.guard import Bad, Guard, StepVerdict, is_finite, weightless
from allranks.training.progress import StepResult, UnreadResult

# --- rates ---------------------------------------------------------------------------------------
# The learning rates of each update: those that the groups came with, times the task's schedule.
#
# Others may set rates too: a scheduler of torch that leaves no other mark (`ReduceLROnPlateau`), a
# callback. Before each update they are compared with what they were when the engine, a checkpoint
# or the optimizer itself had set them, which takes a microsecond for each group.


class Rates:
    """`made` is what every group of the optimizer says beside its parameters, as it came.

    `told` is a sentence on rates that others set, from when they first do.
    """

    def __init__(self, task: Task, optimizer: Optimizer) -> None:
        self.task, self.optimizer = task, optimizer
        self.made = hyper_parameters(optimizer)
        self.told = ""
        self._are_scheduled = task.overrides("schedule") or task.overrides("plateau")
        self._is_first = True
        self._known = self._rates()

    def set(self, update: int, times: float = 1.0) -> None:
        """Set the rates for update number `update` of the job, `times` what the schedule says.

        A group that was added on the way has the rate that it came with as its own. Raises
        `RequestError` where there is a schedule, and others have set rates.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.made):
            self._note_groups()
        rates = self._rates()
        if rates != self._known and (self._are_scheduled or not self._is_first):
            pairs = zip(self._known, rates, strict=False)  # a group that is new has set nothing
            if others := [(was, now) for was, now in pairs if was != now]:
                self._others_set(update, *others[0])
        self._is_first = False
        self._known = rates
        if self._are_scheduled:
            factor = float(self.task.schedule(update)) * times
            for group, made in zip(groups, self.made, strict=True):
                group["lr"] = float(made["lr"]) * factor
            self.see()

    def see(self) -> None:
        """Whoever may set the rates has done so: the engine, a checkpoint, the optimizer itself."""
        self._known = self._rates()

    def _rates(self) -> list[Any]:
        groups = self.optimizer.param_groups
        return [
            float(rate) if isinstance(rate := group.get("lr"), Tensor) else rate for group in groups
        ]

    def _others_set(self, update: int, was: Any, now: Any) -> None:
        """Others set a rate, between two updates."""
        when = f"from {was:g} to {now:g} after {update} update{'s' * (update != 1)}"
        if self._are_scheduled:
            raise RequestError(
                asked="schedule() or plateau() of the task",
                found=f"a learning rate that was set {when}, not by the engine",
                why="the engine sets the rates before each update: what a scheduler of torch or a "
                "callback sets would be lost",
                do="say all of it in schedule(step), and in plateau() what follows a metric "
                "(allranks.training.schedules.Plateau), or leave both away",
            )
        self.told = self.told or (
            f"a learning rate was set {when}, not by the engine: a checkpoint holds the rate, and "
            "nothing of what decides on it; right for a function of the step, but a scheduler that "
            "counts (ReduceLROnPlateau) would start anew: write plateau() in the task"
        )

    def _note_groups(self) -> None:
        now = hyper_parameters(self.optimizer)
        if len(now) < len(self.made):
            raise RequestError(
                asked="to go on training",
                found=f"{len(now)} groups in the optimizer, where there were {len(self.made)}",
                why="rates and checkpoints go by the number of a group",
                do="freeze what is not to be trained any more: requires_grad_(False)",
            )
        self.made += now[len(self.made) :]


REGULARIZER, UPDATE = -3, -2  # what the generator is keyed for, beside shards
NOTHING = nullcontext()
CLIP_EPS = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to the norm


class SharedStep(Passes):
    """A step that no strategy writes again: its passes, and then the update."""

    def set_up(self) -> None:
        self.rows: DeferredResults | None = None  # where steps may stay unread
        self.update_divides = False  # the mean and clipping are left to the kernel of the update
        self._computed: Any = None  # the event at which this rank's own passes are over
        self._uses_all = True  # since the last update this rank's leaves used all parameters
        self.own_positions: Sequence[int] | None = None  # of the parameters that its passes meet
        self._is_awaited = is_accelerator(self.scope.device)
        self.average: MovingAverage | None = None
        self.guard = Guard()
        self.rates = Rates(self.task, self.optimizer)

    def apply(self, batch: Batch, tally: Tally, gradients: Gradients) -> StepResult:
        """The update, from gradients and tally that are summed over all ranks.

        Sends nothing of its own but which rows of tables with a `max_norm` were looked up, if there
        are such; `gradients` may communicate.
        """
        if self.scope.looked_up:
            shorten_alike(self.model, self.scope, self.comm)
        uses_all, self._uses_all = self._uses_all, True
        if self.rows is not None and self.rows.is_on:
            unused = () if uses_all else tally.unused()
            return self._apply_unread(self.rows, batch, tally, gradients, unused)
        totals = self._read(tally, batch)
        self.reached("finish")
        weight, samples = totals.weight, totals.samples
        where, rate = (batch.index, batch.epoch), float(self.optimizer.param_groups[0]["lr"])
        if not self.is_taken(batch, samples):
            return StepResult(*where, math.nan, samples, weight, rate, False, asked=totals.asked)
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
        elif (bad := self.guard.judge(loss, norm)) is not None:
            verdict = self._decide(batch, bad)
        if verdict.update:
            self._update(batch, norm, tally, gradients, factor)
            tally.update_norms()
            self.layout.was_updated = not totals.unused
        else:
            self.scope.key(batch.index, UPDATE)  # callbacks draw the same on every rank
        if totals.changed:
            self.parts.lay_out()
        self._adapt_loss_scale(overflow, verdict.update)
        seen, judged = (*where, loss, samples, weight, rate), (verdict.text, loss_scale, overflow)
        done = verdict.update, norm, totals.asked
        return StepResult(*seen, *done, *judged, verdict.culprits)

    def _apply_unread(
        self,
        rows: DeferredResults,
        batch: Batch,
        tally: Tally,
        gradients: Gradients,
        unused: tuple[int, ...],
    ) -> StepResult:
        """The same of a step whose sums the host has not read: they stay on the device.

        It is held back unless it is plainly good. What else may become of it, `apply` alone says,
        when it is made again, and read at once (`in_flight`).
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
        held = rows.hold_unless(sums.is_right & is_finite(loss) & is_finite(norm))
        row = rows.send(numbers_of(held, loss, norm, was, sums.head), self._computed)
        if not rows.updates_wait:
            self._update(batch, norm, tally, gradients, factor, held)
        elif not is_held(row.read(self.comm.heartbeat)):
            self._update(batch, norm, tally, gradients)
        tally.update_norms(held)
        self.user_buffers.undo_where(held)
        self._adapt_loss_scale(overflow=False, updated=True)
        rate = float(self.optimizer.param_groups[0]["lr"])
        sent = Sent(row, self.layout, batch, rate, loss_scale, self.comm.heartbeat)
        return UnreadResult(batch.index, batch.epoch, rate, sent)

    def _read(self, tally: Tally, batch: Batch) -> Totals:
        """What the tally says; where that waits for the device, it is for the other ranks."""
        with self._reading(self._computed):
            return tally.totals(batch.index)

    def _reading(self, computed: Any = None) -> AbstractContextManager[None]:
        """Around a read that waits for other ranks, in whatever group of the strategy."""
        return in_exchange(self.comm.heartbeat, computed) if self._is_awaited else NOTHING

    def check(self, batch: Batch, totals: Totals, regularizer: float | Tensor) -> None:
        """Raise for sums that are no mean; `regularizer` is what this rank gave for them."""
        if self._unweighted is not None:
            self._unweighted.sum_up(totals.samples, totals.weight)
        if totals.weight <= 0:
            raise weightless(batch, totals.weight)
        self.regularizers.check(totals.regularizer, self.layout.like.dtype, float(regularizer))

    def close_leaf(self, batch: Batch, leaf: Leaf, tally: Tally) -> None:
        super().close_leaf(batch, leaf, tally)
        if self.rows is not None:
            own = self.own_positions
            used = self.used if own is None else [self.used[position] for position in own]
            self._uses_all = self._uses_all and all(used)

    def end(self, batch: Batch) -> None:
        """Note where the own passes end, if they wait for no other rank."""
        super().end(batch)
        if self._is_awaited and self.comm.size > 1 and self.parts.computes_alone:
            self._computed = recorded_event(self.scope.device)

    def is_taken(self, batch: Batch, samples: int) -> bool:
        """Whether so many samples of all ranks are a step, or the end of a stream."""
        drops = batch.sizes is None and self.task.last_batch == "drop"
        return samples > 0 and not (drops and samples < batch.nominal)

    def _settle(self, batch: Batch, totals: Totals, gradients: Gradients) -> None:
        """Let every parameter that some rank used have a gradient, and no other one."""
        gradients.settle(totals.unused)
        if totals.changed:
            self._take_changes(batch)
            gradients.follow(self.parameters)

    def _divide(
        self, gradients: Gradients, batch: Batch, weight: float | Tensor
    ) -> float | Tensor | None:
        """Sums over the nominal samples become the mean over the weight, without the loss scale.

        Returns what they are still to be multiplied by, where that is left to the update.
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
        """What the kernel of the update divides gradients by: for their mean, and to clip them."""
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
        """Other parameters are trained from this step on: sum their gradients over all ranks."""
        with self._reading():
            self.changes.settle(self.comm, batch, self.layout.like, self.parts.sum_apart)
        self._take_parameters()
        if self.average is not None:
            self.average.add(self.names, self.parameters)

    def _decide(self, batch: Batch, bad: Bad) -> StepVerdict:
        """What there is to say of a bad step, and whether it updates; if not, it never was."""
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
        held: Tensor | None = None,
    ) -> None:
        divisor = None if factor is None else self._divisor(factor, norm)
        if self.task.clip_norm is not None:
            if factor is None:
                gradients.clip_(self.task.clip_norm, norm)
            if self.probe is not None:
                times = None if divisor is None else 1.0 / divisor
                clipped = multiplied(gradients.tensors(), times)
                self.probe.gradients("clipped gradient", self.names, clipped)
        self._rows.hand_over([tally.tensor[where] for where in tally.layout.rows])
        self.scope.key(batch.index, UPDATE)
        with self.parts.updating(gradients):
            if held is None and divisor is None:
                update(self.optimizer)
            else:
                with fused_update(self.optimizer, held=held, divisor=divisor):
                    update(self.optimizer)
            self.rates.see()
        rows = self.rows
        if self.average is not None:  # it rounds alike where a step is read at once, and late
            self.average.update(None if rows is None or rows.updates_wait else rows.held)

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
