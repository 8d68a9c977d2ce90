"""Where the samples are in a tensor that is drawn: a function of torch is told a shape alone.

    rows      dimension 0 runs over the samples, one row each or several     (B, …), (B * heads, …)
    columns   dimension 1 does, as in an RNN that is not `batch_first`       (positions, B, hidden)
    all       no dimension does: every sample sees the same draw             (), (features,)

A draw is known by its number in the pass and its dimensions. How it was read first holds: a pass of
another number of samples that contradicts it is refused, as is a shape that may be read both ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from allranks.errors import RequestError

ROWS, COLUMNS, ALL = "rows", "columns", "all"
ORDER = -1  # in place of dimensions: what is drawn is a permutation
COLUMN_DIMS = 3  # (positions, samples, features)


class UnclearDraw(RequestError):
    """Where the samples are in what is drawn cannot be told from its shape."""


class DrawReading(NamedTuple):
    """How a draw was read, in a pass of so many samples, by its shape."""

    kind: str
    samples: int
    shape: tuple[int, ...]


class Readings:
    """What has been read in the draws of a model, on this rank."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], DrawReading] = {}
        self._untried: dict[tuple[int, int], str] = {}
        self._orders: set[str] = set()
        self._draws: set[int] = set()

    def read(self, what: str, call: int, shape: Sequence[int], samples: int) -> str:
        """How a draw is read in a pass of so many samples, or `RequestError`."""
        key, now = (call, len(shape)), tuple(shape)
        known = self._known.get(key)
        if known is None:
            seen = DrawReading(_first_reading(what, shape, samples), samples, now)
            self._see(key, what, seen)
            return seen.kind
        kind, then, was = known
        if samples == then:
            fits = now[:1] == was[:1] or kind != ROWS or now[0] % samples == 0
        elif kind == ROWS:
            fits = now[0] % samples == 0 and now[0] != was[0]
        else:
            fits = not (kind == ALL and _grows_with_samples(known, DrawReading(kind, samples, now)))
        if not fits or (kind == COLUMNS and shape[1] != samples):
            raise _refused(what, shape, samples, _was(known))
        if samples != then and (kind != ALL or now == was):
            self._untried.pop(key, None)
        return kind

    def read_order(self, what: str, call: int, length: int, samples: int) -> None:
        """A permutation is the same for all samples, and named if it is one of the samples."""
        key, now = (call, ORDER), DrawReading(ALL, samples, (length,))
        known = self._known.get(key)
        if known is None:
            self._see(key, what, now)
        elif _grows_with_samples(known, now):
            self._orders.add(_order_of_samples(what))
        elif samples != known.samples and now.shape == known.shape:
            self._untried.pop(key, None)

    def _see(self, key: tuple[int, int], what: str, seen: DrawReading) -> None:
        self._known[key] = seen
        kind, samples, shape = seen
        if kind == ROWS:
            tell = samples == 1 or shape[0] != samples or len(shape) == 1
        else:
            tell = kind == ALL and max(shape, default=1) >= max(samples, 2)
        if tell:
            self._untried[key] = f"{what} of shape {shape} for {samples} samples"

    def end_pass(self, draws: int) -> None:
        """A pass of the step in which ranks agree next has drawn so often."""
        self._draws.add(draws)

    def untried(self) -> str:
        """What could be no rows of samples after all: it was seen for one number of them only."""
        some = "; ".join(self._untried.values())
        return some and f"whether rows of these belong to samples was not tried: {some}"

    def agree(self, gather: Callable[[str], list[str]]) -> list[str]:
        """What follows the ranks, as all draw; `RequestError` where they read one otherwise.

        Every rank calls this. Communicates by `gather`, some bytes for each draw of a pass.
        """
        known = [[*key, *seen] for key, seen in self._known.items()]
        own = {"known": known, "draws": sorted(self._draws), "orders": sorted(self._orders)}
        self._draws.clear()
        together: dict[tuple[int, int], list[DrawReading]] = {}
        draws, found = set[int](), set[str]()
        for text in gather(json.dumps(own)):
            told = json.loads(text)
            draws.update(told["draws"])
            found.update(told["orders"])
            for call, dims, kind, samples, shape in told["known"]:
                together.setdefault((call, dims), []).append(
                    DrawReading(kind, samples, tuple(shape))
                )
        for (call, dims), seen in together.items():
            kinds = {one.kind for one in seen}
            name = f"draw {call}, {dims} dimensions of a pass, in forward or loss"
            if len(kinds) > 1:
                raise _unclear(
                    name, f"the samples are in {' and in '.join(sorted(kinds))}, as ranks see it"
                )
            if kinds == {ALL} and any(_grows_with_samples(seen[0], one) for one in seen):
                if dims != ORDER:
                    raise _unclear(name, f"{_was(seen[0])}, and other ranks have more with more")
                found.add(_order_of_samples("randperm()"))
        if len(draws) > 1:
            found.add(
                f"forward or loss draws {' or '.join(map(str, sorted(draws)))} times in a pass: "
                "draws are numbered in their order, so what is drawn follows what goes through "
                "together, and with it the number of ranks"
            )
        return sorted(found)


def _grows_with_samples(one: DrawReading, other: DrawReading) -> bool:
    """Whether a dimension of what has none for the samples is larger with more of them."""
    both = zip(one.shape, other.shape, strict=True)
    return one.samples != other.samples and any(
        a != b and a * other.samples == b * one.samples for a, b in both
    )


def _was(seen: DrawReading) -> str:
    first = seen.shape[0] if seen.shape else 0
    if seen.kind == ALL:
        return f"{seen.shape} for {seen.samples} samples"
    return f"{first} along dimension 0 for {seen.samples} samples"


def _order_of_samples(what: str) -> str:
    return (
        f"forward or loss draws an order of the samples by {what}: which are in it follows the "
        "number of ranks"
    )


def _first_reading(what: str, shape: Sequence[int], samples: int) -> str:
    may_be_rows = bool(shape) and shape[0] > 0 and shape[0] % samples == 0
    may_be_columns = len(shape) >= COLUMN_DIMS and shape[1] == samples
    if may_be_rows and may_be_columns and shape[0] != samples:
        raise _refused(what, shape, samples, "dimensions 0 and 1 that may both be the samples")
    if may_be_rows:
        return ROWS
    return COLUMNS if may_be_columns else ALL


def _refused(what: str, shape: Sequence[int], samples: int, besides: str) -> UnclearDraw:
    asked = f"{what} of shape {tuple(shape)} in forward or loss"
    return _unclear(asked, f"{samples} samples, and {besides}")


def _unclear(asked: str, found: str) -> UnclearDraw:
    return UnclearDraw(
        asked=asked,
        found=found,
        why="what is drawn belongs to the samples, and where they are in this shape is not clear: "
        "the result would follow the number of ranks",
        do="draw with the samples first, (samples, …), or in a shape without them; draw from a "
        "torch.Generator of your own; or --bitwise",
    )
