"""The keys of random draws in a forward pass: for samples, for rows, and for no sample.

`Keys` belong to the scope of a pass, and create the keys for the next call of a layer. A compiled
graph calls an opaque operator for them, `allranks::row_keys`: neither the step nor the number of a
layer or call is a constant of the graph, so nothing is recompiled.

`Readings` infer the dimension of the samples in a random tensor, as torch's functions get only a
shape:

    rows      dimension 0 runs over the samples, one row each or several     (B, …), (B * heads, …)
    columns   dimension 1 does, as in an RNN that is not `batch_first`       (positions, B, hidden)
    all       no dimension does: every sample sees the same draw             (), (features,)

A draw is identified by its number in the pass and its dimensions. Its first reading holds: a pass
with another number of samples that contradicts it is refused, and so is an ambiguous shape.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.strategies.shards import Micro
from allranks.torch.accelerator import is_accelerator, pinned
from allranks.torch.random.counter import (
    DRAWS,
    HALF,
    WORD,
    Finish,
    Words,
    coordinates,
    flags_from,
    has_kernel,
    keys_of,
    on_cpu,
    on_device,
    place_words,
    unsigned,
    words,
)

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


_pythons: Any = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _pythons).seed


def seed_generators(seed: int) -> None:
    """Key every generator that user code may draw from: Python's, NumPy's and torch's own.

    In every step twice, so Python's without what `random.seed` asks of a seed first.
    """
    _seed_python(seed)
    _pythons.gauss_next = None
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


CPU = torch.device("cpu")
NO_SHARD = -1
BY_FUNCTION = -6  # the number of what draws without being a layer


class KeyedPass(Protocol):
    """What goes through a model (`Scope`)."""

    seed: int
    step: int
    pieces: Micro
    samples: int
    calls: dict[int, int]


class Keys:
    """The keys of one scope, created for a pass when they are first used."""

    def __init__(self, scope: KeyedPass) -> None:
        self.scope = scope
        self.by_function = False  # whether random functions of torch draw from these keys, too
        self.is_part: Callable[[], bool] = lambda: False  # whether activations are parts right now
        self.readings = Readings()
        self.seed_of_torch = 0  # what the generator of the process was seeded by for this pass
        self._of: tuple[int, Micro] = (-1, ())
        self._of_samples: Words | None = None

    def draw_elsewhere(self) -> None:
        """From now on, random functions in this thread are torch's own: no pass is running."""
        _HERE.keys = None

    def draw_here(self) -> None:
        """From now on, draws of this thread belong to this scope."""
        _HERE.keys = self

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within, draws of this thread belong to this scope."""
        before = getattr(_HERE, "keys", None)
        _HERE.keys = self
        try:
            yield
        finally:
            _HERE.keys = before

    def seeded_by_user(self) -> bool:
        """Whether torch's generator has another seed than the pass gave it."""
        return torch.default_generator.initial_seed() != self.seed_of_torch

    def next_call(self, index: int) -> int:
        """The number of draws of a layer in this pass so far; counts one more."""
        call = self.scope.calls.get(index, 0)
        self.scope.calls[index] = call + 1
        return call

    def of_samples(self) -> Words:
        """(samples, 2), in the order of the rows."""
        scope = self.scope
        step, pieces = self._of
        if self._of_samples is None or pieces is not scope.pieces or step != scope.step:
            self._of = scope.step, scope.pieces
            self._of_samples = keys_of(scope.seed, scope.step, scope.pieces)
        return self._of_samples

    def of_rows(self, index: int, shape: Sequence[int], operation: str) -> Words:
        """The keys for the next call of a layer, one for each row of this shape: (rows, 2).

        Several rows per sample have the key of their sample and a coordinate more.
        """
        per_sample = rows_per_sample(shape, self.scope.samples, operation)
        keys = self.of_samples() + place_words(index, self.next_call(index))
        if per_sample == 1:
            return keys
        first, second = (
            0 if word is None else unsigned(word)
            for word in coordinates((per_sample, *[1] * (len(shape) - 1)), (0,) * len(shape), CPU)
        )
        rows = np.repeat(keys.reshape(-1, 1, 2), per_sample, axis=1)
        rows[..., 0] += first
        rows[..., 1] += second
        return rows.reshape(-1, 2)

    def of_all(self, index: int) -> Words:
        """The key for the next call of a layer that draws the same for all samples: (1, 2)."""
        key = np.array([words(self.scope.seed, self.scope.step, NO_SHARD, DRAWS)], np.uint32)
        return key + place_words(index, self.next_call(index))


def keys_here() -> Keys | None:
    """The keys of the pass that this thread is in; `None` outside of a step."""
    keys: Keys | None = getattr(_HERE, "keys", None)
    return keys if keys is not None and keys.scope.pieces else None


def rows_per_sample(shape: Sequence[int], samples: int, operation: str) -> int:
    """The rows per sample in a tensor of this shape; raises `RequestError`."""
    per_sample = shape[0] // samples  # no divmod: a compiler that follows sizes knows none of them
    if shape[0] % samples or not per_sample:
        raise RequestError(
            asked=f"{operation} on a tensor of shape {tuple(shape)}",
            found=f"{shape[0]} rows for {samples} samples",
            why="rows are given to shards, so dimension 0 must run over all samples, in order",
            do="put the samples first (batch_first=True); where rows are picked out, as for an "
            "expert of a mixture, put this layer before that or after, or use "
            "torch.nn.functional with --bitwise",
        )
    return per_sample


def drawn(
    keys: Words | Tensor, sizes: Sequence[int], starts: Sequence[int], finish: Finish, on: Tensor
) -> Tensor:
    """What `finish` makes of 32 random bits for each element, on the device of `on`.

    Each row of `keys`, (rows, 2), has elements of the given `sizes`: (rows, *sizes).
    """
    known = tuple(sizes), tuple(starts)
    if isinstance(keys, Tensor):
        numbers = on_device(keys, *known, finish)
    elif on.is_cpu:
        numbers = on_cpu(keys, *known, finish)
    else:
        numbers = on_device(_moved(keys, on.device), *known, finish)
    return numbers if len(sizes) == 1 else numbers.view(keys.shape[0], *sizes)


def drawn_flags(
    keys: Words | Tensor, sizes: Sequence[int], starts: Sequence[int], below: int, on: Tensor
) -> Tensor | None:
    """Whether the bits that `drawn` takes are `below` or more, as bool, by a kernel of the device.

    `None` where there is none.
    """
    if isinstance(keys, Tensor) or not has_kernel(on.device):
        return None
    return flags_from(_moved(keys, on.device), sizes, starts, below)


def _moved(keys: Words, device: torch.device) -> Tensor:
    host = torch.from_numpy(keys.view(np.int32))
    if is_accelerator(device):  # the host does not wait for a copy from pinned memory
        host = pinned(host)
    return host.to(device, non_blocking=True)


def slot_of(index: int) -> Tensor:
    """The number of a layer, as a compiled graph takes it: no constant of the graph."""
    return torch.from_numpy(np.array(index))


_HERE = threading.local()
_OPERATORS = torch.library.Library("allranks", "DEF")
_OPERATORS.define(
    "row_keys(Tensor input, Tensor slot) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),  # two calls are two draws
)


def _row_keys(input: Tensor, slot: Tensor) -> Tensor:
    keys = keys_here()
    assert keys is not None, "a compiled layer draws in a pass"
    return _moved(keys.of_rows(int(slot), input.shape, "Dropout"), input.device)


def _fake_row_keys(input: Tensor, slot: Tensor) -> Tensor:
    return input.new_empty((input.shape[0], 2), dtype=torch.int32)


_OPERATORS.impl("row_keys", _row_keys, "CompositeExplicitAutograd")
torch.library.register_fake("allranks::row_keys", _fake_row_keys, lib=_OPERATORS)
row_keys: Any = torch.ops.allranks.row_keys.default


# --- sampling ------------------------------------------------------------------------------------
# Turns random bits into masks, and into numbers of the distributions that torch draws from.


def threshold(rate: float) -> int:
    """The int32 below which are random bits with this probability, in steps of 2^-32."""
    return min(round(rate * WORD), WORD - 1) - HALF


def mask_of(rate: float, dtype: torch.dtype) -> Finish:
    """A mask of dropout: 0 with probability `rate`, else 1 / (1 - rate)."""

    def finish(bits: Tensor) -> Tensor:
        if rate >= 1:
            return torch.zeros(bits.shape, dtype=dtype, device=bits.device)
        if torch.compiler.is_compiling():
            return bits.ge(threshold(rate)).to(dtype) / (1 - rate)
        mask = torch.empty(bits.shape, dtype=dtype, device=bits.device)
        return torch.ge(bits, threshold(rate), out=mask).div_(1 - rate)

    return finish


@cache
def scale_of(rate: float, dtype: torch.dtype) -> float:
    """The value of a mask of dropout where it is not 0, rounded to this type."""
    return 0.0 if rate >= 1 else torch.ones((), dtype=dtype).div_(1 - rate).item()


def unit(bits: Tensor) -> Tensor:
    """Numbers of float64 between 0 and 1, neither of them: 2^32 of them, evenly apart."""
    return bits.to(torch.float64).add_(HALF + 0.5).mul_(1 / WORD)


def uniform(low: float, high: float, dtype: torch.dtype) -> Finish:
    """Numbers of [low, high), of as many bits as `dtype` has between 0 and 1."""
    size = torch.finfo(dtype).eps / 2

    def finish(bits: Tensor) -> Tensor:
        numbers = unit(bits).div_(size).floor_().mul_(size * (high - low)).add_(low)
        return numbers.to(dtype)

    return finish


def normal(bits: Tensor) -> Tensor:
    """Numbers of the standard normal distribution, by its inverse: none beyond 6.4 deviations."""
    numbers: Tensor = torch.special.ndtri(unit(bits))
    return numbers


def whole_numbers(low: int, high: int) -> Finish:
    """Whole numbers of [low, high), at most 2^31 of them, as int64."""

    def finish(bits: Tensor) -> Tensor:
        return bits.to(torch.int64).add_(HALF).mul_(high - low).bitwise_right_shift_(32).add_(low)

    return finish
