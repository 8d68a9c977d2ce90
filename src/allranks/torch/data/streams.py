"""A streaming data set of Hugging Face, `datasets.IterableDataset`, as the streams of a job.

The data set is split by the shards of the global batch, never by ranks. So the order of the rows,
and which global batch has which row, are those of the data set and of `shards` in the task. A shard
reads whole files if their number is a multiple of `shards`; else each shard reads all files, and
takes every n-th row. `datasets` then keeps the place of each shard, which a checkpoint saves.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from copy import copy
from itertools import islice
from typing import Any

import numpy as np

from allranks.errors import RequestError

READS_AGAIN = (
    "shuffle() has a buffer, which no state of `datasets` has: a resume in mid-epoch reads the "
    "epoch from its start, and passes over what was read"
)


def is_data_stream(data: Any) -> bool:
    """Whether it is a `datasets.IterableDataset`; imports nothing."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, library.IterableDataset)


class DataStream:
    """A `datasets.IterableDataset` in `shards` parts; `note` tells what it costs.

    Raises `RequestError` for one that ranks have split, or whose shuffles have no seed.
    """

    skips = True

    def __init__(self, dataset: Any, shards: int) -> None:
        self.dataset, self.shards = dataset, shards
        _copied(dataset._ex_iterable, steps := list[Any]())
        self._is_buffered = any("BufferShuffled" in type(step).__name__ for step in steps)
        self._check(steps)
        notes = [READS_AGAIN] * self._is_buffered
        if dataset.num_shards % shards:
            notes.append(
                f"{dataset.num_shards} files for {shards} shards: each shard reads all files, and "
                f"takes every {shards}th row; a multiple of {shards} files is read once"
            )
        self.note = "; ".join(notes)

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[Any]:
        """The rows of a shard in an epoch, from `skip` on: shuffles have seeds of their own."""
        split = importlib.import_module("datasets.distributed").split_dataset_by_node
        dataset = copy(self.dataset)
        dataset._ex_iterable = _copied(dataset._ex_iterable, [])  # it notes its reader's place
        part = split(dataset, shard, self.shards)
        part.set_epoch(epoch)
        return islice(iter(part), skip, None) if self._is_buffered else PlacedRows(part, skip)

    def _check(self, steps: list[Any]) -> None:
        generators = [getattr(step, "generator", None) for step in steps]
        if self.dataset._distributed is not None:
            problem, do = "it is split by node already", "leave split_dataset_by_node out"
        elif any(_is_unseeded(g) for g in generators if isinstance(g, np.random.Generator)):
            problem = "shuffle() or interleave_datasets() without a seed"
            do = "shuffle(seed=0, …), interleave_datasets(…, seed=0)"
        else:
            return
        raise RequestError(
            asked="train_data: a datasets.IterableDataset",
            found=problem,
            why="the engine splits it by shards, and each rank and each resume reads one order",
            do=do,
        )


class PlacedRows:
    """The rows of a `datasets.IterableDataset`, with the place of the next one as its state."""

    def __init__(self, dataset: Any, skip: int) -> None:
        self._dataset = dataset
        self._rows = islice(iter(dataset), skip, None)  # reads nothing yet

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._rows)

    def state_dict(self) -> Any:
        return self._dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on at a place; to be called before the first row is read."""
        self._dataset.load_state_dict(state)


def _copied(step: Any, steps: list[Any]) -> Any:
    """A data set's shuffles, mixtures and filters, down to the files, which end up in `steps`."""
    step = copy(step)
    steps.append(step)
    if hasattr(step, "ex_iterable"):
        step.ex_iterable = _copied(step.ex_iterable, steps)
    if hasattr(step, "ex_iterables"):
        step.ex_iterables = [_copied(part, steps) for part in step.ex_iterables]
    return step


def _is_unseeded(generator: np.random.Generator) -> bool:
    entropy = getattr(generator.bit_generator.seed_seq, "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() > 64  # the system draws 128
