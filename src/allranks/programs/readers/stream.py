"""Streams over files of records: each shard of the global batch reads its files in a fixed order.

Ranks do not communicate: a pure function of (seed, epoch) assigns files to the shards of a task.
Records keep their order within a file, or an optional buffer shuffles them, keyed by (seed, epoch,
shard). A stream is opened in each epoch and after each resume; a resumed job reads the records
before its position again, and discards them.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import io
import math
import os
import sys
import urllib.error
import urllib.request
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np

from allranks.checkpoint.files import fsync_folder
from allranks.errors import RequestError
from allranks.training.order import random_key

# --- bad record ----------------------------------------------------------------------------------
# A record that violates its format: its file, its place, and the policy.
#
# Every reader raises `BadRecord`, which ends the job. With the policy "skip" it passes the record
# to `BadRecords`, which counts it and writes one line to stderr, the log of the rank.


OnBadRecord = Literal["stop", "skip"]
LISTED = 100  # bad records that are listed and logged; more are only counted


class BadRecord(RequestError):
    """The record at `place` of `file` ("byte 1234", "member 7.jpg at byte 512") has a `problem`."""

    def __init__(self, file: str | Path, place: str, problem: str) -> None:
        self.file, self.place, self.problem = str(file), place, problem
        super().__init__(
            asked="to read the next record of the data",
            found=f"{file}, {place}: {problem}",
            why="it violates its format, so training on it would be arbitrary",
            do='mend the file or fetch it again; on_bad_record="skip" passes over such records',
        )
        self.args = (self.file, place, problem)  # so that it can be pickled


class BadRecords:
    """The policy for bad records: raise them, or skip and count them.

    `count` is the number of different ones skipped in this process, `listed` the first hundred.
    Several threads may use it at once.
    """

    def __init__(self, policy: OnBadRecord) -> None:
        if policy not in ("stop", "skip"):
            raise RequestError(
                asked=f"on_bad_record = {policy!r}",
                found=repr(policy),
                why="a bad record ends the job, or is passed over and counted",
                do='on_bad_record="stop" or on_bad_record="skip"',
            )
        self.policy = policy
        self.listed: list[BadRecord] = []
        self._known: dict[tuple[str, str], BadRecord] = {}

    @property
    def count(self) -> int:
        return len(self._known)

    def pass_over(self, error: BadRecord) -> None:
        """Raise `error`, or note it once."""
        if self.policy == "stop":
            raise error
        noted = BadRecord(error.file, error.place, error.problem)  # the error holds its traceback
        if self._known.setdefault((error.file, error.place), noted) is not noted:
            return
        if len(self.listed) < LISTED:
            self.listed.append(noted)
            print(f"bad record passed over: {error.found}", file=sys.stderr, flush=True)


# --- files ---------------------------------------------------------------------------------------
# Opens data files, plain or with gzip (by the name `.gz`), and locates damage.


class _Unpacked(gzip.GzipFile):
    """A gzip file that reports where it is damaged; places count unpacked bytes."""

    def read(self, size: int | None = -1) -> bytes:
        return cast(bytes, self._at(super().read, size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return cast(int, self._at(super().seek, offset, whence))

    def _at(self, act: object, *arguments: int | None) -> object:
        try:
            return act(*arguments)  # type: ignore[operator]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            problem = f"it cannot be unpacked further: {error}"
            raise BadRecord(str(self.name), f"unpacked byte {self.tell()}", problem) from error


def opened(path: str | Path) -> IO[bytes]:
    """The file, opened for reading; a gzip file is unpacked while reading."""
    if str(path).endswith((".gz", ".tgz")):
        return cast(IO[bytes], _Unpacked(path))
    return open(path, "rb")


def require(request: str, files: list[Path], do: str) -> None:
    """Raise `RequestError` with the missing files, if any."""
    missing = [str(path) for path in files if not path.exists()]
    if missing:
        raise RequestError(
            asked=request,
            found=f"no {', no '.join(missing[:8])}" + (" …" if len(missing) > 8 else ""),
            why="these files are read by the training, on every rank",
            do=do,
        )


@dataclass(frozen=True)
class Record:
    """One record, checked but not decoded, and where it lies."""

    file: str
    place: str
    content: Any


class FileStream(ABC):
    """The records of `files`, for a task of `shards` shards; `decode` turns each into a sample.

    Every record is in one shard, once per epoch. Whole files are assigned, so shards are equally
    long if their number divides that of the files. With fewer files than shards, each file is cut
    into parts (every n-th record), equally many for all shards. `decode` raises ValueError or
    LookupError for a bad record. Each shard keeps a `buffer` of n records in memory.
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

        Passes single bad records to `self.bad_records`; raises `BadRecord` if the remaining file
        is unreadable.
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
        if self.bad_records.policy == "stop":  # all are good, so skipped ones need no decoding
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
        """The records, shuffled by drawing each from a buffer."""
        if not self.buffer:
            yield from records
            return
        generator = np.random.Generator(np.random.Philox(key))
        waiting = list(islice(records, self.buffer))
        for record in records:
            drawn = int(generator.integers(len(waiting)))
            out, waiting[drawn] = waiting[drawn], record
            yield out
        for number in generator.permutation(len(waiting)):
            yield waiting[number]

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


# --- staged --------------------------------------------------------------------------------------
# A map-style data set in two stages, read and decode, which replaces bad samples by good ones.
#
# A reader adds `__len__`, `read_record` and `decode_record`. With the policy "skip", the next good
# record by number (after the last comes the first) replaces a bad one: a pure function of the
# files, so every rank sees the same samples.


@dataclass(frozen=True)
class Raw:
    """A record as stored on disk, and the number of its sample."""

    number: int
    record: Any


class StagedReader(ABC):
    """Samples by number, each read and then decoded; `bad_records` lists skipped records."""

    def __init__(self, on_bad_record: OnBadRecord = "stop") -> None:
        self.bad_records = BadRecords(on_bad_record)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read_record(self, number: int) -> Any:
        """Read the record of sample `number` from disk; raises `BadRecord`."""

    @abstractmethod
    def decode_record(self, number: int, record: Any, random: np.random.Generator | None) -> Any:
        """Decode a record into a sample; raises `BadRecord`."""

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
        """The sample of `raw`, or the next one that can be decoded."""
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


# --- download ------------------------------------------------------------------------------------
# The files of a data set, downloaded once per node: the first process downloads, others wait.
#
# A file is written under another name, its digest is checked, and then it is renamed. So a file
# with its final name is complete, even after a kill. Digests of files that a user copied there are
# checked too.


BLOCK_BYTES = 1 << 20
SILENCE_S = 60.0  # after which a server is taken for dead
LOCK = ".fetch.lock"


@dataclass(frozen=True)
class Remote:
    """A file at `url`; `digest` is "sha256:…" or "md5:…", over its bytes."""

    url: str
    digest: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def fetch(files: Sequence[Remote], folder: str | Path) -> list[Path]:
    """The paths of all files in `folder`; missing ones are downloaded first.

    Raises `RequestError` if a download fails, or a digest differs.
    """
    folder = Path(folder)
    if not all((folder / file.name).exists() for file in files):
        with _alone_on_this_node(folder):
            for file in files:
                if not (folder / file.name).exists():
                    _download(file, folder, files)
    for file in files:
        _check(file, _digest(file, folder / file.name), folder)
    return [folder / file.name for file in files]


@contextmanager
def _alone_on_this_node(folder: Path) -> Iterator[None]:
    """Lock this folder, so that one process downloads; a process that ends releases it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "wb")
    except OSError as error:
        raise RequestError(
            asked=f"to fetch data into {folder}",
            found=str(error),
            why="files of the data set are missing there, and it cannot be written to",
            do="--set data=… names a folder that has them, or that can be written to",
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(file: Remote, folder: Path, files: Sequence[Remote]) -> None:
    print(f"fetching {file.url} into {folder}", file=sys.stderr, flush=True)
    partial = folder / f".{file.name}.part"
    try:
        _copy(file.url, partial)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        partial.unlink(missing_ok=True)
        names = ", ".join(f"{other.name} ({other.digest})" for other in files)
        raise RequestError(
            asked=f"to fetch {file.url}",
            found=f"{type(error).__name__}: {error}",
            why=f"the data set is not whole without it, and {folder} does not have it",
            do=f"try again, or put these files into {folder}: {names}",
        ) from error
    try:
        _check(file, _digest(file, partial), folder)
    except RequestError:
        partial.unlink()
        raise
    partial.rename(folder / file.name)
    fsync_folder(folder)


def _copy(url: str, path: Path) -> None:
    """Download `url` to a file and fsync it."""
    request = urllib.request.Request(url, headers={"User-Agent": "allranks"})
    with urllib.request.urlopen(request, timeout=SILENCE_S) as source, open(path, "wb") as target:
        while block := source.read(BLOCK_BYTES):
            target.write(block)
        target.flush()
        os.fsync(target.fileno())


def _digest(file: Remote, path: Path) -> str:
    kind = file.digest.partition(":")[0]
    with open(path, "rb") as content:  # against damage, not against an attacker
        digest = hashlib.file_digest(content, lambda: hashlib.new(kind, usedforsecurity=False))
    return digest.hexdigest()


def _check(file: Remote, actual: str, folder: Path) -> None:
    kind, _, expected = file.digest.partition(":")
    if actual != expected:
        raise RequestError(
            asked=f"{file.name} with {kind} {expected}",
            found=f"{kind} {actual}",
            why="it was cut short, changed, or is another file of that name",
            do=f"remove {folder / file.name} if it is there, and try again; it is from {file.url}",
        )
