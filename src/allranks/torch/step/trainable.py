"""Which parameters are trained: those that the task's optimizer updates, in the order of the model.

And its update, which costs no more than its arithmetic while nobody listens to it.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim import optimizer as of_all

from allranks.errors import RequestError

LABELLED = Optimizer.profile_hook_step(Optimizer.step).__code__  # of what torch puts around a step


def check_no_scheduler(optimizer: Optimizer, asked: str) -> None:
    """Raise `RequestError` if a torch scheduler sets the rates: no checkpoint would hold it."""
    has_one = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if has_one or any("initial_lr" in group for group in optimizer.param_groups):
        raise RequestError(
            asked=asked,
            found="a scheduler of torch.optim.lr_scheduler on the optimizer",
            why="the engine sets the rates before each update, and a checkpoint holds no "
            "scheduler: a resumed training would start it anew",
            do="write schedule(step) in the task: the factor on the rates of the optimizer",
        )


def update(optimizer: Optimizer) -> None:
    """`optimizer.step()`, without the label that torch puts on it for a profiler, where none runs.

    The label takes tens of microseconds, of which no small step has many. A hook on the step, and a
    `step` that somebody else has put there, are called as by torch.
    """
    step: Any = type(optimizer).step
    is_heard = (
        getattr(step, "__code__", None) is not LABELLED
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or of_all._global_optimizer_pre_hooks
        or of_all._global_optimizer_post_hooks
        or _profiler_enabled()
    )
    if is_heard:
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
