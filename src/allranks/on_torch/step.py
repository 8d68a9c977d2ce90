"""What every step shares, whatever the strategy: written once here, called by each of them.

    forward and backward of every micro-batch                                    `accumulate`
    (the strategy sums gradients and tally over all ranks)
    division by the weight, regularizer, clipping, schedule, update, BatchNorm   `finish`

The engine owns the division. Losses are per sample: what is differentiated is their weighted sum
over the nominal samples of the global batch, so a plain sum over micro-batches and ranks is the
mean already wherever all weights are 1. Other weights are put right after the sum, once, by the
ratio samples / weight, which is the same number on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.on_torch.batch_loss import BatchLoss
from allranks.on_torch.comm import Comm
from allranks.on_torch.data import Batch, Leaf, MicroBatch
from allranks.on_torch.layers import Scope
from allranks.on_torch.losses import forward, weighted_losses
from allranks.on_torch.tally import Tally, TallyLayout
from allranks.on_torch.task import Task


@dataclass(frozen=True)
class StepResult:
    """One step of the job, the same on every rank. `loss` is the mean over the global batch.

    `samples` 0 means that no rank had a sample (the end of a stream); `updated` is false where the
    weights were left as they were; `grad_norm` is known only where the gradient is clipped.
    """

    batch_index: int
    epoch: int
    loss: float
    samples: int
    weight: float
    learning_rate: float
    updated: bool
    grad_norm: float | None = None


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
    """

    def __init__(
        self, task: Task, model: nn.Module, optimizer: Optimizer, scope: Scope, comm: Comm
    ) -> None:
        self.task, self.model, self.optimizer = task, model, optimizer
        self.scope = scope
        self.probe: Probe | None = None
        self.on_gradient: Callable[[int], None] | None = None
        self.names, self.parameters = _trainable(model, optimizer)
        self.layout = TallyLayout(model, self.parameters)
        self.used = [False] * len(self.parameters)
        self._scales: dict[tuple[int, torch.dtype], Tensor] = {}
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._has_schedule = task.overrides("schedule")
        self._has_regularizer = task.overrides("regularizer")
        self._batch_loss = BatchLoss(task, comm) if task.loss_over == "batch" else None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._marker(position))
            for position, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        """Take the hooks off the parameters: the model is the user's own again."""
        for hook in self._hooks:
            hook.remove()

    def _marker(self, position: int) -> Callable[[Tensor], None]:
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
                    raise _computed_again()
            tally.close(self.used)
            leaf_done(leaf)
        self.scope.leave()

    def _take_sample_losses(self, batch: Batch) -> Take:
        def take(micro: MicroBatch) -> Taken:
            self.scope.enter(batch.index, micro.pieces, micro.samples)
            output = forward(self.task, self.model, micro.data)
            losses, weights = weighted_losses(self.task, output, micro.data, micro.samples)
            total = losses.sum()
            weight = losses.numel() if weights is None else float(weights.sum())
            scale = self._scale(batch.nominal, total)
            return total.detach(), weight, lambda: total.backward(scale)

        return take

    def _scale(self, nominal: int, like: Tensor) -> Tensor:
        """1 / nominal: by this the sum of losses is scaled before anything is exchanged."""
        key = nominal, like.dtype
        if key not in self._scales:
            self._scales[key] = like.new_tensor(1 / nominal)
        return self._scales[key]

    def _take_batch_losses(self, batch: Batch, batch_loss: BatchLoss) -> Take:
        moments = {}

        def forward_one(micro: MicroBatch) -> object:
            self.scope.enter(batch.index, micro.pieces, micro.samples)
            output = forward(self.task, self.model, micro.data)
            moments[micro.pieces] = dict(self.scope.moments)
            self.scope.moments.clear()
            return output

        self.used[:] = [False] * len(self.used)
        take_rows = batch_loss.prepare(batch, forward_one)
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
        totals = tally.totals()
        weight, samples = totals.weight, totals.samples
        updates = samples > 0 and not (
            batch.sizes is None and self.task.last_batch == "drop" and samples < batch.nominal
        )
        rate = float(self.optimizer.param_groups[0]["lr"])
        if not updates:
            return StepResult(batch.index, batch.epoch, float("nan"), samples, weight, rate, False)
        if weight <= 0:
            raise _weightless(batch, weight)
        for position in totals.unused:  # as in one process: no gradient, not one of zeros
            self.parameters[position].grad = None
        present = [p.grad for p in self.parameters if p.grad is not None]
        if weight != batch.nominal:
            for gradient in present:
                gradient.mul_(batch.nominal / weight)
        loss = totals.loss / weight + self._add_regularizer()
        if self.probe is not None:
            self.probe.gradients("gradient", self)
        norm = None
        if self.task.clip_norm is not None:
            present = [p.grad for p in self.parameters if p.grad is not None]
            total = get_total_norm(present)
            clip_grads_with_norm_(self.parameters, self.task.clip_norm, total)
            norm = float(total)
            if self.probe is not None:
                self.probe.gradients("clipped gradient", self)
        self.optimizer.step()
        tally.update_norms()
        return StepResult(batch.index, batch.epoch, loss, samples, weight, rate, True, norm)

    def set_rate(self, update: int) -> None:
        """Set the learning rates for update number `update` of the job."""
        if self._has_schedule:
            factor = float(self.task.schedule(update))
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def _add_regularizer(self) -> float:
        """Add the gradient of the regularizer, alike on every rank; returns its value."""
        value = self.task.regularizer(self.model) if self._has_regularizer else None
        if value is None:
            return 0.0
        on_gradient, self.on_gradient = self.on_gradient, None
        value.backward()
        self.on_gradient = on_gradient
        return float(value.detach())


def _trainable(model: nn.Module, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
    """The parameters that the optimizer updates, in the order of the model, with their names."""
    if not isinstance(optimizer, Optimizer):
        raise RequestError(
            asked="optimizer(model) of the task",
            found=f"a {type(optimizer).__name__}",
            why="the engine updates the weights with a torch optimizer",
            do="return one: torch.optim.AdamW(model.parameters(), …)",
        )
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = updated - {id(p) for p in model.parameters()}
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if strange or (closure is not None and closure.default is inspect.Parameter.empty):
        raise RequestError(
            asked="optimizer(model) of the task",
            found=f"{len(strange)} parameters that are not in the model"
            if strange
            else f"{type(optimizer).__name__}, which needs a closure",
            why="the engine sums the gradients of the model's parameters, once for each step",
            do="make every trained parameter part of the model"
            if strange
            else "use an optimizer whose step() needs no closure",
        )
    named = [(n, p) for n, p in model.named_parameters() if id(p) in updated and p.requires_grad]
    if not named:
        raise RequestError(
            asked="optimizer(model) of the task",
            found="no parameter of the model in it",
            why="there would be nothing to train",
            do="make it from the model it is given: torch.optim.AdamW(model.parameters(), …)",
        )
    return [name for name, _ in named], [parameter for _, parameter in named]


def _computed_again() -> RequestError:
    return RequestError(
        asked="activation checkpointing around BatchNorm or dropout",
        found="such a layer ran again during backward",
        why="it would draw another mask, and count its moments twice",
        do="leave these layers outside of the checkpointed part",
    )


def _weightless(batch: Batch, weight: float) -> RequestError:
    return RequestError(
        asked=f"step {batch.index} of the job",
        found=f"the weights of its global batch add up to {weight}",
        why="a mean over no weight does not exist",
        do="let weight(batch) be positive somewhere in every batch",
    )
