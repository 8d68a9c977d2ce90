"""Forward and backward of a rank's part of the global batch, whatever the strategy.

The engine owns the division. Each rank differentiates the sum of its weighted losses, divided by
`nominal`, the expected samples of the global batch. After the sum over all ranks, all multiply by
`nominal / weight` (`step`), where `weight` is the sum of the weights of all values of the loss.
That is the weighted mean, however unevenly the samples lie on the ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.job.loss_scale import LossScale
from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch, Leaf, MicroBatch, copy_of, micro_for_others
from allranks.torch.data.collate import map_tensors, tensors_in
from allranks.torch.machine import flipped_backward
from allranks.torch.model.layers import Scope, computed_again
from allranks.torch.model.precision import Precision
from allranks.torch.step.gradients import Backward, Gradients, SparseRows
from allranks.torch.step.losses import (
    BatchLoss,
    MicroLoss,
    MicroStep,
    NotCompared,
    Regularizer,
    UnweightedLosses,
    forward,
    uses_a_parameter,
    weighted_losses,
)
from allranks.torch.step.probes import PassObserver, StepProbe
from allranks.torch.step.tally import Stopwatch, Tally, TallyLayout
from allranks.torch.step.trainable import TrainableChanges
from allranks.torch.step.user_buffers import UserBuffers
from allranks.torch.task import Task
from allranks.training.progress import NOTHING

# --- the task's own backward pass ----------------------------------------------------------------
# A backward pass inside forward or loss of the task: adversarial samples, perturbed weights.
#
# While code of the task runs, `.grad` of the parameters is empty: the sums so far are hidden, so
# `zero_grad()` clears only gradients of the task's own backward pass. A gradient that remains is
# refused: it would count once for each micro-batch of each rank.


UNRELATED = re.compile("[Dd]ifferentiated Tensor")


class UserBackwardGuard:
    """Hides the gradients of `parameters` (and `late`) while code of the task runs.

    Within, `is_on` is true and no parameter has a gradient. Raises `RequestError` at the end if a
    parameter then has one.
    """

    def __init__(self) -> None:
        self.parameters: Sequence[nn.Parameter] = ()
        self.late: Sequence[nn.Parameter] = ()
        self.is_on = False
        self._guarded: Sequence[nn.Parameter] = ()
        self._kept: list[Tensor | None] = []

    def __enter__(self) -> None:
        guarded = self._guarded = [*self.parameters, *self.late] if self.late else self.parameters
        self._kept = [parameter.grad for parameter in guarded]
        for parameter, gradient in zip(guarded, self._kept, strict=True):
            if gradient is not None:
                parameter.grad = None
        self.is_on = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_on = False
        written = None
        for parameter, gradient in zip(self._guarded, self._kept, strict=True):
            if parameter.grad is not None:
                written = parameter
            if written is parameter or gradient is not None:
                parameter.grad = gradient
        self._kept = []
        if written is not None and kind is None:
            raise _gradient_left(written)


def _gradient_left(parameter: nn.Parameter) -> RequestError:
    return RequestError(
        asked="forward and loss of the task",
        found=f"a backward pass in them left a gradient, of shape {tuple(parameter.shape)}",
        why="it would count once for each micro-batch of each rank, and not with the mean",
        do="return it with the loss, or clear it: model.zero_grad(), or torch.autograd.grad",
    )


def unrelated_input(asked: str) -> RequestError:
    """The error if loss differentiates by an input, and the model was given copies of the rows."""
    return RequestError(
        asked=asked,
        found="loss asks for the gradient of an output by an input",
        why="the rows that go through the model are copies of those in the batch that loss sees",
        do="ask for it in forward of the model, by the rows that it is given, and return it with "
        "the output; or --strategy ddp",
    )


# --- passes for other ranks ----------------------------------------------------------------------
# Padding passes, whose samples have no weight: if a pass communicates, all ranks must run it.
#
# Under a strategy that cuts its weights (`Strategy.equal_passes`), a forward pass gathers them from
# all ranks, and backward sums their gradients over all ranks. A rank with fewer micro-batches than
# another one runs its last one again; a rank without a sample runs the batch's `spare` one. The
# gradient of the model's output is exactly zero then, whatever the loss is: an infinite loss adds
# nothing.
#
# But zero times an infinite derivative inside the model is NaN. For samples of the batch itself
# that is right: where they are not finite, neither is the step, on any rank. The last samples of a
# stream that has ended are not part of the step. So a strategy that sums gradients itself, within a
# pass, uses zeros in place of the gradients while `is_on`.


SAMPLES_FOR_OTHERS = 2  # some models drop the dimension of the samples if there is one


class PassesForOthers:
    """The padding passes of one rank, which have no weight; with `equal_passes`, as the batch says.

    `is_on` is true in forward and backward of such a pass, and at no other time. If they
    `are_short`, as with unequal shares, they have two samples.
    """

    def __init__(self, step: Passes, equal_passes: bool = True) -> None:
        self.step, self.equal_passes = step, equal_passes
        self.is_on = self.are_short = False
        self._outputs: list[list[Tensor]] = []
        self._micro: MicroBatch | None = None

    def begin(self, batch: Batch) -> None:
        """A step begins."""
        self._outputs = []
        most = SAMPLES_FOR_OTHERS if self.are_short else None
        self._micro = copy_of(micro_for_others(batch, most)) if self._passes(batch) else None

    def forward(self, batch: Batch) -> Any:
        """The forward passes, where all of them come before any backward pass.

        Returns the output for the `spare` micro-batch of a rank without a sample.
        """
        output = None
        if batch.spare is not None and not self.equal_passes:  # only to know what the model returns
            with torch.no_grad(), self._forward():
                return self.step.output(batch, batch.spare)
        for _ in range(self._passes(batch)):
            with self._forward():
                output = self.step.output(batch, self._again())
            self._outputs.append(list(tensors_in(output)))
        return output

    def finish(self, batch: Batch, uses: list[bool] | None) -> None:
        """Run the remaining passes, after those of this rank's own samples.

        `uses` says which tensors of the output a loss over the batch has used: backward runs
        through the same parts of the model on all ranks.
        """
        for tensors in self._outputs:
            pairs = zip(tensors, uses or (), strict=True)
            used = [tensor for tensor, is_used in pairs if is_used and tensor.requires_grad]
            self._backward(used)
        for _ in range(self._passes(batch) - len(self._outputs)):
            with self._forward():
                micro = self._again()
                output = self.step.output(batch, micro)
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(torch.zeros_like)
                losses, _ = self.step.losses_of(output, micro)
            self._backward([losses])
        self._outputs = []

    def _again(self) -> MicroBatch:
        """A copy of the micro-batch for the next pass, which may write on it."""
        assert self._micro is not None
        return copy_of(self._micro)

    def _passes(self, batch: Batch) -> int:
        return batch.passes_without_weight if self.equal_passes else 0

    def _backward(self, tensors: list[Tensor]) -> None:
        with self._is_on():
            torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Around a forward pass: its moments are dropped."""
        with self.step.user_backward, self._is_on():
            yield
        self.step.scope.moments.clear()

    @contextmanager
    def _is_on(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


LOSS = -4  # a key of the generator, in addition to shards


@dataclass(frozen=True)
class StepParts:
    """The parts of a step that come from its strategy, documented there (`strategies.base`).

    `comm` are the ranks that share the global batch. If several ranks read the same part of it, one
    of them `counts_samples`. `tally_type` is the type of the strategy's own tally.
    """

    comm: Comm
    forward: Callable[[Any], Any]
    sum_apart: Callable[[list[tuple[Span, Tensor]]], Tensor]
    lay_out: Callable[[], None]
    watch_gradients: Callable[[list[nn.Parameter], Callable[[int], None]], list[RemovableHandle]]
    whole_weights: Callable[[], AbstractContextManager[None]]
    updating: Callable[[Gradients], AbstractContextManager[None]]
    after_backward: Callable[[], None]
    held_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    equal_passes: bool = False
    computes_alone: bool = False
    counts_samples: bool = True
    shard_alone: bool = False
    tally_type: torch.dtype | None = None
    timed_readers: int = 0
    audit_bytes: int = 0


class Passes:
    """The passes of one rank through the model, and what it must know of its parameters.

    `leaves` makes the passes of a step.

    `parameters` are those that the optimizer updates, in the order of the model. `on_gradient`,
    if set, is called with the position of each whose gradient a backward pass has finished.
    `requests` are sent to all ranks with the next step. `call` is the model, or its compiled form,
    and `run_model` the strategy's `forward`, which calls it with the data of a micro-batch.
    `on_phase`, if set, is called with the name of each phase of a step.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        scope: Scope,
        precision: Precision,
        parts: StepParts,
    ) -> None:
        self.task, self.model, self.optimizer = task, model, optimizer
        self.call: Callable[..., Any] = model
        self.run_model = parts.forward
        self.share = 1.0
        self.scope, self.precision = scope, precision
        self.autocast = precision.autocast if precision.compute is not None else nullcontext
        self.loss_scale: LossScale | None = None
        self.probe: StepProbe | None = None
        self.on_phase: Callable[[str], None] | None = None
        self.requests = NOTHING
        self.on_gradient: Callable[[int], None] | None = None
        self.parts, self.comm = parts, parts.comm
        self.user_backward = UserBackwardGuard()
        self.changes = TrainableChanges(model, optimizer)
        self.user_buffers = UserBuffers(model)
        self.for_others = PassesForOthers(self, parts.equal_passes)
        self._scales: dict[tuple[float, torch.dtype], Tensor] = {}
        self.regularizers = Regularizer(task, parts.whole_weights)
        self._poison_next = self._poisoned = False
        self._poisoned_at: set[int] = set()
        self._micro_step: MicroStep
        self.has_loss = True  # of a pipeline, the last stage alone
        self.stage = 0  # of a pipeline, that which is passed next
        self.stopwatch: Stopwatch | None = None  # with `--share auto`
        self.observer: PassObserver | None = None  # in a step with `--audit`
        self.flips: Tensor | None = None  # the weight whose gradient is wrong on purpose
        self._may_weigh = task.overrides("weight")
        self._unweighted: UnweightedLosses | None = None
        self.batch_loss = (
            BatchLoss(task, self.comm, precision) if task.loss_over == "batch" else None
        )
        self._hooks: list[RemovableHandle] = []
        self._take_parameters()
        self.set_up()

    def set_up(self) -> None:
        """Set up what is built on these passes; called once, when they are ready."""

    def _take_parameters(self) -> None:
        """Train the parameters of `changes`: set up hooks, tally and flags for them."""
        self.close()
        self.names, self.parameters = self.changes.names, self.changes.parameters
        self.user_backward.parameters = self.parameters
        served, exact = self.scope.served, self.parts.shard_alone
        model, optimizer, guard = self.model, self.optimizer, self.user_backward
        self.sparse = SparseRows(
            model, optimizer, self.parameters, lambda: guard.is_on, served, exact
        )
        self.layout = TallyLayout(
            self.model,
            self.parameters,
            self.sparse.counts,
            self.parts.tally_type,
            self.scope.device,
            self.parts.timed_readers,
            self.parts.audit_bytes,
        )
        self.used = [False] * len(self.parameters)
        self._hooks = [
            *self.sparse.hooks,
            *self.parts.watch_gradients(self.parameters, self.mark),
        ]

    def follow_changes(self) -> None:
        """Between steps, on all ranks: lay out for the parameters that are updated now."""
        if self.changes.have_come():
            self.changes.lay_out()
            self._take_parameters()
            self.parts.lay_out()

    def close(self) -> None:
        """Remove the hooks from the parameters, also after a step that failed midway."""
        self.scope.leave()
        for hook in self._hooks:
            hook.remove()

    def mark(self, position: int, _: object = None) -> None:
        """A pass has finished the gradient of a parameter (called during backward)."""
        if self.user_backward.is_on:
            return
        self.used[position] = True
        if self.comm.glance is not None:
            self.comm.glance()  # what is broken off is not computed to its end
        if self.on_gradient is not None:
            self.on_gradient(position)

    # --- the passes of a step -------------------------------------------------------------

    def leaves(
        self, batch: Batch, tally: Tally, release: Callable[[], None] | None = None
    ) -> Iterator[Leaf]:
        """Make the passes of all leaves; yields each when its gradients are in `.grad`.

        Calls `release` before the last backward pass of the step, whose gradients may leave as soon
        as they are finished. A rank without samples calls it never.
        """
        self.begin(batch)
        for leaf in batch.leaves:
            self.begin_leaf()
            for micro in leaf.micros:
                run_backward = self.forward(micro, tally)
                is_last = leaf is batch.leaves[-1] and micro is leaf.micros[-1]
                if release is not None and is_last and not self.observes(micro):
                    release()
                self.backward(run_backward)
            self.end_leaf(batch, leaf, tally)
            yield leaf
        self.end(batch)

    def accumulate(self, batch: Batch, tally: Tally) -> None:
        """The same without a stop: the gradients of all leaves add up in `.grad`."""
        for _ in self.leaves(batch, tally):
            pass

    def begin(self, batch: Batch) -> None:
        """Begin the passes of a step; of a loss over the batch, run all forward passes."""
        self.prepare(batch)
        self._micro_step = self.take(batch)

    def begin_leaf(self) -> None:
        """Begin a leaf: its passes have used no parameter yet."""
        self.used[:] = [False] * len(self.used)
        if self.sparse.positions:
            self.sparse.forget()

    def forward(self, micro: MicroBatch, tally: Tally) -> Callable[[], None]:
        """Forward and loss of a micro-batch, added to the tally. Returns its backward pass."""
        loss, weight, run_backward = self._micro_step(micro)
        if self.flips is not None:
            run_backward = partial(flipped_backward, self.flips, run_backward)
        if self.observes(micro):
            sums = self.layout.tally()
            sums.add(loss, weight, micro.samples, self.scope)
            tally.add_pass(sums)
            assert self.observer is not None
            return self.observer.noting(micro, sums, run_backward)
        if self.parts.counts_samples:
            tally.add(loss, weight, micro.samples, self.scope)
        else:
            self.scope.moments.clear()
        return run_backward

    def observes(self, micro: MicroBatch) -> bool:
        """Whether what a pass computes is noted, so that no gradient may leave before its end."""
        return self.observer is not None and self.observer.covers(micro)

    def backward(self, run_backward: Callable[[], None]) -> None:
        """Run the backward pass of the last forward pass."""
        scope = self.scope
        calls = dict(scope.calls)
        run_backward()
        self.parts.after_backward()
        if scope.calls != calls or scope.moments:
            raise computed_again()

    def end_leaf(self, batch: Batch, leaf: Leaf, tally: Tally) -> None:
        """The passes of a leaf are over; `used` are the parameters that they used."""
        with self.parts.held_weights():
            tally.close(
                batch.index,
                self.used,
                self.requests,
                changed=self.changes.leaf_done(leaf),
                regularizer=self.regularizers.was,
                touched=self.sparse.touched,
            )
        if leaf is batch.leaves[-1]:
            if self.stopwatch is not None:
                self.stopwatch.stop(tally.tensor[self.layout.seconds])
            if self.observer is not None:
                self.observer.write(tally.tensor[self.layout.audit])

    def end(self, batch: Batch) -> None:
        """Run the passes for other ranks; then the passes of the step are over."""
        if self.parts.equal_passes:
            uses = None if self.batch_loss is None else self.batch_loss.uses
            self.for_others.finish(batch, uses)
        self.scope.leave()
        self.flips = None
        if self.user_buffers.are_there:
            self.user_buffers.end(batch)
        if self.on_phase is not None:
            self.tell("end")

    def prepare(self, batch: Batch) -> None:
        """Prepare the passes of a step, and clear what the last one has counted."""
        if self.probe is not None:
            with self.parts.held_weights():
                self.probe.begin(batch)
        if self._poison_next:
            self._poisoned_at.add(batch.index)
            self._poison_next = False
        self._poisoned = batch.index in self._poisoned_at  # also where it is made again
        if self.user_buffers.are_there:
            self.user_buffers.begin()
        with self.parts.held_weights():
            self.changes.begin()
        self.user_backward.late, self._sparse_of_step = self.changes.late, self.sparse
        if self.scope.looked_up:
            for marks in self.scope.looked_up.values():
                marks.zero_()
        if self.scope.whole is not None:
            self.scope.whole.begin(batch.own_samples)
        if self.parts.equal_passes:
            self.for_others.begin(batch)
        if self.on_phase is not None:
            self.tell("begin")

    def tell(self, where: str) -> None:
        """Call `on_phase`, within the weights that this rank holds."""
        assert self.on_phase is not None
        with self.parts.held_weights():
            self.on_phase(where)

    @contextmanager
    def recomputing(self, probe: StepProbe | None) -> Iterator[None]:
        """Within, passes belong to no step, and only `probe` observes them, if there is one."""
        before = self.probe, self.on_phase, self._unweighted
        self.probe, self.on_phase, self._unweighted = probe, None, NotCompared()
        try:
            yield
        finally:
            self.probe, self.on_phase, self._unweighted = before

    def poison_next(self) -> None:
        """Inject a fault: the loss of this rank's first sample in its next step is NaN."""
        self._poison_next = True

    def output(self, batch: Batch, micro: MicroBatch) -> Any:
        """The output of the model for a micro-batch of a step; reproducible at any time."""
        watched = self.on_phase is not None
        if watched:
            self.tell("enter")
        self.scope.enter(batch.index, micro.pieces, micro.samples, self.stage)
        if watched:
            self.tell("entered")
        with self.autocast():
            output = self.run_model(micro.data)
        if watched:
            self.tell("forward")
        if self._poisoned and (self.batch_loss is not None or not self.has_loss):
            return map_tensors(lambda t: t * math.nan if t.is_floating_point() else t, output)
        return output

    def model_alone(self, data: Any) -> Any:
        """The output of the model for the data of a micro-batch, whatever the strategy."""
        return forward(self.task, self.call, data)

    def losses_of(self, output: Any, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """The weighted losses of a micro-batch, a row per sample, and their weights."""
        with self.autocast():
            task, samples, may_weigh = self.task, micro.samples, self._may_weigh
            return weighted_losses(task, output, micro.data, samples, may_weigh=may_weigh)

    def losses(self, batch: Batch, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """The same for a micro-batch that this call runs through the model, as part of the step."""
        with self.user_backward:
            losses, weights = self.losses_of(self.output(batch, micro), micro)
        if self._poisoned and micro is batch.micros[0]:
            factors = losses.new_ones(losses.shape)
            factors[0] = math.nan
            losses = losses * factors
        if self.probe is not None:
            self.probe.losses(losses.detach())
        return losses, weights

    def take(self, batch: Batch) -> MicroStep:
        """A function that runs forward and loss of a micro-batch, and returns its backward."""
        if self.batch_loss is not None:
            return self._take_batch_losses(batch, self.batch_loss)
        return partial(self._sample_losses, batch)

    def _sample_losses(self, batch: Batch, micro: MicroBatch) -> MicroLoss:
        losses, weights = self.losses(batch, micro)
        total = losses.sum()
        if weights is None:
            self._unweighted = self._unweighted or UnweightedLosses()
            self._unweighted.see(losses, micro.data)
        weight = losses.numel() if weights is None else weights.sum()
        scale = self.scale(batch.nominal, total)
        return total.detach(), weight, Backward((total,), (scale,))

    def scale(self, nominal: int, like: Tensor) -> Tensor:
        """The gradient that backward starts from: 1 / nominal.

        Times the `share` of this rank in the loss, where ranks split a sequence, and under fp16
        times the loss scale, by which the gradients are divided again after the exchange.
        """
        factor = self.share * self._loss_scale / nominal
        key = factor, like.dtype
        if key not in self._scales:
            self._scales[key] = like.new_full((), factor)
        return self._scales[key]

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _take_batch_losses(self, batch: Batch, batch_loss: BatchLoss) -> MicroStep:
        moments = {}

        def forward_one(micro: MicroBatch) -> Any:
            with self.user_backward:
                output = self.output(batch, micro)
            moments[micro.pieces] = dict(self.scope.moments)
            self.scope.moments.clear()
            self.scope.key(batch.index, LOSS)  # every rank computes the loss of the whole batch
            return output

        self.used[:] = [False] * len(self.used)
        self.scope.key(batch.index, LOSS)

        def after() -> Any:
            output = self.for_others.forward(batch)
            self.scope.key(batch.index, LOSS)
            return output

        take_rows = batch_loss.prepare(batch, forward_one, after, self.share * self._loss_scale)
        if any(self.used):
            raise uses_a_parameter(self.names[self.used.index(True)])

        def take(micro: MicroBatch) -> MicroLoss:
            self.scope.moments.update(moments[micro.pieces])
            return take_rows(micro)

        return take
