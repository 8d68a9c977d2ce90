"""Infers the dimension of the samples in a random tensor, as torch's functions get only a shape.

    rows      dimension 0 runs over the samples, one row each or several     (B, …), (B * heads, …)
    columns   dimension 1 does, as in an RNN that is not `batch_first`       (positions, B, hidden)
    all       no dimension does: every sample sees the same draw             (), (features,)

A draw is identified by its number in the pass and its dimensions. Its first reading holds: a pass
with another number of samples that contradicts it is refused, and so is an ambiguous shape.
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
    """The readings of the draws of a model, on this rank."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], DrawReading] = {}
        self._untried: dict[tuple[int, int], str] = {}
        self._orders: set[str] = set()
        self._draws: set[int] = set()

    def read(self, operation: str, call: int, shape: Sequence[int], samples: int) -> str:
        """How a draw is read in a pass of so many samples, or `RequestError`."""
        key, now = (call, len(shape)), tuple(shape)
        known = self._known.get(key)
        if known is None:
            first = DrawReading(_first_reading(operation, shape, samples), samples, now)
            self._see(key, operation, first)
            return first.kind
        kind, then, was = known
        if samples == then:
            fits = now[:1] == was[:1] or kind != ROWS or now[0] % samples == 0
        elif kind == ROWS:
            fits = now[0] % samples == 0 and now[0] != was[0]
        else:
            fits = not (kind == ALL and _grows_with_samples(known, DrawReading(kind, samples, now)))
        if not fits or (kind == COLUMNS and shape[1] != samples):
            raise _refused(operation, shape, samples, _was(known))
        if samples != then and (kind != ALL or now == was):
            self._untried.pop(key, None)
        return kind

    def read_order(self, operation: str, call: int, length: int, samples: int) -> None:
        """Read a permutation: the same for all samples; noted if it is one of the samples."""
        key, now = (call, ORDER), DrawReading(ALL, samples, (length,))
        known = self._known.get(key)
        if known is None:
            self._see(key, operation, now)
        elif _grows_with_samples(known, now):
            self._orders.add(_order_of_samples(operation))
        elif samples != known.samples and now.shape == known.shape:
            self._untried.pop(key, None)

    def _see(self, key: tuple[int, int], operation: str, reading: DrawReading) -> None:
        self._known[key] = reading
        kind, samples, shape = reading
        if kind == ROWS:
            tell = samples == 1 or shape[0] != samples or len(shape) == 1
        else:
            tell = kind == ALL and max(shape, default=1) >= max(samples, 2)
        if tell:
            self._untried[key] = f"{operation} of shape {shape} for {samples} samples"

    def end_pass(self, draws: int) -> None:
        """Record the number of draws of a pass, for the next `agree`."""
        self._draws.add(draws)

    def untried(self) -> str:
        """A draw whose reading was checked for only one number of samples; "" if there is none."""
        some = "; ".join(self._untried.values())
        return some and f"whether rows of these belong to samples was not tried: {some}"

    def agree(self, gather: Callable[[str], list[str]]) -> list[str]:
        """The draws that depend on the ranks; raises `RequestError` if ranks read one differently.

        Every rank calls this. Communicates by `gather`, some bytes for each draw of a pass.
        """
        known = [[*key, *readings] for key, readings in self._known.items()]
        local = {"known": known, "draws": sorted(self._draws), "orders": sorted(self._orders)}
        self._draws.clear()
        of_all: dict[tuple[int, int], list[DrawReading]] = {}
        draws, findings = set[int](), set[str]()
        for text in gather(json.dumps(local)):
            row = json.loads(text)
            draws.update(row["draws"])
            findings.update(row["orders"])
            for call, dims, kind, samples, shape in row["known"]:
                of_all.setdefault((call, dims), []).append(DrawReading(kind, samples, tuple(shape)))
        for (call, dims), readings in of_all.items():
            kinds = {reading.kind for reading in readings}
            name = f"draw {call}, {dims} dimensions of a pass, in forward or loss"
            if len(kinds) > 1:
                raise _unclear(
                    name, f"the samples are in {' and in '.join(sorted(kinds))}, as ranks see it"
                )
            if kinds == {ALL} and any(_grows_with_samples(readings[0], r) for r in readings):
                if dims != ORDER:
                    text = f"{_was(readings[0])}, and other ranks have more with more"
                    raise _unclear(name, text)
                findings.add(_order_of_samples("randperm()"))
        if len(draws) > 1:
            findings.add(
                f"forward or loss draws {' or '.join(map(str, sorted(draws)))} times in a pass: "
                "draws are numbered in their order, so what is drawn follows what goes through "
                "together, and with it the number of ranks"
            )
        return sorted(findings)


def _grows_with_samples(first: DrawReading, second: DrawReading) -> bool:
    """Whether a dimension grows with the samples, of a draw that has none for them."""
    both = zip(first.shape, second.shape, strict=True)
    return first.samples != second.samples and any(
        a != b and a * second.samples == b * first.samples for a, b in both
    )


def _was(reading: DrawReading) -> str:
    first = reading.shape[0] if reading.shape else 0
    if reading.kind == ALL:
        return f"{reading.shape} for {reading.samples} samples"
    return f"{first} along dimension 0 for {reading.samples} samples"


def _order_of_samples(operation: str) -> str:
    return (
        f"forward or loss draws an order of the samples by {operation}: which are in it follows "
        "the number of ranks"
    )


def _first_reading(operation: str, shape: Sequence[int], samples: int) -> str:
    may_be_rows = bool(shape) and shape[0] > 0 and shape[0] % samples == 0
    may_be_columns = len(shape) >= COLUMN_DIMS and shape[1] == samples
    if may_be_rows and may_be_columns and shape[0] != samples:
        raise _refused(operation, shape, samples, "dimensions 0 and 1 that may both be the samples")
    if may_be_rows:
        return ROWS
    return COLUMNS if may_be_columns else ALL


def _refused(operation: str, shape: Sequence[int], samples: int, besides: str) -> UnclearDraw:
    asked = f"{operation} of shape {tuple(shape)} in forward or loss"
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
