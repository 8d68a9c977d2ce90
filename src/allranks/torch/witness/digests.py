"""Digests of a training state with torch that do not depend on which rank holds what.

A digest is a sum modulo 2^64 over all numbers of a tensor: their bits, times an odd key for the row
and one for the place in the row. So each rank adds up its part, wherever it lies in the whole, and
the parts of all ranks are added, exactly. Which rank adds up what is the plan of a checkpoint:
each part once, and what all hold is shared out. Nothing is gathered but one number for each kind.

A change of one number always changes the sum. Changes of several leave it as it was with a chance
of about 2^-60, and of 2^-32 where they are two sign bits alone, the highest of a word. It tells
faults, not somebody who means to deceive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allranks.checkpoint.format import below
from allranks.errors import RequestError
from allranks.torch.accelerator import is_accelerator
from allranks.torch.checkpoint.plan import Planner, WritePart, local_parts
from allranks.torch.checkpoint.state import flatten
from allranks.torch.data.batch import Batch
from allranks.torch.model.reals import reals
from allranks.torch.step.probes import StepProbe
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.recompute import dense

Words = NDArray[np.uint64]
MASK = 2**64 - 1
FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
SHIFT, ODD = np.uint64(29), np.uint64(1)
ROWS, COLUMNS, SAMPLES = 1, 2, 3  # what keys are for
AT_ONCE = 1 << 15  # words that are added up at a time, which stay in a cache
SMALL = 1 << 14  # keys of more numbers in one row are made anew each time
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
WEIGHTS, OWN = "model", "own"  # in the paths of a state


def keys_of(numbers: Words, purpose: int) -> Words:
    """An odd key for each number, without a pattern (the mixing of SplitMix64)."""
    mixed = (numbers + np.uint64(purpose * int(SECOND) & MASK)) * FIRST
    mixed ^= mixed >> SHIFT
    mixed *= SECOND
    mixed ^= mixed >> SHIFT
    return mixed | ODD


def _keys(start: int, stop: int, purpose: int) -> Words:
    return keys_of(np.arange(start, stop, dtype=np.uint64), purpose)


class PartKeys(NamedTuple):
    """The keys of a part: of its rows, of the words of a row, and of the tensor."""

    rows: Words
    columns: Words | KeysOfLongRow
    tensor: int


@dataclass(frozen=True)
class KeysOfLongRow:
    """The keys of the words from `start` on, made piece by piece: they take twice their memory."""

    start: int
    stop: int

    def __getitem__(self, piece: slice) -> Words:
        return _keys(self.start + piece.start, min(self.start + piece.stop, self.stop), COLUMNS)


def keys_of_part(part: WritePart, words: int) -> PartKeys:
    """The keys of a part of a tensor whose numbers have so many `words`."""
    shape, offsets, sizes = part.shape or (1,), part.offsets or (0,), part.sizes or (1,)
    if len(shape) == 1:  # one row
        shape, offsets, sizes = (1, *shape), (0, *offsets), (1, *sizes)
    name = f"{part.path} {part.dtype} {part.shape}".encode()
    return PartKeys(
        _keys(offsets[0], offsets[0] + sizes[0], ROWS),
        _columns(shape[1:], offsets[1:], sizes[1:], words),
        int.from_bytes(blake2b(name, digest_size=8).digest(), "little") | 1,
    )


_known_keys = lru_cache(maxsize=1024)(keys_of_part)


def part_digest(part: WritePart, tensor: Tensor) -> int:
    """The digest of a part of a tensor: those of all parts add up to that of the tensor."""
    if tensor.numel() == 0:
        return 0
    plain = reals(tensor.detach().resolve_conj().resolve_neg()).contiguous()
    unit = tensor.itemsize if tensor.itemsize in UNSIGNED else 4
    find = _known_keys if tensor.numel() < SMALL else keys_of_part
    keys = find(part, tensor.itemsize // unit)
    table = plain.view(-1).view(SIGNED[unit]).view(len(keys.rows), -1)
    summed = _summed_there if is_accelerator(table.device) else _summed
    return summed(table, keys.rows, keys.columns) * keys.tensor & MASK


def _columns(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], words: int
) -> Words | KeysOfLongRow:
    """The keys of the words of a row, by their places in the whole row."""
    if sizes == shape or len(shape) == 1:
        start = 0 if sizes == shape else offsets[0] * words
        stop = start + math.prod(sizes) * words
        if stop - start > AT_ONCE:
            return KeysOfLongRow(start, stop)
        return _keys(start, stop, COLUMNS)
    places = [range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    numbers = np.ravel_multi_index(np.ix_(*places), shape).reshape(-1, 1)
    return keys_of((numbers * words + np.arange(words)).ravel().astype(np.uint64), COLUMNS)


def _pieces(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a table of words that fit a cache."""
    wide, high = min(columns, AT_ONCE), max(1, AT_ONCE // columns)
    for first in range(0, rows, high):
        for left_most in range(0, columns, wide):
            yield slice(first, first + high), slice(left_most, left_most + wide)


def _summed(flat: Tensor, rows: Words, columns: Words | KeysOfLongRow) -> int:
    table = flat.numpy().view(UNSIGNED[flat.itemsize])
    total = np.zeros((), np.uint64)
    for of_rows, of_columns in _pieces(*table.shape):
        sums = table[of_rows, of_columns].astype(np.uint64) @ columns[of_columns]
        total += sums @ rows[of_rows]
    return int(total)


def _summed_there(flat: Tensor, rows: Words, columns: Words | KeysOfLongRow) -> int:
    """The same on the device of the tensor, whose integers of 64 bits wrap around alike."""
    device, at_once = flat.device, AT_ONCE << 8
    total = torch.zeros((), dtype=torch.int64, device=device)
    of_rows = torch.from_numpy(rows.view(np.int64)).to(device)
    high = max(1, at_once // flat.shape[1])
    for left_most in range(0, flat.shape[1], at_once):
        across = slice(left_most, left_most + at_once)
        keys = torch.from_numpy(columns[across].view(np.int64)).to(device)
        for first in range(0, flat.shape[0], high):
            words = flat[first : first + high, across].to(torch.int64)
            words &= 2 ** (8 * flat.itemsize) - 1
            total += ((words * keys).sum(1) * of_rows[first : first + high]).sum()
    return int(total) & MASK


class StateDigests(StepProbe):
    """The digests of a strategy's state, alike on all ranks. Every rank makes the same calls.

    It is the probe of the step that is watched, which hands it the gradients.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self._planner = strategy, Planner(strategy.comm)
        self._mine, self._is_planned = set[WritePart](), False
        self._step: dict[str, int] = {}

    def watch(self, batch: Batch) -> None:
        """Digest the gradients and the samples of the step on `batch`, which comes next.

        Gathers the digest of a plan, the first time.
        """
        self._step = {}
        if not self._is_planned:
            self._planned()
        step = self.strategy.step
        if step.probe is None:
            step.probe = self
        if batch.sizes is not None:
            counts = step.parts.counts_samples
            numbers = batch.ids.astype(np.uint64) if counts else np.zeros(0, np.uint64)
            self._step["samples"] = int(keys_of(numbers, SAMPLES).sum(dtype=np.uint64))

    # --- as a probe -----------------------------------------------------------------------

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """The sum of the gradients of all ranks, before it is clipped. No communication.

        A rank adds up what it adds up of the weight, which is cut alike.
        """
        self.strategy.step.probe = None
        known: dict[str, Tensor] = {}
        for name, gradient in zip(names, tensors, strict=True):
            if gradient is not None:
                path = below(f"{self._prefix}/{WEIGHTS}", name)
                known[path] = self.strategy.layout.to_global(name, dense(gradient))
        parts = {part: t for part, t in local_parts(known).items() if part in self._mine}
        self._step["gradients"] = sum(part_digest(p, t) for p, t in parts.items()) & MASK

    # --- the digests ----------------------------------------------------------------------

    def digests(self, step: int) -> dict[str, str | None]:
        """The digests of the state after `step` steps, and of the step that was watched.

        Gathers the digest of a plan and a number for each kind.
        """
        strategy, sums = self.strategy, self._step
        strategy.step.probe = None if strategy.step.probe is self else strategy.step.probe
        named = strategy.model.named_buffers(remove_duplicate=False)
        buffers = {below(WEIGHTS, name) for name, _ in named}
        for part, tensor in self._planned().items():
            kind = _kind_of(part.path, buffers)
            sums[kind] = sums.get(kind, 0) + part_digest(part, tensor) & MASK
        self._step = {}
        totals: dict[str, int] = {}
        for of_rank in strategy.comm.gather_values(sums):
            for kind, number in of_rank.items():
                totals[kind] = totals.get(kind, 0) + number & MASK
        kinds = dict.fromkeys(("weights", "buffers", "optimizer", *totals, "gradients", "samples"))
        return {k: f"{totals[k]:016x}" if k in totals else None for k in kinds}

    @property
    def _prefix(self) -> str:
        """Of the paths of the state, as in a checkpoint."""
        strategy = self.strategy
        return "common" if strategy.agreement.is_one_training else f"own/{strategy.comm.rank}"

    def _planned(self) -> dict[WritePart, Tensor]:
        """The parts of the state that this rank adds up; every rank calls this.

        Raises `RequestError` on all ranks if one of them has something that no checkpoint can hold.
        """
        strategy, problem = self.strategy, ""
        tensors: dict[str, Tensor] = {}
        try:
            tensors = flatten(strategy.state(), self._prefix)[1]
            if strategy.has_own_state:
                tensors |= flatten(strategy.own_state(), f"own/{strategy.comm.rank}/{OWN}")[1]
            local_parts(tensors)
        except RequestError as error:
            problem = error.found
        if problems := [text for text in strategy.comm.gather_texts(problem) if text]:
            why = "digests are of what a checkpoint can hold"
            raise RequestError(
                asked="--digest-every", found=problems[0], why=why, do="--digest-every 0"
            )
        parts = self._planner.plan(0, tensors)[1]
        self._mine, self._is_planned = set(parts), True
        return parts


def _kind_of(path: str, buffers: set[str]) -> str:
    names = path.split("/")[1 if path.startswith("common/") else 2 :]
    if names[0] == OWN:
        return OWN
    if names[0] != WEIGHTS:
        return "optimizer"
    return "buffers" if "/".join(names) in buffers else "weights"
