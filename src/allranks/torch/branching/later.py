"""A tensor that a branch has not computed yet: whoever looks at it waits, and gets the real one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.data.collate import map_arguments, tensors_of_arguments


class Later(Tensor):
    """Stands for an output of a branch. Any operation on it calls `wait`, and takes what came.

    Only what reads tensors beneath `__torch_function__` sees the object itself: an
    `autograd.Function` that is applied to it. Its gradient would go nowhere, so it is refused.
    """

    found: Tensor | None
    wait: Callable[[], None]

    @staticmethod
    def make(
        like: Tensor, device: torch.device, wait: Callable[[], None], *, wants_gradient: bool
    ) -> Later:
        """One that is there (`found`) once `wait` has returned; `like` it but for the numbers.

        Read by mistake, it is NaN.
        """
        nan = math.nan if like.is_floating_point() or like.is_complex() else 0
        empty = torch.full((), nan, dtype=like.dtype, device=device).expand(like.shape)
        made: Any = Tensor._make_subclass(Later, empty, wants_gradient)
        made.found, made.wait = None, wait
        if wants_gradient:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse)
        found: Later = made
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*real(args), **real(dict(kwargs or {})))


def real(value: Any) -> Any:
    """The same with the real tensors; waits for those that are not there yet."""
    if any(type(tensor) is Later for tensor in tensors_of_arguments(value)):
        return map_arguments(_real, value)
    return value


def _real(tensor: Tensor) -> Tensor:
    if type(tensor) is not Later:
        return tensor
    if tensor.found is None:
        tensor.wait()
    assert tensor.found is not None
    return tensor.found


def wait_before(module: nn.Module, args: Any, keywords: Any) -> Any:
    """A hook before the forward of a module that holds no branch: it is given real tensors."""
    return real(args), real(keywords)


def _refuse(_: Tensor) -> None:
    raise RequestError(
        asked="--strategy branches",
        found="an autograd.Function that forward applies to what a branch has returned",
        why="it takes tensors without waiting for them, and its gradient would be lost",
        do="call it in a module of its own (an nn.Module whose forward applies it)",
    )
