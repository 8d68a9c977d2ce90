"""The base of all strategies: set up once, then one `train_step` for each global batch.

A strategy does not deal with device numbers, files or processes. It gets its options from its card,
its ranks from `comm`, and the parts of a step that all strategies share from `SharedStep`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from allranks.job.loss_scale import LossScale
from allranks.job.place import Placed
from allranks.strategies.card import Card, Workload
from allranks.strategies.cards import CARDS
from allranks.strategies.mesh import DATA, Agreement
from allranks.strategies.reduction_tree import Span
from allranks.strategies.shards import Shares
from allranks.torch.checkpoint.state import (
    TrainedSet,
    load_model_state,
    load_optimizer_state,
    load_trained_set,
    model_state,
    not_persistent,
    optimizer_state,
)
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch
from allranks.torch.model.layers import Scope
from allranks.torch.model.placement import placed_tensors
from allranks.torch.model.precision import Precision
from allranks.torch.optimizers.made import made_on_parts
from allranks.torch.parallel.data.tree import TreeSum
from allranks.torch.parallel.sharded.gradients import refuse_copies
from allranks.torch.step.ema import MovingAverage, TwoModes
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.losses import forward
from allranks.torch.step.passes import StepParts
from allranks.torch.step.step import SharedStep
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.strategies.layout import Layout, put_whole
from allranks.torch.task import Task
from allranks.torch.witness.same_model import check_same_groups
from allranks.training.progress import Progress, RankRequests, StepResult

# --- traits --------------------------------------------------------------------------------------
# Properties of a strategy that other rooms need: how it runs the model, and what a rank holds.


class Traits:
    """Set by the class of a strategy, or by an instance when it is constructed."""

    name: str
    can_be_compiled: bool = True
    """Whether forward passes may use a compiled model."""
    has_one_model: bool = True
    """Whether a rank has one model, not copies in threads."""
    can_run_ahead: bool = False
    """Whether a skipped step leaves no trace, and the host does not read the norm."""
    cuts_micro_batches: bool = False  # whether micro-batches are split into pieces
    equal_passes: bool = False
    """Whether all ranks make the same number of passes, because a pass communicates.

    A strategy that sums gradients within a pass adds zeros while `step.for_others.is_on`.
    """
    computes_alone: bool = False
    """Whether forward and backward never wait for messages of other ranks."""
    has_whole_passes: bool = False
    """Whether a pass holds whole activations: draws as `F.dropout` can be keyed by the samples."""
    has_own_state: bool = True
    """Whether a rank may have a state of its own, as residuals."""
    passes_meet_readers: bool = True
    """Whether a pass communicates with ranks that read other samples."""
    counts_passes: bool = False
    """Whether batches carry the largest number of passes of a rank, though ranks may make
    fewer."""
    compares_groups: bool = True
    """Whether `setup` compares the groups of the optimizer between ranks."""
    cuts_by_shard: bool = False
    """Whether each shard is a micro-batch, unless `--micro-batch` is set."""
    tally_type: torch.dtype | None = None
    """The dtype of the tally, if it is a separate message; else it is sent with gradients."""
    builds_in_turn: bool = False
    """Whether the ranks of a node build the model one after the other and keep their parts.

    `parallelize` then waits for no other rank (`make_groups` does), keeps names, and accepts a
    model on meta too.
    """
    fills_parts: bool = False
    """Whether tensors on meta are filled after `parallelize`, which accepts them: a rank never has
    such a model whole. It is implied by `builds_in_turn`, and there is no turn without it."""


# --- context -------------------------------------------------------------------------------------
# The arguments of every strategy.


@dataclass(frozen=True)
class StrategyContext:
    """The arguments of a strategy: its name, the task, the ranks, the options of its card, …"""

    name: str
    task: Task
    comm: Comm
    scope: Scope
    options: Mapping[str, Any]
    precision: Precision
    bitwise: bool = False
    loss_scale: LossScale | None = None
    times_readers: bool = False
    """Whether ranks tell each other how long they work in each step (`--share auto`)."""
    audit_bytes: int = 0
    """The bytes of a digest that ranks tell each other in each step (`--audit`)."""


NOTHING = nullcontext()
MakeOptimizer = Callable[[nn.Module], Optimizer]


class Strategy(Traits, ABC):
    """One optimizer step on one global batch, made by all ranks.

    A step is `forward_backward`, then `reduce`, then `SharedStep.apply`, which all strategies
    share. `layout` says which parts of the parameters this rank holds. A strategy of whole weights
    needs only `reduce`.
    """

    two_modes: TwoModes | None = None
    """The modes of the optimizer, if it has two."""
    on_sums: Callable[[Batch, Tally], None] | None = None
    """Called with the sums of a step before its update, if it is audited (`--audit`)."""
    dealt: Shares | None = None
    """How many shards each rank that reads data owns, if `--share` says it; else they are even."""

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        self.name, self.task, self.comm = context.name, context.task, context.comm
        self.built_with = context.precision  # the device on which the full model is built
        self.mesh = self.card.mesh(self.comm.size, context.options)
        self._axes: dict[str, Comm] = {}
        self.layout = Layout(self.comm)  # of ranks with all parameters in full

    @cached_property
    def card(self) -> Card:
        return CARDS[self.name]

    @cached_property
    def agreement(self) -> Agreement:
        return self.card.agreement

    def axis(self, name: str) -> Comm:
        """The ranks along an axis of the mesh;
        the first call is made by every rank."""
        if name not in self._axes:
            self._axes[name] = self.comm.subgroup(self.mesh.group(self.comm.rank, name))
        return self._axes[name]

    @property
    def data(self) -> Comm:
        """The ranks that each read a part of the global batch."""
        return self.axis(DATA)

    @property
    def learner(self) -> Strategy:
        """The strategy of the ranks that make every update together: this one, for all ranks.

        It is the inner strategy if learners train separately between two exchanges.
        """
        return self

    @cached_property
    def shard_alone(self) -> bool:
        """Whether gradients of each shard are computed and added separately (`--bitwise`)."""
        reduce = self.context.options.get("reduce")
        return self.context.bitwise if reduce is None else str(reduce) == "tree"

    @property
    def each_pass(self) -> bool:
        """Whether gradients are summed after every backward pass, not once a step."""
        return False

    # --- life: these calls, in this order -------------------------------------------------

    def make_groups(self) -> None:
        """Make the groups for `parallelize` with `builds_in_turn`; every rank calls this."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Turn the full model, the same on all ranks, into this rank's part of it.

        The optimizer is made for the parameters of the returned model. Sets `layout`, if ranks hold
        parts.
        """
        return model

    def place(self, name: str, part: Tensor, whole: Tensor) -> None:
        """Write this rank's part of `whole` into `part`, for `fills_parts`. Sends nothing."""
        put_whole(part, self.layout.part(name, whole))

    def is_local(self, name: str) -> bool:
        """Whether this rank has a part of a tensor that was on meta, after `parallelize`."""
        return True

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Set up steps of `model`, which `parallelize` returned; every rank calls this."""
        self.model = model
        if self.comm.size > 1 and self.agreement.weights in ("sharded", "staged"):
            refuse_copies(model, self.name)
        optimizer = self.make_optimizer(make_optimizer)
        if TwoModes.are_in(optimizer):
            self.two_modes = TwoModes(optimizer, self.owned)
        context, one_training = self.context, self.agreement.is_one_training
        parts = StepParts(
            comm=self.data if one_training else Comm(device=self.comm.device),
            forward=self.forward,
            sum_apart=self.sum_apart,
            lay_out=self.lay_out,
            watch_gradients=self.watch_gradients,
            whole_weights=self.whole_weights,
            updating=self.updating,
            after_backward=self.after_backward,
            held_weights=self.held_weights,
            equal_passes=self.equal_passes,
            computes_alone=self.computes_alone,
            counts_samples=self.mesh.is_first_of_its_data(self.comm.rank),
            shard_alone=self.shard_alone,
            tally_type=self.tally_type,
            timed_readers=self.data.size if context.times_readers else 0,
            audit_bytes=context.audit_bytes,
        )
        self.step = SharedStep(self.task, model, optimizer, context.scope, context.precision, parts)
        if self.compares_groups:
            check_same_groups(model, optimizer, self.comm)
        self.step.loss_scale = context.loss_scale
        if (decay := self.task.ema) is not None:
            self.step.average = MovingAverage(decay, self.owned)
        self.initial_set = TrainedSet.of(model, optimizer)
        self.has_own_state = type(self).own_state is not Strategy.own_state
        self.prepare()
        self.lay_out()
        if self.step.average is not None:
            self.step.average.add(self.step.names, self.step.parameters)

    def make_optimizer(self, make: MakeOptimizer) -> Optimizer:
        """Make the optimizer of the task as in one process; `self.model` is set."""
        if self.agreement.weights in ("replicated", "own") or self.comm.size == 1:
            return make(self.model)
        return made_on_parts(
            make, self.model, self.layout.full_shapes(self.model), f"--strategy {self.name}"
        )

    def prepare(self) -> None:
        """Set up the strategy; `self.model` and `self.step` are set."""

    def lay_out(self) -> None:
        """Set up what depends on the trained parameters; called again when these change."""

    def deal(self, shares: Shares) -> None:
        """Set the shards of each rank that reads data, from the next step on.

        Every rank calls this, after `setup` and between two steps.
        """
        self.dealt = shares
        if self.step.batch_loss is not None:
            self.step.batch_loss.dealt = shares
        else:
            self.step.for_others.are_short = True

    def finish(self) -> bool:
        """Called after the last step by all ranks. Returns whether it has changed the weights."""
        return False

    def close(self) -> None:
        """Release the resources of the strategy."""
        self.step.close()

    def leave(self, *, failed: bool = False) -> None:
        """Leave the groups of the axes. Always called."""
        for comm in self._axes.values():
            if comm is not self.comm:
                comm.leave(failed=failed)

    # --- a step ---------------------------------------------------------------------------

    @final
    def train_step(self, batch: Batch) -> StepResult:
        """One step; every rank calls this with its part of the global batch."""
        local = self.forward_backward(batch)
        sums, gradients = self.reduce(batch, local)
        if batch.audited is not None and self.on_sums is not None:
            self.on_sums(batch, sums)
        return self.after_update(batch, self.step.apply(batch, sums, gradients))

    def forward_backward(self, batch: Batch) -> Tally:
        """Forward and backward of this rank's part; leaves gradients in `.grad`."""
        for parameter in self.step.parameters:
            parameter.grad = None
        tally = self.step.layout.tally()
        self.step.accumulate(batch, tally)
        return tally

    def forward(self, data: Any) -> Any:
        """The output of the model for the data of a micro-batch, on all its ranks."""
        return self.passed(partial(forward, self.task, self.step.call, data))

    def passed(self, run: Callable[[], Any], stage: int = 0) -> Any:
        """The output of a pass through the model, or a stage of it, in a step or an evaluation."""
        return run()

    def watch_gradients(
        self, parameters: list[nn.Parameter], mark: Callable[..., None]
    ) -> list[RemovableHandle]:
        """Call `mark(position, …)` for each parameter that a pass of this rank has used."""

        return [
            parameter.register_post_accumulate_grad_hook(partial(mark, position))
            for position, parameter in enumerate(parameters)
        ]

    def after_backward(self) -> None:
        """Called after each backward pass of the step."""

    @abstractmethod
    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        """The sums over all ranks of the tally and of the gradients; every rank calls this."""

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        """Sum gradients of parameters that are new in this step, outside the buckets.

        `leaves` has one flat tensor for each leaf of this rank; the order is that of every sum.
        Every rank calls this. If passes have summed them already, it sums over equal parts only.
        """
        tree = TreeSum(self.task.shards)
        if self.shard_alone:
            for span, tensor in leaves:
                tree.add(span, [tensor])
            return tree.total()[0]
        ((_, flat),) = leaves
        if self.agreement.weights in ("sharded", "staged"):
            raise unfrozen_on_the_way(self.name)
        if self.agreement.is_one_training:
            self.comm.all_reduce(flat).wait()
        return flat

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        """Within, the optimizer sees the parts and gradients to update; every rank enters this."""
        return NOTHING

    def after_update(self, batch: Batch, result: StepResult) -> StepResult:
        """Called after the update of the weights; every rank calls this."""
        return result

    def reads_at_once(self, batch: Batch) -> bool:
        """Whether the host must read the result of this step at once, if steps may stay unread.

        The same on all ranks that sum its gradients. By default only where the next step may have
        other shares.
        """
        return self.context.times_readers

    def after_read(self, result: StepResult, requests: RankRequests) -> RankRequests:
        """Called when the `result` of an unread step is available, and the step is not repeated.

        Returns which of the `requests` that came with it the loop should handle.
        """
        return requests

    def recompute(self, batch: Batch) -> Tally:
        """The passes of a batch outside of steps; every rank calls this.

        Leaves gradients in `.grad`, uncompressed, and summed only where passes sum them.
        """
        return Strategy.forward_backward(self, batch)

    # --- audits: passes of a shard that another rank owns ---------------------------------

    def in_passes(self) -> Sequence[nn.Parameter]:
        """The trained parameters as passes see them, whose gradients are those of this rank."""
        return self.step.parameters

    def apart_from_steps(self) -> AbstractContextManager[None]:
        """Within, passes belong to no step, and their gradients leave this rank for none."""
        return NOTHING

    # --- which weights the model has ------------------------------------------------------

    def whole_weights(self) -> AbstractContextManager[None]:
        """Within, the parameters of the model are full, for a loss that every rank computes."""
        return nullcontext()

    def held_weights(self) -> AbstractContextManager[None]:
        """Within, also in a pass, the parameters of the model are this rank's parts."""
        return NOTHING

    def owned(self, *, writes: bool = False) -> AbstractContextManager[None]:
        """Within, each parameter is the part that this rank updates, in the memory of the whole.

        With `writes`, every rank enters this, and afterwards has the parts that all have written.
        """
        return NOTHING

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Within, the model has the weights for evaluation: their average, if there is one."""
        if self.two_modes is not None:
            return self.two_modes.in_place()
        average = self.step.average
        return NOTHING if average is None else average.in_place()

    # --- evaluation -----------------------------------------------------------------------

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        """The output of the model for evaluation data of this rank. No communication."""
        return self.passed(partial(forward, self.step.call, data))

    def evaluation_pass(self) -> AbstractContextManager[None]:
        """Around `eval_step` and the loss and metrics of its output."""
        return NOTHING

    # --- cost -----------------------------------------------------------------------------

    def workload(self) -> Workload:
        """What the bytes of a step depend on: by default one sum of the gradients and the tally."""
        gradients, tally = (p.nbytes for p in self.step.parameters), self.step.layout
        return self.work(sum(gradients) + tally.size * tally.like.element_size())

    def work(self, *messages: int, **more: Any) -> Workload:
        """The workload of a step with messages of so many bytes; `more` are other fields of it."""
        ranks, shards = self.comm.size, self.task.shards
        return Workload(messages, ranks, shards, shares=self.dealt, **more)

    @final
    def promised_bytes(self) -> int:
        """The bytes that the busiest rank sends in a step, according to the card."""
        work = self.workload()
        return round(self.card.bytes_sent(work, self.context.options) / work.steps)

    # --- state ----------------------------------------------------------------------------

    def placement(self, *, updated: bool) -> list[Placed]:
        """The tensors of this rank and their devices;
        optimizer state is unknown before the first update (`updated`)."""
        step = self.step
        parts = self.model, step.names, step.optimizer, step.average
        return self.layout.placed(placed_tensors(*parts, updated=updated))

    def state(self) -> dict[str, Any]:
        """The state that a step depends on, without data: weights, buffers, optimizer."""
        with self.owned():
            state = self.local_state()
            return self.layout.saved(state, self.model) if self.agreement.cuts_state else state

    def local_state(self) -> dict[str, Any]:
        """The same with the tensors that this rank has, where others have the rest of them."""
        with self.owned():
            step = self.step
            state = {
                "model": model_state(self.model),
                "optimizer": optimizer_state(self.model, step.optimizer, step.rates.initial),
                "trained": {
                    "made": asdict(self.initial_set),
                    "now": asdict(TrainedSet.of(self.model, self.step.optimizer)),
                },
                "not_persistent": not_persistent(self.model),
            }
            if self.step.average is not None:
                state["average"] = self.step.average.state()
            if self.two_modes is not None:
                state["evaluated"] = self.two_modes.state(self.model)
            return state

    def replica_state(self) -> tuple[int, int, dict[str, Any]] | None:
        """Which part this rank has of so many, and `state`; `None` if no other rank has that part.

        Also in a step that was broken off, after which this strategy trains no more.
        """
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned; every rank calls this."""
        step, groups = self.step, len(self.initial_set.groups)
        if "trained" in state:  # older checkpoints have none
            load_trained_set(self.model, step.optimizer, state["trained"], self.initial_set)
            step.rates.initial[groups:] = state["optimizer"]["made"][groups:]
        step.follow_changes()
        state = {name: value for name, value in state.items() if name != "evaluated"}
        if self.agreement.cuts_state:
            state = self.layout.loaded(state, self.model)
        with self.owned(writes=True):
            load_model_state(self.model, state["model"])
            load_optimizer_state(self.model, step.optimizer, state["optimizer"], step.rates.initial)
            step.rates.see()
            if step.average is not None:
                step.average.load_state(self.model, state.get("average"))

    def own_state(self) -> dict[str, Any]:
        """The state of this rank alone; lost when another number of ranks resumes."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load what `own_state` returned, on the same number of ranks."""

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every full parameter and buffer, by name in sorted order, one at a time.

        Every rank must iterate to the end, as tensors are gathered from all ranks.
        """
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        for name in sorted({**parameters, **buffers}):
            if name in parameters:
                yield name, self.layout.full(name, parameters[name].detach())
            else:
                yield name, buffers[name].detach()


class Steps:
    """The steps of a training, each of which is read at once; every rank makes the same calls.

    `progress` is how far it is.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.progress = strategy, Progress()

    def make(self, batch: Batch, *, ahead: bool = False) -> StepResult:
        """Run one step. `ahead` lets its result stay on the device, where steps are in flight."""
        self.strategy.step.rates.set(self.progress.updates_unless_bad)
        return self.strategy.train_step(batch)

    def settle(self) -> None:
        """Read the unread step, if there is one; every rank calls this."""

    def begin_anew(self) -> None:
        """Settle before a state is loaded, whose optimizer may be empty; every rank calls this."""
        self.settle()
        self.strategy.step.layout.was_updated = False
