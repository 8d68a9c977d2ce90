"""Calls at random, the same on every rank: kinds, groups, types, sizes, roots, from a seed alone.

A lane is a sequence of calls that each rank posts in one thread; the lanes of a rank are at work at
once. A call belongs to a group of the lane, and only its members take part. All of them know what
every other gives: a stretch of one pool of numbers, where the number of the call says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tree_reference import DTYPES, Array

KINDS = (
    *("all-reduce", "all-reduce in place", "reduce-scatter", "all-gather", "all-gather in place"),
    *("broadcast", "barrier", "messages", "plan", "plan of parts"),
)
OPS = ("sum", "mean", "max", "min", "product")
MOST_BYTES = 8 * 2**20
PLAN_BYTES = 3 * 2**14
POOL_BYTES = 2 * MOST_BYTES
TYPES = tuple(DTYPES)


@dataclass(frozen=True)
class Call:
    number: int  # in the lane
    group: int  # of the lane
    kind: str
    type: str
    op: str
    count: int  # elements a rank gives; of a scattered or gathered result, those of one part
    root: int
    seed: int


def pools(seed: int, nbytes: int = POOL_BYTES) -> dict[str, Array]:
    """Numbers of each type: of all magnitudes, now and then infinite or none at all."""
    draw = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for name, dtype in DTYPES.items():
        items = nbytes // np.dtype(dtype).itemsize
        if np.dtype(dtype).kind != "f" and name != "bfloat16":
            found[name] = draw.integers(0, 256, nbytes, np.uint8).view(dtype)
            continue
        wide = draw.standard_normal(items, np.float32) * np.exp2(draw.integers(-30, 30, items))
        wide[::20011] = np.inf
        wide[7::50021] = -np.inf
        wide[11::70001] = np.nan
        wide[13::997] = 0.0
        wide[17::991] = -0.0
        if name == "bfloat16":
            found[name] = (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            with np.errstate(over="ignore"):
                found[name] = wide.astype(dtype)
    return found


def given(pool: dict[str, Array], call: Call, rank: int, count: int, part: int = 0) -> Array:
    """What a rank of the group gives: a view of the pool, which nobody may write."""
    numbers = pool[call.type]
    mixed = (call.seed * 0x9E3779B1 + rank * 0x85EBCA6B + part * 0xC2B2AE35) & 0xFFFFFFFF
    begin = (mixed ^ mixed >> 15) % (len(numbers) - count + 1)
    return numbers[begin : begin + count]


def calls(seed: int, sizes: list[int], number: int, most_bytes: int) -> Iterator[Call]:
    """`number` calls in groups of these sizes."""
    draw = random.Random(seed)
    for index in range(number):
        group = draw.randrange(len(sizes))
        kind, type_name = draw.choice(KINDS), draw.choice(TYPES)
        parts = sizes[group] if "scatter" in kind or "gather" in kind else 1
        nbytes = _size(draw, most_bytes) // parts
        count = nbytes // np.dtype(DTYPES[type_name]).itemsize
        op, root, value = draw.choice(OPS), draw.randrange(sizes[group]), draw.getrandbits(32)
        yield Call(index, group, kind, type_name, op, count, root, value)


def _size(draw: random.Random, most_bytes: int) -> int:
    """Most are small; one of some hundred is as large as it may be."""
    chance = draw.random()
    if chance < 0.04:
        return 0
    if chance < 0.8:
        return draw.randrange(4096)
    if chance < 0.995:
        return draw.randrange(min(most_bytes, 80_000))
    return draw.randrange(most_bytes + 1)
