"""The optimizer of a task, made on a rank that holds parts of weights as one process makes it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from allranks.errors import RequestError
from allranks.torch.checkpoint.tree import local
from allranks.torch.model.weights import digest_of

SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


def made_on_parts(
    make: Callable[[nn.Module], Optimizer],
    model: nn.Module,
    shapes: Mapping[int, torch.Size],
    asked: str,
) -> Optimizer:
    """`make(model)`, where `shapes` are those of whole weights, by the `id` of what is held.

    A rate may follow from the shape of a weight. Raises `RequestError` where it writes weights or
    buffers: a draw for a part is another one than for the whole; and where it reads the numbers of
    a weight that another rank holds.
    """
    before = _digests(model)
    with _WholeShapes(shapes):
        try:
            optimizer = make(model)
        except (RuntimeError, TypeError) as error:  # .numpy() raises the latter
            if "meta" in str(error).lower() and any(p.is_meta for p in model.parameters()):
                raise _numbers_read(asked, error) from error
            raise
    after = _digests(model)
    changed = sorted(name for name in before if before[name] != after.get(name))
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise RequestError(
            asked=f"{asked} with this optimizer(self, model) of the task",
            found=f"other numbers in {changed[0]!r}{more} after it",
            why="the rank holds parts of the weights, or some, and draws others for them than for "
            "the whole",
            do="set the weights in model(self), or --strategy ddp",
        )
    return optimizer


def _numbers_read(asked: str, error: Exception) -> RequestError:
    frames = traceback.extract_tb(error.__traceback__)
    line = ([f for f in frames if "/torch/" not in f.filename] or frames)[-1]  # of the task
    return RequestError(
        asked=f"{asked} with this optimizer(self, model) of the task",
        found=f"line {line.lineno} of {line.filename} reads the numbers of a weight: {line.line}",
        why="a rank holds the weights of its own stages; of the others it has names and shapes",
        do="take rates from names or shapes, set them in a callback, or --strategy ddp",
    )


def _digests(model: nn.Module) -> dict[str, str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {n: digest_of(local(t.detach())) for n, t in named if not t.is_meta}


class _WholeShapes(TorchFunctionMode):
    """Within, a part of a weight has the shape of the whole."""

    def __init__(self, shapes: Mapping[int, torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shape = self.shapes.get(id(args[0])) if args else None
        if shape is not None:
            if func in (SHAPE, Tensor.size):
                at = args[1:] or tuple((kwargs or {}).values())
                return shape[at[0]] if at and at[0] is not None else shape
            if func in (Tensor.numel, Tensor.nelement, torch.numel):
                return shape.numel()
            if func is Tensor.__len__:
                return shape[0]
        return func(*args, **(kwargs or {}))
