"""A map-style data set in two stages, read and decode, in which good samples stand in for bad ones.

A reader adds `__len__`, `read_record` and `decode_record`. If a record turns out bad and the reader
was told to skip, the next good one by number (from the end, on to the start) takes its place: that
is a pure function of the files, so every rank sees the same samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from allranks.errors import RequestError
from allranks.programs.readers.bad_record import BadRecord, BadRecords, OnBadRecord


@dataclass(frozen=True)
class Raw:
    """A record as it lies on the disk, and the number of the sample that it is."""

    number: int
    record: Any


class Staged(ABC):
    """Samples by number, each read and then decoded; `bad_records` says what was passed over."""

    def __init__(self, on_bad_record: OnBadRecord = "stop") -> None:
        self.bad_records = BadRecords(on_bad_record)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read_record(self, number: int) -> Any:
        """The record of sample `number`, off the disk; raises `BadRecord`."""

    @abstractmethod
    def decode_record(self, number: int, record: Any, random: np.random.Generator | None) -> Any:
        """The sample that a record is; raises `BadRecord`."""

    def read(self, number: int) -> Raw:
        """The record of sample `number`, or of the next one that can be read."""
        for ahead in range(len(self)):
            at = (number + ahead) % len(self)
            try:
                return Raw(at, self.read_record(at))
            except BadRecord as error:
                self.bad_records.pass_over(error)
        raise self._nothing_good()

    def decode(self, raw: Raw, random: np.random.Generator | None) -> Any:
        """The sample that `raw` is, or the next one that can be decoded."""
        for _ in range(len(self)):
            try:
                return self.decode_record(raw.number, raw.record, random)
            except BadRecord as error:
                self.bad_records.pass_over(error)
                raw = self.read(raw.number + 1)
        raise self._nothing_good()

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.decode(self.read(number), None)

    def _nothing_good(self) -> RequestError:
        last = self.bad_records.listed[-1:]
        return RequestError(
            asked="to pass over bad records",
            found=f"{len(self)} samples, all of them bad" + "".join(f"; {e.found}" for e in last),
            why="there is no good sample that could stand in",
            do="look at the first of the records that were passed over",
        )
