"""The parts of a checkpoint's plan: what a rank writes of a tensor, and reads of a chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from allranks.checkpoint.manifest import Chunk
from allranks.checkpoint.tensor_file import ITEM_BYTES

WHOLE, SHARD, ELSEWHERE = "whole", "shard", "elsewhere"


@dataclass(frozen=True)
class Part:
    """What one rank writes of one tensor: `shape` is the tensor's, the box its part of it.

    A `kind` of WHOLE may be held by several ranks alike, and is written by one. What is ELSEWHERE
    is known here and held by other ranks, whole or in parts.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    kind: str = WHOLE

    def __hash__(self) -> int:
        return hash(self.path)  # a text keeps it; few parts share one

    @property
    def whole_bytes(self) -> int:
        """The bytes of the tensor, not of the part."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Read:
    """What fills `target`: the `part` of a `chunk`."""

    path: str
    chunk: Chunk
    part: tuple[slice, ...]
    target: Tensor


def holds(chunk: Chunk) -> bool:
    """Whether there is any number in it: an empty one may lie where another begins."""
    return 0 not in chunk.sizes
