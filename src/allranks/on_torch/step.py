"""What every step shares, whatever the strategy: written once here, called by each of them.

    forward and backward of every micro-batch                                    `accumulate`
    (the strategy sums gradients and tally over all ranks)
    division by the weight, regularizer, guard, clipping, update, BatchNorm      `finish`

The engine owns the division. Losses are per sample: what is differentiated is their weighted sum
over the nominal samples of the global batch, so a plain sum over micro-batches and ranks is the
mean already wherever all weights are 1. Other weights are put right after the sum, once, by the
ratio samples / weight, which is the same number on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.loss_scale import LossScale
from allranks.on_torch.arithmetic import Arithmetic
from allranks.on_torch.averaging import MovingAverage
from allranks.on_torch.batch_loss import BatchLoss
from allranks.on_torch.comm import Comm
from allranks.on_torch.data import Batch, Leaf, MicroBatch
from allranks.on_torch.gradient_length import length
from allranks.on_torch.layers import Scope, computed_again
from allranks.on_torch.losses import forward, weighted_losses
from allranks.on_torch.nested import map_tensors
from allranks.on_torch.tally import Tally, TallyLayout
from allranks.on_torch.task import Task
from allranks.on_torch.trainable import trainable
from allranks.on_torch.user_buffers import UserBuffers
from allranks.order import random_key
from allranks.training.guard import Bad, Guard
from allranks.training.progress import NOTHING, StepResult

REGULARIZER, UPDATE = -3, -2  # what the generator is keyed for, beside shards


Taken = tuple[Tensor, float, Callable[[], None]]
"""Of one micro-batch: the sum of its losses, of its weights, and what runs backward."""
Take = Callable[[MicroBatch], Taken]


class Probe(Protocol):
    """Sees the insides of a step; `check` and the tests record them."""

    def begin(self, batch: Batch) -> None: ...

    def gradients(self, stage: str, step: SharedStep) -> None: ...


class SharedStep:
    """The parts of a step that no strategy writes again. One for each strategy.

    `parameters` are those that the optimizer updates, in the order of the model; `on_gradient`,
    if set, is called with the position of each whose gradient a backward pass has finished.
    `asked` is what this rank tells all others with its next step. `flats`, if a strategy has them,
    hold the gradients of all parameters and nothing else. `call` is what forward passes go
    through: the model, or what a compiler has made of it; `forward`, where a strategy has one of
    its own, is called with the data of a micro-batch in its place.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        scope: Scope,
        comm: Comm,
        arithmetic: Arithmetic,
    ) -> None:
        self.task, self.model, self.optimizer = task, model, optimizer
        self.call: Callable[..., Any] = model
        self.forward: Callable[[Any], Any] | None = None
        self.scope, self.arithmetic = scope, arithmetic
        self.loss_scale: LossScale | None = None
        self.average: MovingAverage | None = None
        self.probe: Probe | None = None
        self.asked = NOTHING
        self.on_gradient: Callable[[int], None] | None = None
        self.names, self.parameters = trainable(model, optimizer)
        self.guard = Guard()
        self.user_buffers = UserBuffers(model)
        self.flats: list[Tensor] = []
        self.layout = TallyLayout(model, self.parameters)
        self.used = [False] * len(self.parameters)
        self._scales: dict[tuple[float, torch.dtype], Tensor] = {}
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._has_schedule = task.overrides("schedule")
        self._has_regularizer = task.overrides("regularizer")
        self._poison_next = self._poisoned = False
        self._batch_loss = BatchLoss(task, comm, arithmetic) if task.loss_over == "batch" else None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self.marker(position))
            for position, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        """Take the hooks off the parameters: the model is the user's own again."""
        for hook in self._hooks:
            hook.remove()

    def marker(self, position: int) -> Callable[[Tensor], None]:
        def mark(parameter: Tensor) -> None:
            self.used[position] = True
            if self.on_gradient is not None:
                self.on_gradient(position)

        return mark

    def accumulate(
        self,
        batch: Batch,
        tally_of: Callable[[Leaf], Tally],
        leaf_done: Callable[[Leaf], None] = lambda leaf: None,
        before_last: Callable[[], None] = lambda: None,
    ) -> None:
        """Forward and backward of every micro-batch; gradients add up in `.grad`.

        For each leaf, the tally that `tally_of` gives is filled and then `leaf_done` is called.
        `before_last` is called before the last backward pass of the last leaf, if that leaf has
        any: gradients finished after it may leave.
        """
        if self.probe is not None:
            self.probe.begin(batch)
        self._poisoned, self._poison_next = self._poison_next, False
        self.user_buffers.begin()
        take = self._take_sample_losses(batch)
        if self._batch_loss is not None:
            take = self._take_batch_losses(batch, self._batch_loss)
        for leaf in batch.leaves:
            tally = tally_of(leaf)
            self.used[:] = [False] * len(self.used)
            for micro in leaf.micros:
                loss, weight, backward = take(micro)
                tally.add(loss, weight, micro.samples, self.scope)
                if leaf is batch.leaves[-1] and micro is leaf.micros[-1]:
                    before_last()
                calls = dict(self.scope.calls)
                backward()
                if self.scope.moments or self.scope.calls != calls:
                    raise computed_again()
            tally.close(batch.index, self.used, self.asked)
            leaf_done(leaf)
        self.scope.leave()
        self.user_buffers.end(batch)

    def poison_next(self) -> None:
        """A fault on purpose: the loss of this rank's first sample in its next step is NaN."""
        self._poison_next = True

    def output(self, batch: Batch, micro: MicroBatch) -> Any:
        """The output of the model for a micro-batch of a step; the same whenever it is computed."""
        self.scope.enter(batch.index, micro.pieces, micro.samples)
        with self.arithmetic.context():
            output = (self.forward or partial(forward, self.task, self.call))(micro.data)
        if self._poisoned and self._batch_loss is not None:
            return map_tensors(lambda t: t * math.nan if t.is_floating_point() else t, output)
        return output

    def losses(self, batch: Batch, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """The weighted losses of a micro-batch, a row per sample, and their weights."""
        output = self.output(batch, micro)
        with self.arithmetic.context():
            losses, weights = weighted_losses(self.task, output, micro.data, micro.samples)
        if self._poisoned and micro is batch.micros[0]:
            factors = losses.new_ones(losses.shape)
            factors[0] = math.nan
            losses = losses * factors
        return losses, weights

    def _take_sample_losses(self, batch: Batch) -> Take:
        def take(micro: MicroBatch) -> Taken:
            losses, weights = self.losses(batch, micro)
            total = losses.sum()
            weight = losses.numel() if weights is None else float(weights.sum())
            scale = self.scale(batch.nominal, total)
            return total.detach(), weight, lambda: total.backward(scale)

        return take

    def scale(self, nominal: int, like: Tensor) -> Tensor:
        """By this the sum of losses is scaled before anything is exchanged: 1 / nominal.

        Under fp16 times the loss scale, which the gradients lose again after the exchange.
        """
        factor = 1 / nominal if self.loss_scale is None else self.loss_scale.value / nominal
        key = factor, like.dtype
        if key not in self._scales:
            self._scales[key] = like.new_tensor(factor)
        return self._scales[key]

    def _take_batch_losses(self, batch: Batch, batch_loss: BatchLoss) -> Take:
        moments = {}

        def forward_one(micro: MicroBatch) -> Any:
            output = self.output(batch, micro)
            moments[micro.pieces] = dict(self.scope.moments)
            self.scope.moments.clear()
            return output

        self.used[:] = [False] * len(self.used)
        loss_scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        take_rows = batch_loss.prepare(batch, forward_one, loss_scale)
        if any(self.used):
            raise RequestError(
                asked='loss(output, batch) of a task with loss_over = "batch"',
                found=f"it uses the parameter {self.names[self.used.index(True)]!r} itself",
                why="every rank computes this loss, so that gradient would count once for each",
                do="let the model return it with its output, one row for each sample",
            )

        def take(micro: MicroBatch) -> Taken:
            self.scope.moments.update(moments[micro.pieces])
            return take_rows(micro)

        return take

    def finish(self, batch: Batch, tally: Tally) -> StepResult:
        """The update, from gradients and tally that are summed over all ranks. No communication."""
        totals = tally.totals(batch.index)
        weight, samples = totals.weight, totals.samples
        updates = samples > 0 and not (
            batch.sizes is None and self.task.last_batch == "drop" and samples < batch.nominal
        )
        rate = float(self.optimizer.param_groups[0]["lr"])
        if not updates:
            nothing = float("nan")
            return StepResult(
                batch.index, batch.epoch, nothing, samples, weight, rate, False, asked=totals.asked
            )
        if weight <= 0:
            raise _weightless(batch, weight)
        for position in totals.unused:  # as in one process: no gradient, not one of zeros
            self.parameters[position].grad = None
        loss_scale = None if self.loss_scale is None else self.loss_scale.value
        factor = batch.nominal / weight if weight != batch.nominal else 1.0
        if loss_scale is not None:
            factor /= loss_scale
        if factor != 1:
            for gradient in self._gradients():
                gradient.mul_(factor)
        loss = totals.loss / weight + self._add_regularizer(batch)
        if self.probe is not None:
            self.probe.gradients("gradient", self)
        norm = self._gradient_norm(unused=bool(totals.unused))
        overflow = self.loss_scale is not None and self.loss_scale.explains(loss, norm)
        updated, text = not overflow, ""
        if overflow:
            self.user_buffers.undo()
        elif (bad := self.guard.judge(loss, norm)) is not None:
            text, updated = self._decide(batch, bad)
        if updated:
            self._update(batch, norm)
            tally.update_norms()
        self._adapt_loss_scale(overflow, updated)
        return StepResult(
            batch.index,
            batch.epoch,
            loss,
            samples,
            weight,
            rate,
            updated,
            norm,
            totals.asked,
            text,
            loss_scale,
            overflow,
        )

    def _adapt_loss_scale(self, overflow: bool, updated: bool) -> None:
        if self.loss_scale is None:
            return
        if overflow:
            self.loss_scale.overflowed()
        elif updated:
            self.loss_scale.went_well()

    def _gradient_norm(self, unused: bool) -> float:
        """The length of the gradient; not finite exactly if one of its elements is not."""
        if self.task.clip_norm is not None:
            norm = float(get_total_norm(self._gradients()))
        elif self.flats and not (unused and self._has_regularizer):
            norms = [torch.linalg.vector_norm(flat) for flat in self.flats]
            norm = norms[0].item() if len(norms) == 1 else math.hypot(*torch.stack(norms).tolist())
        else:
            norm = length(self._gradients())
        return norm if math.isfinite(norm) else length(self._gradients(), torch.float64)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _decide(self, batch: Batch, bad: Bad) -> tuple[str, bool]:
        """What there is to say of a bad step, and whether it updates; if not, it never was."""
        update = False
        try:
            verdict = self.guard.decide(batch, bad)
            update = verdict.update
            return verdict.text, update
        finally:
            if not update:
                self.user_buffers.undo()

    def _update(self, batch: Batch, norm: float) -> None:
        if self.task.clip_norm is not None:
            total = self.parameters[0].new_tensor(norm, requires_grad=False)
            clip_grads_with_norm_(self.parameters, self.task.clip_norm, total)
            if self.probe is not None:
                self.probe.gradients("clipped gradient", self)
        self._key_generator(batch, UPDATE)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()

    def _key_generator(self, batch: Batch, purpose: int) -> None:
        """What is drawn next is the same on every rank, whichever shard it was keyed for last."""
        key = random_key(self.scope.seed, batch.index, -1, -1, purpose)
        torch.default_generator.manual_seed(key)
        if self.scope.device.type == "cuda":
            torch.cuda.manual_seed(key)

    def set_rate(self, update: int) -> None:
        """Set the learning rates for update number `update` of the job."""
        if self._has_schedule:
            factor = float(self.task.schedule(update))
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def regularizer(self, batch: Batch) -> Tensor | None:
        """The regularizer of a step, the same on every rank; `None` if the task has none."""
        if not self._has_regularizer:
            return None
        self._key_generator(batch, REGULARIZER)
        return self.task.regularizer(self.model)

    def _add_regularizer(self, batch: Batch) -> float:
        """Add the gradient of the regularizer, alike on every rank; returns its value."""
        value = self.regularizer(batch)
        if value is None:
            return 0.0
        on_gradient, self.on_gradient = self.on_gradient, None
        value.backward()
        self.on_gradient = on_gradient
        return float(value.detach())


def _weightless(batch: Batch, weight: float) -> RequestError:
    return RequestError(
        asked=f"step {batch.index} of the job",
        found=f"the weights of its global batch add up to {weight}",
        why="a mean over no weight does not exist",
        do="let weight(batch) be positive somewhere in every batch",
    )
