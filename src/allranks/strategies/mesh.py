"""The mesh: the positions of a job's ranks along the axes of its strategy. Pure arithmetic.

A mesh is one `arange` over all ranks, with the last axis varying fastest: on
(replicate 2, shard 3) rank 4 is at (1, 1). `torch.distributed.DeviceMesh` lays ranks out alike.
Ranks along `data` read different parts of the global batch; ranks that differ along any other axis
alone read the same part, and share the work on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from allranks.errors import RequestError

REPLICATE, SHARD, DATA, TENSOR = "replicate", "shard", "data", "tensor"
PIPELINE, CONTEXT, EXPERT, BRANCH = "pipeline", "context", "expert", "branch"
LEARNER = "learner"
FLATTENED = {DATA: (LEARNER, REPLICATE, SHARD, EXPERT)}
"""Axes that are several in one: the ranks of a sharded model each read data of their own, and so
do those that hold different experts, and learners that train apart."""


@dataclass(frozen=True)
class Mesh:
    """The name and the size of each axis. An axis that is not named here has the size 1."""

    axes: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """How many ranks lie along an axis."""
        return math.prod(size for name, size in self.axes if name in _parts(axis))

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along this axis alone, and itself, in order."""
        place = self.place(rank)
        ways = [
            range(size) if name in _parts(axis) else (at,)
            for (name, size), at in zip(self.axes, place, strict=True)
        ]
        return tuple(self._rank_at(where) for where in product(*ways))

    def is_first_of_its_data(self, rank: int) -> bool:
        """Whether a rank is the first of those that read the same part of the global batch.

        What is counted in samples is counted by these ranks alone.
        """
        there = zip(self.axes, self.place(rank), strict=True)
        return all(at == 0 for (name, _), at in there if name not in FLATTENED[DATA])

    def place(self, rank: int) -> tuple[int, ...]:
        """The position of a rank along each axis, in their order."""
        places = []
        for _, size in reversed(self.axes):
            rank, at = divmod(rank, size)
            places.append(at)
        return tuple(reversed(places))

    def _rank_at(self, coordinates: tuple[int, ...]) -> int:
        rank = 0
        for (_, size), at in zip(self.axes, coordinates, strict=True):
            rank = rank * size + at
        return rank


def _parts(axis: str) -> tuple[str, ...]:
    return FLATTENED.get(axis, (axis,))


def in_copies(ranks: int, copies: int, axis: str, strategy: str, of: str = "model") -> Mesh:
    """So many copies, each on as many ranks along the axis; `RequestError` where that is uneven."""
    if ranks % copies:
        raise RequestError(
            asked=f"--strategy {strategy} --ranks {ranks}",
            found=f"{ranks} ranks for {copies} copies of the {of}",
            why="each copy is on as many ranks as any other",
            do=f"--ranks {-(-ranks // copies) * copies}",
        )
    return Mesh(((REPLICATE, copies), (axis, ranks // copies)))


def replicated_mesh(ranks: int) -> Mesh:
    """Every rank has the whole model, and data of its own."""
    return Mesh(((REPLICATE, ranks),))


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a job have in common while it trains.

    `weights`: all ranks hold the same ("replicated"), each a part of every tensor ("sharded") or
    some of the tensors ("staged"), or each a training of its own ("own"). With `cuts_optimizer`
    they hold parts of what the optimizer keeps, even where their weights are replicated. With
    `lockstep` all ranks make every step together, and hear in it what one of them was asked.
    """

    weights: Literal["replicated", "sharded", "staged", "own"] = "replicated"
    lockstep: bool = True
    cuts_optimizer: bool = False

    @cached_property
    def is_one_training(self) -> bool:
        """Whether all ranks train one model, whoever holds it."""
        return self.weights != "own"

    @cached_property
    def cuts_state(self) -> bool:
        """Whether no rank has the whole state of the training."""
        return self.weights in ("sharded", "staged") or self.cuts_optimizer


REPLICATED = Agreement()
