"""A stream over files of records: which slice of the global batch reads which files, in what order.

Nobody communicates: files are dealt to the shards of a task by a pure function of (seed, epoch),
and inside a file the order is kept, but for an optional buffer from which the next record is drawn
at random, keyed by (seed, epoch, shard). A stream is opened anew each epoch and after each stop;
what a stopped job had read is read again and thrown away.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from allranks.errors import RequestError
from allranks.programs.readers.bad_record import BadRecord, BadRecords, OnBadRecord
from allranks.programs.readers.files import require
from allranks.training.order import random_key


@dataclass(frozen=True)
class Record:
    """One record, checked but not decoded, and where it lies."""

    file: str
    place: str
    content: Any


class FileStream(ABC):
    """The records of `files`, for a task of `shards` slices; `decode` makes a sample of each.

    Every record is in one shard, once an epoch. Whole files are dealt out, so shards are equally
    long if their number divides that of the files; of fewer files than shards each is cut into
    parts (every n-th record), and all shards get as many. `decode` raises ValueError or
    LookupError for a record that is bad. A `buffer` of n records is kept in memory by each shard.
    """

    def __init__(
        self,
        files: Iterable[str | Path],
        shards: int,
        decode: Callable[[Any], Any],
        *,
        shuffle: bool = True,
        buffer: int = 0,
        on_bad_record: OnBadRecord = "stop",
    ) -> None:
        self.files = sorted(str(path) for path in files)
        self.shards, self.decode_record = shards, decode
        self.shuffle, self.buffer = shuffle, buffer
        self.bad_records = BadRecords(on_bad_record)
        if not self.files:
            raise RequestError(
                asked=f"{type(self).__name__} over files",
                found="no file",
                why="there is nothing to learn from",
                do="check the pattern that the names come from",
            )
        do = "check the names; every rank reads the files itself"
        require(f"{type(self).__name__} over files", [Path(path) for path in self.files], do)

    @abstractmethod
    def records(self, path: str, part: int, parts: int) -> Iterator[Record]:
        """Every record of a file whose number is `part` modulo `parts`, in order.

        Gives single bad records to `self.bad_records`; raises `BadRecord` where the rest of the
        file cannot be read either.
        """

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[Any]:
        """The samples of one shard in one epoch, from number `skip` on."""
        if not 0 <= shard < self.shards:
            raise RequestError(
                asked=f"slice {shard} of {type(self).__name__}",
                found=f"it was made for shards = {self.shards}",
                why="it deals its files to the slices of the task, so it has to know how many",
                do=f"{type(self).__name__}(files, shards=self.shards, …) in train_data()",
            )
        records = self._drawn(self._dealt(shard, epoch, seed), random_key(seed, epoch, shard))
        if self.bad_records.policy == "stop":  # all are good, so what is skipped is not decoded
            return self._decoded(islice(records, skip, None))
        return islice(self._decoded(records), skip, None)

    def _dealt(self, shard: int, epoch: int, seed: int) -> Iterator[Record]:
        """The records of the files that this shard reads in this epoch."""
        files = len(self.files)
        parts = 1 if files >= self.shards else self.shards // math.gcd(files, self.shards)
        units = [(path, part) for path in self.files for part in range(parts)]
        order = np.arange(len(units))
        if self.shuffle:
            generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
            order = generator.permutation(len(units))
        for number in order[shard :: self.shards]:
            path, part = units[number]
            try:
                yield from self.records(path, part, parts)
            except BadRecord as error:
                self.bad_records.pass_over(error)

    def _drawn(self, records: Iterator[Record], key: int) -> Iterator[Record]:
        """The records in the order of a buffer from which each next one is drawn."""
        if not self.buffer:
            yield from records
            return
        generator = np.random.Generator(np.random.Philox(key))
        held = list(islice(records, self.buffer))
        for record in records:
            drawn = int(generator.integers(len(held)))
            out, held[drawn] = held[drawn], record
            yield out
        for number in generator.permutation(len(held)):
            yield held[number]

    def _decoded(self, records: Iterable[Record]) -> Iterator[Any]:
        for record in records:
            try:
                sample = self.decode_record(record.content)
            except (ValueError, LookupError) as error:
                problem = f"{type(error).__name__}: {error}"
                bad = BadRecord(record.file, record.place, problem)
                bad.__cause__ = error
                self.bad_records.pass_over(bad)
                continue
            yield sample
