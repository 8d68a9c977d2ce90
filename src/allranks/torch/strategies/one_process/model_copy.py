"""A copy of a model on a device of its own, made once, that follows the model step by step.

Its weights are leaves of their own, so everything that a module keeps of them belongs to the copy
too: an RNN's list of weights, a tied weight, `parameters()` asked for inside forward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError

PLAIN = (bool, int, float, str, type(None))


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
    memo = dict(instead)
    for parameter in model.parameters():
        weight = parameter.detach().to(device, copy=True)
        memo[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(device, copy=True)
    try:
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
                copied.requires_grad_(weight.requires_grad)
        for name, buffer in theirs._buffers.items():
            mine._buffers[name] = _followed(mine._buffers.get(name), buffer, device)


def _followed(mine: Tensor | None, theirs: Tensor | None, device: torch.device) -> Tensor | None:
    """The buffer of a copy after the model's: the same memory where it fits."""
    if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return None if theirs is None else theirs.detach().to(device, copy=True)
    return mine.copy_(theirs)
