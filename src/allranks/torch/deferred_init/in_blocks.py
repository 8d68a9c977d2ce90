"""Draws of a large tensor, a block of its numbers after the other, as if they were one draw.

To advance a generator as one process does, a recorded draw is carried out on scratch memory. That
of a table may be larger than what this process may hold, so it is drawn in blocks. On the CPU torch
draws uniform numbers one by one, and normal ones 16 at a time from 16 on: blocks are multiples of
16, and what is left of fewer numbers goes with the last block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 18  # numbers
TOGETHER = 16
IN_BLOCKS = {"normal_", "uniform_"}
KINDS = (torch.float32, torch.float64)


def is_drawn_in_blocks(name: str, tensor: Tensor, device: torch.device) -> bool:
    """Whether the operator of this `name` gives the same numbers in blocks."""
    is_plain = tensor.dtype in KINDS and tensor.is_contiguous() and device.type == "cpu"
    return name in IN_BLOCKS and is_plain and tensor.numel() > BLOCK


def sizes(numbers: int) -> Iterator[int]:
    """How many numbers each block has."""
    while numbers > BLOCK + TOGETHER:
        yield BLOCK
        numbers -= BLOCK
    yield numbers


def draw_in_blocks(draw: Callable[[Tensor], Any], numbers: int, kind: torch.dtype) -> None:
    """Draw so many `numbers`, and forget them."""
    for size in sizes(numbers):
        draw(torch.empty(size, dtype=kind))
