"""When an optimizer is asked how it updates (`elementwise`): first, and when what decides changes.

Some optimizers look at a whole tensor only with a weight decay, or a bound of a norm: a callback
may set one on the way. Rates are not looked at, and of other numbers the sign, so that a schedule
asks for nothing.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import optimizer as of_all

BY_NUMBER = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop}
)


def is_by_number(optimizer: Optimizer) -> bool:
    """Whether each number is updated by itself, by the formula: of torch."""
    return type(optimizer) in BY_NUMBER


def hook_of(optimizer: Optimizer) -> str:
    """What a step of it calls that its class does not say; empty where there is no such thing.

    It may look at whole weights, of others too, and change them.
    """
    hooks = {
        "register_step_pre_hook": optimizer._optimizer_step_pre_hooks,
        "register_step_post_hook": optimizer._optimizer_step_post_hooks,
        "register_optimizer_step_pre_hook": of_all._global_optimizer_pre_hooks,
        "register_optimizer_step_post_hook": of_all._global_optimizer_post_hooks,
    }
    if "step" in vars(optimizer):
        return "a function in the place of its step()"
    return next((f"a hook on its step ({name})" for name, hook in hooks.items() if hook), "")


class Asked:
    """The hyper-parameters with which an optimizer was asked."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._seen: set[str] = set()

    def is_new(self) -> bool:
        """Whether it is to be asked: never as it is now. The next answer is no."""
        key = str([hook_of(self.optimizer), *map(_key, self._groups())])
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def _groups(self) -> list[dict[str, Any]]:
        return [] if is_by_number(self.optimizer) else self.optimizer.param_groups


def _key(group: dict[str, Any]) -> dict[str, Any]:
    return {n: _kind(v) for n, v in group.items() if n not in ("params", "lr", "initial_lr")}


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _kind(value.item()) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return [_kind(one) for one in value]
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
        return value if isinstance(value, (bool, str)) else type(value).__name__
    return (value > 0) - (value < 0), math.isinf(value)
