"""What may not be done to a model, and what its parameters may not carry, where it is in parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError

HOLDS_A_PART = "a rank holds a part of a parameter, and the hook expects the whole gradient"


def check_no_hooks(
    model: nn.Module,
    asked: str,
    why: str = HOLDS_A_PART,
    engine: Iterable[RemovableHandle] = (),
) -> None:
    """Raise `RequestError` for a parameter with a hook of its own; no communication.

    A hook is given the gradient of what a rank holds, and a parameter that is cut is a new one.
    Those of the `engine` are none of that.
    """
    known = {handle.id for handle in engine}
    for name, parameter in model.named_parameters():
        hooks = *(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())
        if not known.issuperset(hooks):
            raise RequestError(
                asked=asked,
                found=f"a hook on the parameter {name!r}",
                why=why,
                do="change gradients in the optimizer, or --strategy single",
            )


def refuse_copies(model: nn.Module, strategy: str) -> None:
    """From now on `copy.deepcopy` of the model, or a module of it, raises `RequestError`.

    As `torch.optim.swa_utils.AveragedModel` makes one. What copies an optimizer says in the memo
    which parameters are to stay as they are: there modules are copied as ever.
    """

    def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if not any(id(parameter) in memo for parameter in model.parameters()):
            raise RequestError(
                asked=f"copy.deepcopy of a {type(module).__name__} of the model, under {strategy}",
                found="a model of which each rank holds a part",
                why="the copy would be a part as well, and its average, or output, that of a part",
                do="the field ema of the task keeps an average (--set ema=0.99), trainer.weights() "
                "gives whole weights; or --strategy zero1",
            )
        own = vars(module).pop("__deepcopy__")
        try:
            return copy.deepcopy(module, memo)
        finally:
            vars(module)["__deepcopy__"] = own

    for module in model.modules():
        vars(module)["__deepcopy__"] = partial(copied, module)
