"""Tensors that leave together: one message, which is the memory that they lie in side by side.

A message costs as much as hundreds of kilobytes: what goes the same way at the same time goes in
one. A tensor that is alone in it leaves from where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from allranks.torch.pipelining.looks import flat, laid_out

ALIGNED = 16  # bytes: the largest number that torch knows
Shape = tuple[torch.dtype, Sequence[int], Sequence[int]]
"""Of a tensor that fills its memory: type, shape and strides."""


@dataclass(frozen=True)
class Parcel:
    """`message` are the bytes of all `tensors`."""

    message: Tensor
    tensors: list[Tensor]

    @staticmethod
    def room(shapes: Sequence[Shape], device: torch.device) -> Parcel:
        """Memory for tensors that look so; each is written on as if it were alone."""
        if len(shapes) == 1:
            ((kind, shape, stride),) = shapes
            alone = torch.empty_strided(shape, stride, dtype=kind, device=device)
            return Parcel(flat(alone), [alone])
        sizes = [math.prod(shape) * kind.itemsize for kind, shape, _ in shapes]
        starts, size = _starts(tuple(sizes))
        message = torch.empty(size, dtype=torch.uint8, device=device)
        memory, found = message.untyped_storage(), []
        for (kind, shape, stride), start in zip(shapes, starts, strict=True):
            empty = torch.empty(0, dtype=kind, device=device)
            found.append(empty.set_(memory, start // kind.itemsize, shape, stride))
        return Parcel(message, found)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Parcel:
        """These tensors, which must not change before the message has left."""
        dense = [laid_out(tensor.detach()) for tensor in tensors]
        if len(dense) == 1:
            return Parcel(flat(dense[0]), dense)
        found = Parcel.room([shape_of(tensor) for tensor in dense], dense[0].device)
        for there, tensor in zip(found.tensors, dense, strict=True):
            there.copy_(tensor)
        return found


def shape_of(tensor: Tensor) -> Shape:
    """What there is to know of a tensor to make room for it."""
    return tensor.dtype, tensor.shape, tensor.stride()


@lru_cache(maxsize=1024)
def _starts(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // ALIGNED) * ALIGNED)
        end = starts[-1] + size
    return starts, end
