"""A copy of a model on a device of its own, made once, that follows the model step by step.

Its weights are leaves of their own, so everything that a module keeps of them belongs to the copy
too: an RNN's list of weights, a tied weight, `parameters()` asked for inside forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError

PLAIN = (bool, int, float, str, type(None))
CONSTANT = (*PLAIN, complex, bytes, type, torch.dtype, torch.device)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_of(model: nn.Module, device: torch.device, instead: dict[int, Any]) -> nn.Module:
    """The model once more, with its weights and buffers on `device`.

    `instead` says what the copy has in place of an object, by the object's id.
    """
    if any(hasattr(module, "_flatten_layers") for module in model.modules()):
        raise RequestError(
            asked=f"a second replica of {type(model).__name__}",
            found="a Keras model",
            why="Keras copies a model by writing and reading it, with weights of other names",
            do="--strategy ddp, or with --engine tensorflow --strategy mirrored",
        )
    _check_hooks(model)
    memo = dict(instead)
    for parameter in model.parameters():
        weight = parameter.detach().to(device, copy=True)
        memo[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(device, copy=True)
    try:
        for parameter in model.parameters():  # a class of its own, and what is noted on it
            copied = memo[id(parameter)]
            copied.__class__ = type(parameter)
            vars(copied).update(copy.deepcopy(vars(parameter), memo))
        found = copy.deepcopy(model, memo)
    except Exception as error:
        raise RequestError(
            asked=f"a second replica of {type(model).__name__}",
            found=f"{type(error).__name__}: {error}",
            why="every replica is a copy of the model, and it cannot be copied",
            do="keep in it what copy.deepcopy can copy, or use --strategy ddp",
        ) from error
    for module in found.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN wants its weights in one piece of memory
            module.flatten_parameters()
    return found


@torch.no_grad()
def follow(own: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Let the copy on `device` hold what the model does: weights, buffers, modes, plain values."""
    for mine, theirs in zip(own.modules(), model.modules(), strict=True):
        plain = {n: value for n, value in vars(theirs).items() if isinstance(value, PLAIN)}
        vars(mine).update(plain)
        for name, weight in theirs._parameters.items():
            copied = mine._parameters[name]
            if weight is not None and copied is not None:
                copied.copy_(weight)
                noted = {n: v for n, v in vars(weight).items() if isinstance(v, PLAIN)}
                vars(copied).update(noted)
                copied.requires_grad_(weight.requires_grad)
        for name, buffer in theirs._buffers.items():
            mine._buffers[name] = _followed(mine._buffers.get(name), buffer, device)


def _followed(mine: Tensor | None, theirs: Tensor | None, device: torch.device) -> Tensor | None:
    """The buffer of a copy after the model's: the same memory where it fits."""
    if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return None if theirs is None else theirs.detach().to(device, copy=True)
    return mine.copy_(theirs)


def _check_hooks(model: nn.Module) -> None:
    """Raise `RequestError` for a hook of a module that keeps something: all replicas would share
    it, or each would have another one."""
    modules = set(model.modules())
    for name, module in model.named_modules():
        hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        if any(_keeps(hook, modules) for hook in hooks):
            raise RequestError(
                asked=f"a second replica of {type(model).__name__}",
                found=f"a hook on the module {name!r} that keeps something of its own",
                why="the replicas run in threads, each with modules of its own: they would write "
                "to one object, or to copies that nobody reads",
                do="let forward of the model return it, or --strategy ddp",
            )


def _keeps(hook: Callable[..., Any], modules: set[nn.Module]) -> bool:
    """Whether a hook has state that is no module's of the model. Those of torch have none."""
    if isinstance(hook, partial):
        values = (*hook.args, *hook.keywords.values())
        return _keeps(hook.func, modules) or not all(map(_is_constant, values))
    if isinstance(hook, MethodType):
        return hook.__self__ not in modules
    if isinstance(hook, FunctionType):
        cells = [cell.cell_contents for cell in hook.__closure__ or ()]
        return not all(map(_is_constant, (*cells, *(hook.__defaults__ or ()))))
    return not type(hook).__module__.startswith("torch.")


def _is_constant(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return not _keeps(value, set())
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return isinstance(value, CONSTANT)
