"""What every strategy is: set up once, then one `train_step` for each global batch.

A strategy knows no devices by number, no files and no processes. It gets its options from its
card, its ranks from `comm`, and the parts of a step that all share from `SharedStep`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from allranks.job.loss_scale import LossScale
from allranks.job.place import Placed
from allranks.strategies.card import Card, Workload
from allranks.strategies.mesh import DATA, Agreement
from allranks.strategies.reduction_tree import Span
from allranks.strategies.torch_cards import CARDS
from allranks.torch.checkpoint.state import (
    TrainedSet,
    load_model_state,
    load_optimizer_state,
    load_trained_set,
    model_state,
    not_persistent,
    optimizer_state,
    put_whole,
    whole,
)
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch
from allranks.torch.model.layers import Scope
from allranks.torch.model.placement import held
from allranks.torch.model.precision import Precision
from allranks.torch.optimizers.made import made_on_parts
from allranks.torch.parallel.data.tree import TreeSum
from allranks.torch.parallel.sharded.gradients import refuse_copies
from allranks.torch.parallel.sharded.state import with_parameters
from allranks.torch.step.ema import MovingAverage, TwoModes
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.passes import StepParts
from allranks.torch.step.step import SharedStep
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.task import Task
from allranks.torch.witness.same_model import check_same_groups
from allranks.training.progress import RankRequests, StepResult

# --- traits --------------------------------------------------------------------------------------
# What others must know of a strategy: how it passes through the model, and what it keeps.


class Traits:
    """Set by the class of a strategy, or by itself when it is made."""

    name: ClassVar[str]
    can_be_compiled: bool = True
    """Whether forward passes may go through what a compiler made of the model."""
    has_one_model: bool = True
    """Whether a rank has one model: copies in threads meet in no forward."""
    can_run_ahead: bool = False
    """Whether a step that updates nothing leaves nothing behind, and no host reads its norm."""
    cuts_micro_batches: bool = False  # whether they go through the model piece by piece
    equal_passes: bool = False
    """Whether all ranks make the same number of passes, because a pass communicates.

    A strategy that sums gradients within a pass brings in zeros while `step.for_others.is_on`.
    """
    computes_alone: bool = False
    """Whether forward and backward wait for nothing that other ranks send in them, or before."""
    passes_meet_readers: bool = True
    """Whether such a pass communicates with ranks that read other samples."""
    counts_passes: bool = False
    """Whether batches say how many passes the rank with the most makes, though not all make so
    many."""
    cuts_by_shard: bool = False
    """Whether each shard is a micro-batch of its own, where nobody says `--micro-batch`."""
    tally_type: torch.dtype | None = None
    """The type of the tally, where it is a message of its own; else it rides on gradients."""
    kept_whole: Mapping[str, bool] = MappingProxyType({})
    """The parameters that one rank each updates whole: whether this one does."""
    builds_in_turn: bool = False
    """Whether one rank of a node after the other builds the model and keeps its part.

    `parallelize` then waits for no other rank (`make_groups` has), keeps the names, and takes a
    model on meta too.
    """


# --- context -------------------------------------------------------------------------------------
# What a strategy is given, whichever it is.


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy is given: the task, the ranks, the options of its card with their values."""

    task: Task
    comm: Comm
    scope: Scope
    options: Mapping[str, Any]
    precision: Precision
    bitwise: bool = False
    loss_scale: LossScale | None = None


NOTHING = nullcontext()
MakeOptimizer = Callable[[nn.Module], Optimizer]


class Strategy(Traits, ABC):
    """One optimizer step on one global batch, carried out by all ranks together.

    A step is `forward_backward`, then `reduce`,
    then what all strategies share (`SharedStep.apply`).
    """

    two_modes: TwoModes | None = None
    """The modes of the optimizer, if it has two."""

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        self.task, self.comm = context.task, context.comm
        self.built_with = context.precision  # the device on which the model is whole at first
        self.mesh = self.card.mesh(self.comm.size, context.options)
        self._axes: dict[str, Comm] = {}

    @property
    def card(self) -> Card:
        return CARDS[self.name]

    @property
    def agreement(self) -> Agreement:
        return self.card.agreement

    def axis(self, name: str) -> Comm:
        """The ranks along an axis of the mesh;
        every rank calls this for the first time together."""
        if name not in self._axes:
            self._axes[name] = self.comm.subgroup(self.mesh.group(self.comm.rank, name))
        return self._axes[name]

    @property
    def data(self) -> Comm:
        """The ranks that read the global batch together, each its own part."""
        return self.axis(DATA)

    @property
    def learner(self) -> Strategy:
        """The strategy of the ranks that make every update together: this one, for all of them.

        Another one where learners train apart between two exchanges.
        """
        return self

    @property
    def shard_alone(self) -> bool:
        """Whether every shard goes through the model by itself, and is a leaf of the sum."""
        return self.context.bitwise

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
        )
        self.step = SharedStep(self.task, model, optimizer, context.scope, context.precision, parts)
        check_same_groups(model, optimizer, self.comm)
        self.step.loss_scale = context.loss_scale
        if (decay := self.task.ema) is not None:
            self.step.average = MovingAverage(decay, self.owned)
        self.initial_set = TrainedSet.of(model, optimizer)
        self.prepare()
        self.lay_out()
        if self.step.average is not None:
            self.step.average.add(self.step.names, self.step.parameters)

    def make_groups(self) -> None:
        """Make the groups that `parallelize` of `builds_in_turn` needs; every rank calls this."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        """What this rank holds of the model, whole and the same on all ranks until now.

        The optimizer is made for the parameters of what is returned.
        """
        return model

    def place(self, name: str, part: Tensor, whole: Tensor) -> None:
        """Write into `part` what this rank holds of a tensor of `builds_in_turn`. Sends nothing."""
        put_whole(part, whole)

    def make_optimizer(self, make: MakeOptimizer) -> Optimizer:
        """The optimizer of the task, as one process makes it; the model is there."""
        if self.agreement.weights in ("replicated", "own") or self.comm.size == 1:
            return make(self.model)
        return made_on_parts(make, self.model, self.whole_shapes(), f"--strategy {self.name}")

    def whole_shapes(self) -> dict[int, torch.Size]:
        """By the `id` of each parameter that has the shape of a part, the shape of the whole."""
        return {}

    def prepare(self) -> None:
        """Make what the strategy needs of its own; the model and `self.step` are there."""

    def lay_out(self) -> None:
        """Make what follows the parameters that are trained; called again whenever they change."""

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        """The sum over all leaves of all ranks, in the order of every sum; every rank calls this.

        Each leaf of this rank has a flat tensor. Only for parameters that are new in a step. A
        strategy whose passes have summed them already sums over the ranks that hold the same part.
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

    def watch_gradients(
        self, parameters: list[nn.Parameter], mark: Callable[[int], None]
    ) -> list[RemovableHandle]:
        """Have `mark` called with the position of each parameter that a pass of this rank used."""

        def watch(position: int, parameter: nn.Parameter) -> RemovableHandle:
            hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(
                lambda _: mark(position)
            )
            return hook

        return [watch(*pair) for pair in enumerate(parameters)]

    def whole_weights(self) -> AbstractContextManager[None]:
        """Within, the parameters of the model are whole, for a loss that every rank computes."""
        return nullcontext()

    def held_weights(self) -> AbstractContextManager[None]:
        """Within, also in a pass, the parameters of the model are what this rank holds of them."""
        return NOTHING

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Within, the model has the weights that are evaluated: their average, if one is kept."""
        if self.two_modes is not None:
            return self.two_modes.in_place()
        average = self.step.average
        return NOTHING if average is None else average.in_place()

    def owned(self, *, writes: bool = False) -> AbstractContextManager[None]:
        """Within, each parameter is what this rank updates of it, in the memory of the whole.

        If it `writes` there, every rank enters this, and has what all have written afterwards.
        """
        return NOTHING

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        """Within, the optimizer finds what it updates, and its gradient; every rank enters this."""
        return NOTHING

    def after_backward(self) -> None:
        """A backward pass of the step is over."""

    @final
    def train_step(self, batch: Batch) -> StepResult:
        """One step; every rank calls this with its part of the global batch."""
        local = self.forward_backward(batch)
        sums, gradients = self.reduce(batch, local)
        return self.after_update(batch, self.step.apply(batch, sums, gradients))

    def forward_backward(self, batch: Batch) -> Tally:
        """Forward and backward of this rank's part; the gradients are left in `.grad`."""
        for parameter in self.step.parameters:
            parameter.grad = None
        tally = self.step.layout.tally()
        self.step.accumulate(batch, lambda leaf: tally)
        return tally

    def recompute(self, batch: Batch) -> Tally:
        """The passes of a batch outside of the steps; every rank calls this.

        Gradients are left in `.grad`, summed as far as passes sum them, and without compression.
        """
        return Strategy.forward_backward(self, batch)

    @abstractmethod
    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        """The sums over all ranks of the tally and of the gradients; every rank calls this."""

    def after_update(self, batch: Batch, result: StepResult) -> StepResult:
        """What is done with the weights that an update has left; every rank calls this."""
        return result

    def reads_at_once(self, batch: Batch) -> bool:
        """Whether what comes after this step needs its numbers, where steps may stay unread.

        The same on all ranks that sum its gradients.
        """
        return False

    def after_read(self, result: StepResult, requests: RankRequests) -> RankRequests:
        """A step that was unread when it was made has given `result`, and is not made again.

        Returns what the loop hears of what was `asked` with it.
        """
        return requests

    def finish(self) -> bool:
        """The last step was made. Returns whether weights are other ones now; all ranks call it."""
        return False

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        """The output of the model for evaluation data of this rank alone. No communication."""
        return forward(self.step.call, data)

    def evaluation_pass(self) -> AbstractContextManager[None]:
        """Around `eval_step` and what loss and metrics make of its output."""
        return NOTHING

    def messages(self) -> tuple[int, ...]:
        """The sizes in bytes of what is summed over the ranks in a step, the tally included."""
        layout = self.step.layout
        tally = layout.size * layout.like.element_size()
        return (sum(p.nbytes for p in self.step.parameters) + tally,)

    def promised_bytes(self) -> int:
        """What the card says the busiest rank sends in a step, for this model on these ranks."""
        work = Workload(self.messages(), self.comm.size, self.task.shards)
        return self.card.bytes_sent(work, self.context.options)

    def placement(self, *, updated: bool) -> list[Placed]:
        """What this rank holds and where;
        what the optimizer keeps is unknown before it `updated`."""
        step = self.step
        return list(held(self.model, step.names, step.optimizer, step.average, updated=updated))

    def as_saved(self, name: str, tensor: Tensor) -> Tensor:
        """What stands in a state for a parameter, or for what the optimizer keeps in its shape.

        A DTensor, where this rank holds a part of it.
        """
        return tensor

    def as_held(self, name: str, saved: Tensor) -> Tensor:
        """What `as_saved` was given."""
        return saved

    def full(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a parameter, or of its gradient; every rank calls this."""
        return whole(self.as_saved(name, tensor))

    def state(self) -> dict[str, Any]:
        """All that a step depends on but the data: weights, buffers, optimizer."""
        with self.owned():
            state = {
                "model": model_state(self.model),
                "optimizer": optimizer_state(self.model, self.step.optimizer, self.step.rates.made),
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
            return self._with_parameters(state, self.as_saved)

    def _with_parameters(
        self, state: dict[str, Any], change: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Any]:
        if not self.agreement.cuts_state:
            return state
        return with_parameters(state, self.model, change, self.kept_whole)

    def own_state(self) -> dict[str, Any]:
        """What belongs to this rank alone, and is lost where another number of ranks goes on."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take up what `own_state` returned, on as many ranks as then."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up a state that `state` returned; every rank calls this."""
        step, groups = self.step, len(self.initial_set.groups)
        if "trained" in state:  # older checkpoints have none
            load_trained_set(self.model, step.optimizer, state["trained"], self.initial_set)
            step.rates.made[groups:] = state["optimizer"]["made"][groups:]
        step.follow_changes()
        state = {name: value for name, value in state.items() if name != "evaluated"}
        state = self._with_parameters(state, self.as_held)
        with self.owned(writes=True):
            load_model_state(self.model, state["model"])
            load_optimizer_state(self.model, step.optimizer, state["optimizer"], step.rates.made)
            step.rates.see()
            if step.average is not None:
                step.average.load_state(self.model, state.get("average"))

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer whole, by name in sorted order, one at a time.

        Every rank iterates to the end: a tensor is put together by all that hold parts of it.
        """
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        for name in sorted({**parameters, **buffers}):
            if name in parameters:
                yield name, self.full(name, parameters[name].detach())
            else:
                yield name, buffers[name].detach()

    def close(self) -> None:
        """Give back what the strategy holds."""
        self.step.close()

    def leave(self, *, failed: bool = False) -> None:
        """Leave the groups of the axes. Always called."""
        for comm in self._axes.values():
            if comm is not self.comm:
                comm.leave(failed=failed)
