"""What every strategy is: set up once, then one `train_step` for each global batch.

A strategy knows no devices by number, no files and no processes. It gets its options from its
card, its ranks from `comm`, and the parts of a step that all share from `SharedStep`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.job.loss_scale import LossScale
from allranks.job.placement import Placed
from allranks.strategies.card import Card, Workload
from allranks.strategies.reduction_tree import Span
from allranks.strategies.torch_cards import CARDS
from allranks.torch.comm import Comm
from allranks.torch.data.batches import Batch
from allranks.torch.model.layers import Scope
from allranks.torch.model.placement import held
from allranks.torch.model.precision import Arithmetic
from allranks.torch.reducers.tree import TreeSum
from allranks.torch.state import (
    TrainedSet,
    load_model_state,
    load_optimizer_state,
    load_trained_set,
    model_state,
    not_persistent,
    optimizer_state,
)
from allranks.torch.step.ema import MovingAverage
from allranks.torch.step.step import SharedStep
from allranks.torch.task import Task
from allranks.torch.witness.same_model import check_same_groups, check_same_model
from allranks.training.progress import StepResult


@dataclass(frozen=True)
class Setting:
    """What a strategy is given: the task, the ranks, the options of its card with their values."""

    task: Task
    comm: Comm
    scope: Scope
    options: dict[str, Any]
    arithmetic: Arithmetic
    bitwise: bool = False
    loss_scale: LossScale | None = None


class Strategy(ABC):
    """One optimizer step on one global batch, carried out by all ranks together."""

    name: ClassVar[str]
    replicas_agree: ClassVar[bool] = True
    """Whether all ranks hold the same weights after a step."""
    can_be_compiled: ClassVar[bool] = True
    """Whether forward passes may go through what a compiler made of the model."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.task, self.comm = setting.task, setting.comm

    @property
    def card(self) -> Card:
        return CARDS[self.name]

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads, of `data_size` parts."""
        return self.comm.rank

    @property
    def data_size(self) -> int:
        return self.comm.size

    @property
    def shard_alone(self) -> bool:
        """Whether every shard goes through the model by itself, and is a leaf of the sum."""
        return self.setting.bitwise

    def setup(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> None:
        """Take the model, with equal weights on all ranks from here on; every rank calls this.

        Compares names and shapes, then broadcasts parameters and buffers once, from the leader.
        """
        self.model = model
        check_same_model(model, self.comm)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                self.comm.broadcast(tensor)
        optimizer = make_optimizer(model)
        setting = self.setting
        self.step = SharedStep(
            self.task, model, optimizer, setting.scope, self.comm, setting.arithmetic
        )
        if not self.replicas_agree:
            self.step.comm = Comm(device=self.comm.device)
        check_same_groups(model, optimizer, self.comm)
        self.step.loss_scale = setting.loss_scale
        self.step.sum_apart = self.sum_apart
        if (decay := self.task.ema) is not None:
            self.step.average = MovingAverage(self.step.names, self.step.parameters, decay)
        self.made = TrainedSet.of(model, optimizer)
        self.prepare()
        self.lay_out()
        self.step.lay_out = self.lay_out

    def prepare(self) -> None:
        """Make what the strategy needs of its own; the model and `self.step` are there."""

    def lay_out(self) -> None:
        """Make what follows the parameters that are trained; called again whenever they change."""

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        """The sum over all leaves of all ranks, in the order of every sum; every rank calls this.

        Each leaf of this rank has a flat tensor. Only for parameters that are new in a step.
        """
        tree = TreeSum(self.task.shards)
        if self.shard_alone:
            for span, tensor in leaves:
                tree.add(span, [tensor])
            return tree.total()[0]
        ((_, own),) = leaves
        if self.replicas_agree:
            self.comm.all_reduce(own).wait()
        return own

    @abstractmethod
    def train_step(self, batch: Batch) -> StepResult:
        """The whole algorithm of one step; every rank calls this with its part of the batch."""

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        """The output of the model for evaluation data of this rank alone. No communication."""
        return forward(self.step.call, data)

    def messages(self) -> tuple[int, ...]:
        """The sizes in bytes of what is summed over the ranks in a step, the tally included."""
        layout = self.step.layout
        tally = layout.size * layout.like.element_size()
        return (sum(p.nbytes for p in self.step.parameters) + tally,)

    def promised_bytes(self) -> int:
        """What the card says the busiest rank sends in a step, for this model on these ranks."""
        work = Workload(self.messages(), self.comm.size, self.task.shards)
        return self.card.bytes_sent(work, self.setting.options)

    def placement(self, *, updated: bool) -> list[Placed]:
        """What this rank holds and where; what the optimizer keeps is unknown before it `updated`."""
        step = self.step
        return list(held(self.model, step.names, step.optimizer, step.average, updated=updated))

    def state(self) -> dict[str, Any]:
        """All that a step depends on but the data: weights, buffers, optimizer."""
        state = {
            "model": model_state(self.model),
            "optimizer": optimizer_state(self.model, self.step.optimizer, self.step.rates.made),
            "trained": {
                "made": asdict(self.made),
                "now": asdict(TrainedSet.of(self.model, self.step.optimizer)),
            },
            "not_persistent": not_persistent(self.model),
        }
        average = self.step.average
        return state if average is None else {**state, "average": average.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up a state that `state` returned; every rank calls this."""
        load_model_state(self.model, state["model"])
        step, groups = self.step, len(self.made.groups)
        if "trained" in state:  # older checkpoints have none
            load_trained_set(self.model, step.optimizer, state["trained"], self.made)
            step.rates.made[groups:] = state["optimizer"]["made"][groups:]
        load_optimizer_state(self.model, step.optimizer, state["optimizer"], step.rates.made)
        step.rates.see()
        step.follow_changes()
        if step.average is not None:
            step.average.load_state(self.model, state.get("average"))

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer whole, by name in sorted order, one at a time."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name in sorted(tensors):
            yield name, tensors[name].detach()

    def close(self) -> None:
        """Give back what the strategy holds."""
        self.step.close()
