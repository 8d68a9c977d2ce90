"""Tar shards as a stream: neighbouring members that differ only in their ending are one sample.

    0001.jpg 0001.cls 0002.jpg 0002.cls  ->  {"__key__": "0001", "jpg": bytes, "cls": bytes}, …

The layout of WebDataset: the name ends at the first dot after the last slash, and the ending, in
lower case, is the key; members without an ending are ignored. Tar has a checksum for the head of a
member and none for its bytes.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import IO, Any, cast

from allranks.programs.readers.stream import BadRecord, FileStream, Record, opened

NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.S)
END = bytes(tarfile.BLOCKSIZE)


class TarShards(FileStream):
    """The samples of tar files (plain, or packed: .gz, .tgz), each a dict of bytes for `decode`."""

    def records(self, path: str, part: int, parts: int) -> Iterator[Record]:
        with opened(path) as file:
            archive = Archive(path, file)
            members = (member for member in archive.members() if NAME.fullmatch(member.name))
            known: set[str] = set()
            for number, (base, group) in enumerate(groupby(members, lambda m: _split(m)[0])):
                again = base in known
                known.add(base)
                if number % parts != part:
                    continue
                try:
                    yield _sample(archive, base, group, again)
                except BadRecord as error:
                    self.bad_records.pass_over(error)


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    """The name up to its ending, and the ending."""
    match = NAME.fullmatch(member.name)
    assert match is not None, member.name
    return match[1], match[2].lower()


def _sample(archive: Archive, base: str, members: Iterable[tarfile.TarInfo], again: bool) -> Record:
    content: dict[str, Any] = {"__key__": base}
    offset = 0
    for member in members:
        _, ending = _split(member)
        if again or ending in content:
            problem = "members apart from each other" if again else f"two members .{ending}"
            raise archive.bad(member, f"sample {base} has {problem}")
        offset = offset or member.offset
        content[ending] = archive.content(member)
    return Record(archive.path, f"sample {base} at byte {offset}", content)


class Archive:
    """The members of a tar file from its start to its end, and their bytes; raises `BadRecord`.

    Python's `tarfile` treats a damaged head as the end of the archive. A real end is a block of
    zeros, so the last block that was read must be zeros.
    """

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self.path, self._file = path, _Remembering(file)
        try:
            self._tar = tarfile.open(fileobj=cast(IO[bytes], self._file), mode="r:")
        except tarfile.TarError as error:
            raise BadRecord(path, "byte 0", f"no tar file: {error}") from error

    def members(self) -> Iterator[tarfile.TarInfo]:
        """Every regular file in it. Nothing else may read the archive meanwhile."""
        while (member := self._next()) is not None:
            if member.isreg():
                yield member
        if self._file.last != END:
            problem = "neither a member nor the end of the archive: it is damaged or cut short"
            raise BadRecord(self.path, f"byte {self._tar.offset}", problem)
        while self._file.read(tarfile.RECORDSIZE):  # the checksum of gzip is at its end
            pass

    def content(self, member: tarfile.TarInfo) -> bytes:
        """The bytes of a member; call it before reading the next member."""
        file = self._tar.extractfile(member)
        assert file is not None, member.name
        try:
            content: bytes = file.read()
            return content
        except tarfile.TarError as error:
            raise self.bad(member, str(error)) from error

    def bad(self, member: tarfile.TarInfo, problem: str) -> BadRecord:
        return BadRecord(self.path, f"member {member.name} at byte {member.offset}", problem)

    def _next(self) -> tarfile.TarInfo | None:
        try:
            member: tarfile.TarInfo | None = self._tar.next()
            return member
        except (tarfile.TarError, ValueError) as error:
            raise BadRecord(self.path, f"byte {self._tar.offset}", str(error)) from error


class _Remembering:
    """A file that keeps the last bytes that were read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.last = file, b""
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        self.last = self._file.read(size)
        return self.last
