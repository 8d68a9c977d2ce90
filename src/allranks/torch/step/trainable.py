"""Which parameters are trained: those that the task's optimizer updates, in the order of the model.

Also the optimizer's update, which costs no more than its arithmetic if it has no hook or profiler.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim import optimizer as of_all

from allranks.errors import RequestError
from allranks.strategies.reduction_tree import Span
from allranks.torch.comm.comm import Comm
from allranks.torch.data.batch import Batch, Leaf
from allranks.torch.model.reals import real_type, reals
from allranks.torch.step.gradients import wanting_rows

LABELLED = Optimizer.profile_hook_step(Optimizer.step).__code__  # of what torch puts around a step


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a scheduler of torch sets the rates."""
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            return True
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def check_no_scheduler(optimizer: Optimizer, asked: str) -> None:
    """Raise `RequestError` if a torch scheduler sets the rates: no checkpoint would hold it."""
    if has_scheduler(optimizer):
        raise RequestError(
            asked=asked,
            found="a scheduler of torch.optim.lr_scheduler on the optimizer",
            why="the engine sets the rates before each update, and a checkpoint holds no "
            "scheduler: a resumed training would start it anew",
            do="write schedule(step) in the task: the factor on the rates of the optimizer",
        )


def update(optimizer: Optimizer) -> None:
    """`optimizer.step()`, without torch's label for the profiler if no profiler runs.

    The label takes tens of microseconds, which is much for a small step. Hooks on the step, and a
    `step` that was replaced, are called as by torch.
    """
    step: Any = type(optimizer).step
    is_observed = (
        getattr(step, "__code__", None) is not LABELLED
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or of_all._global_optimizer_pre_hooks
        or of_all._global_optimizer_post_hooks
        or _profiler_enabled()
    )
    if is_observed:
        optimizer.step()
    else:
        step.__wrapped__(optimizer)


def trainable(model: nn.Module, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
    """The parameters that the optimizer updates, in the order of the model, with their names."""
    if not isinstance(optimizer, Optimizer):
        raise RequestError(
            asked="optimizer(model) of the task",
            found=f"a {type(optimizer).__name__}",
            why="the engine updates the weights with a torch optimizer",
            do="return one: torch.optim.AdamW(model.parameters(), …)",
        )
    check_no_scheduler(optimizer, "optimizer(model) of the task")
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


# --- changes -------------------------------------------------------------------------------------
# Which parameters are trained is looked up in every step: layers are unfrozen, groups are added.
#
# A step is completed with the parameters that it was laid out for. A rank that finds other ones
# notes it in its tally, so that all ranks know once the sums are there. They then gather the names,
# sum the gradients of new parameters in a message of their own, and lay out the next step for all.
# So a change costs messages in its own step, and nothing in any other. Ranks with different changes
# raise an error that names the parameter.
#
# A change may happen between steps, or in a forward pass. A rank without a sample in that step has
# run no forward pass, and follows the others.


Gradients = dict[int, Tensor]
"""By the id of the parameter."""

_requires_grad = attrgetter("requires_grad")


def trained_flags(parameters: list[nn.Parameter]) -> list[bool]:
    """Whether each parameter is trained. Looked up twice in every step, so without a loop."""
    return list(map(_requires_grad, parameters))


class TrainableChanges:
    """The parameters that the optimizer updates now, and those the step was built for."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.late: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        self._leaves: dict[Span, Gradients] = {}
        self.lay_out()

    def lay_out(self) -> None:
        """Lay out the next steps for the parameters that are trained now."""
        before = self.parameters
        self.names, self.parameters = trainable(self.model, self.optimizer)
        groups = self.optimizer.param_groups
        self._laid = [(list(map(id, g["params"])), trained_flags(g["params"])) for g in groups]
        self.late = []
        trained = {id(parameter) for parameter in self.parameters}
        for parameter in before:
            if id(parameter) not in trained:
                parameter.grad = None

    def have_come(self) -> bool:
        """Whether the optimizer updates other parameters than the step was laid out for."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._laid):
            return True
        for group, (ids, flags) in zip(groups, self._laid, strict=True):
            parameters = group["params"]
            if list(map(id, parameters)) != ids or trained_flags(parameters) != flags:
                return True
        return False

    def begin(self) -> None:
        """Begin a step: newly trained parameters have no gradient yet."""
        self._leaves = {}
        self.late = []
        if self.have_come():
            self._look()
            for parameter in self.late:
                parameter.grad = None

    def _look(self) -> None:
        known = {id(parameter) for parameter in self.parameters}
        self.late = [p for p in trainable(self.model, self.optimizer)[1] if id(p) not in known]

    def leaf_done(self, leaf: Leaf) -> bool:
        """Store this leaf's gradients of new parameters; returns whether any parameter changed."""
        if not self.have_come():
            return False
        self._look()
        gradients = {id(p): p.grad for p in self.late if p.grad is not None}
        self._leaves[(leaf.shards.start, leaf.shards.stop)] = gradients
        for parameter in self.late:
            parameter.grad = None
        return True

    def add(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Add another device's gradient of a new parameter, after the last leaf."""
        if gradient is not None:
            gradients = self._leaves[next(reversed(self._leaves))]
            gradient, known = gradient.to(parameter.device), gradients.get(id(parameter))
            gradients[id(parameter)] = gradient if known is None else known.add_(gradient)

    def settle(
        self,
        comm: Comm,
        batch: Batch,
        like: Tensor,
        sum_apart: Callable[[list[tuple[Span, Tensor]]], Tensor],
    ) -> None:
        """Agree on the trained parameters, sum new gradients over all ranks, and lay them out.

        Every rank calls this when the sums of a step say that something has changed.
        """
        self._agree(comm, saw_samples=batch.own_samples > 0, step=batch.index)
        if wanting := wanting_rows(self.model, self.optimizer, self.late):
            _check_no_rows(self.late, wanting, batch.index)
        if self.late:
            spans = [(leaf.shards.start, leaf.shards.stop) for leaf in batch.leaves]
            self._take(sum_apart(self._rows(spans, like)))
        self.lay_out()

    def _agree(self, comm: Comm, *, saw_samples: bool, step: int) -> None:
        """Find the new parameters, the same on all ranks. Gathers all names."""
        names_here: list[str] | None = trainable(self.model, self.optimizer)[0]
        if not saw_samples and not self.have_come():
            names_here = None
        gathered = [json.loads(text) for text in comm.gather_texts(json.dumps(names_here))]
        wanted = next(names for names in gathered if names is not None)
        for rank, names in enumerate(gathered):
            if names is not None and names != wanted:
                raise _unlike(gathered.index(wanted), wanted, rank, names, step)
        if names_here is None:
            self._follow(wanted, step, comm.rank)
        self._look()

    def _follow(self, wanted: list[str], step: int, rank: int) -> None:
        updated = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in updated and parameter.requires_grad != (name in wanted):
                parameter.requires_grad_(name in wanted)
        if (names := trainable(self.model, self.optimizer)[0]) != wanted:
            raise _unlike(-1, wanted, rank, names, step)

    def _rows(self, spans: list[Span], like: Tensor) -> list[tuple[Span, Tensor]]:
        """For each leaf: the gradients of the new parameters, then a flag for each that has one."""
        kind = real_type(like.dtype)
        rows = []
        for span in spans:
            have = self._leaves.get(span, {})
            parts = [_flat(have.get(id(p)), p, kind).to(like.device) for p in self.late]
            used = [float(id(p) in have) for p in self.late]
            rows.append((span, torch.cat([*parts, like.new_tensor(used, dtype=kind)])))
        return rows

    def _take(self, total: Tensor) -> None:
        """Set the summed gradients of the new parameters; those that no rank used get none."""
        used = total[total.numel() - len(self.late) :].tolist()
        start = 0
        for parameter, flag in zip(self.late, used, strict=True):
            size = reals(parameter.detach()).numel()
            part = total[start : start + size].clone().to(parameter.device)
            part = part.view(reals(parameter.detach()).shape)
            start += size
            gradient = torch.view_as_complex(part) if parameter.is_complex() else part
            parameter.grad = gradient if flag else None


def _check_no_rows(late: list[nn.Parameter], wanting: set[int], step: int) -> None:
    for parameter in late:
        if id(parameter) in wanting:
            raise RequestError(
                asked=f"to train a parameter of shape {tuple(parameter.shape)} from step {step} on",
                found="an optimizer that takes its gradient row by row",
                why="the rows that a step touches are counted from the first step on",
                do="let it be trained from the start, with a rate of 0",
            )


def _flat(gradient: Tensor | None, parameter: Tensor, kind: torch.dtype) -> Tensor:
    if gradient is None:
        gradient = torch.zeros_like(parameter.detach(), memory_format=torch.contiguous_format)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return reals(dense).contiguous().view(-1).to(kind)


def _unlike(
    rank: int, wanted: list[str], other_rank: int, names: list[str], step: int
) -> RequestError:
    name = sorted(set(wanted) ^ set(names))[0]
    ones, others = (rank, other_rank) if name in wanted else (other_rank, rank)
    ranks = [f"rank {r}" if r >= 0 else "another rank" for r in (ones, others)]
    return RequestError(
        asked=f"the same trained parameters on every rank, at step {step}",
        found=f"{ranks[0]} trains {name!r} and {ranks[1]} does not",
        why="a gradient is summed over all ranks",
        do="let what freezes, unfreezes and adds parameters follow the step, not the rank",
    )


def unfrozen_on_the_way(name: str) -> RequestError:
    """The error if the trained parameters change under a strategy that has cut them."""
    return RequestError(
        asked=f"--strategy {name} with parameters frozen, unfrozen or added in mid-training",
        found="other parameters than the strategy has laid out",
        why="what each process holds, sums and sends is laid out at the start",
        do="freeze and unfreeze in model() alone, or --strategy ddp",
    )
