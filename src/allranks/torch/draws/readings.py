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

from allranks.errors import RequestError

ROWS, COLUMNS, ALL = "rows", "columns", "all"
COLUMN_DIMS = 3  # (positions, samples, features)


class UnclearDraw(RequestError):
    """Where the samples are in what is drawn cannot be told from its shape."""


class Readings:
    """What has been read in the draws of a model, on this rank."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[str, int, int]] = {}
        self._untried: dict[tuple[int, int], str] = {}

    def read(self, what: str, call: int, shape: Sequence[int], samples: int) -> str:
        """How a draw is read in a pass of so many samples, or `RequestError`."""
        key, first = (call, len(shape)), shape[0] if shape else 0
        known = self._known.get(key)
        if known is None:
            kind = _first_reading(what, shape, samples)
            self._known[key] = kind, samples, first
            if kind == ROWS and (samples == 1 or first != samples or len(shape) == 1):
                self._untried[key] = f"{what} of shape {tuple(shape)} for {samples} samples"
            return kind
        kind, then, was = known
        if samples == then:
            fits = first == was or kind != ROWS or first % samples == 0
        elif kind == ROWS:
            fits = first % samples == 0 and first != was
        else:
            fits = kind == ALL or shape[1] == samples
        if not fits or (kind == COLUMNS and shape[1] != samples):
            raise _refused(what, shape, samples, f"{was} along dimension 0 for {then} samples")
        if samples != then:
            self._untried.pop(key, None)
        return kind

    def untried(self) -> str:
        """What could be no rows of samples after all: it was seen for one number of them only."""
        some = "; ".join(self._untried.values())
        return some and f"whether rows of these belong to samples was not tried: {some}"

    def agree(self, gather: Callable[[str], list[str]]) -> None:
        """Raise `RequestError` where ranks read one draw differently; every rank calls this.

        Communicates by `gather`, some bytes for each draw of a pass.
        """
        own = {
            f"draw {call}, {dims} dimensions": read[0] for (call, dims), read in self._known.items()
        }
        together: dict[str, set[str]] = {}
        for text in gather(json.dumps(own)):
            for name, kind in json.loads(text).items():
                together.setdefault(name, set()).add(kind)
        for name, kinds in together.items():
            if len(kinds) > 1:
                found = f"the samples are in {' and in '.join(sorted(kinds))}, as ranks see it"
                raise _unclear(f"{name} of a pass, in forward or loss", found)


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
