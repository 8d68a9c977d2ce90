"""The models of `parameter_server.py`, as plain data: every contender makes the same layers of it.

A stack of dense layers with ReLU between them, cross-entropy over the outputs, plain SGD. Batches
are small, so that a step is mostly weights and gradients on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

SAMPLES = 2048
RATE = 0.01
TABLE_ROWS, TABLE_DIM = 1 << 22, 64  # 1 GB of float32
LOOKED_UP = 26  # rows of the table for each sample
TABLE_BATCH, TABLE_STEPS = 512, 80


@dataclass(frozen=True)
class Size:
    """`widths` from the inputs to the outputs; `batch`: samples of one worker in one step."""

    widths: tuple[int, ...]
    batch: int
    steps: int
    """Of a turn, of both workers together."""

    @property
    def weights(self) -> int:
        return sum((a + 1) * b for a, b in pairwise(self.widths))


SIZES = {
    "11 k weights": Size((64, 96, 48, 10), 32, 1000),
    "2.6 M weights": Size((512, 1024, 1024, 1024, 10), 8, 200),
    "25 M weights": Size((1024, 3328, 3328, 3328, 10), 4, 40),
}
