"""TFRecord files as a stream: each record framed by its length and two checksums.

    uint64 length · uint32 masked CRC-32C of the length · bytes · uint32 masked CRC-32C of the bytes

All little-endian. Both checksums are checked for every record that is read. A record is bytes;
`example.parse_example` reads what is usually in them.
"""

from __future__ import annotations

import gzip
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from allranks.programs.readers.bad_record import BadRecord
from allranks.programs.readers.crc32c import masked_crc32c
from allranks.programs.readers.files import opened
from allranks.programs.readers.stream import FileStream, Record

HEAD = 12  # bytes: the length and its checksum
LONGEST = 2**31  # bytes of a record: a message of protobuf is shorter
REST = "nothing behind it in this file can be found"


class TFRecords(FileStream):
    """The records of TFRecord files, plain or packed (.gz), each as bytes for `decode`."""

    def records(self, path: str, part: int, parts: int) -> Iterator[Record]:
        with opened(path) as file:
            offset = 0
            for number in itertools.count():
                head = file.read(HEAD)
                if not head:
                    return
                length = _length(path, offset, head)
                if number % parts != part:
                    file.seek(length + 4, os.SEEK_CUR)
                else:
                    content = _content(path, offset, file, length)
                    if content is None:
                        problem = "they do not have the checksum that is stored with them"
                        bad = BadRecord(
                            path, f"byte {offset}", f"a record of {length} bytes: {problem}"
                        )
                        self.bad_records.pass_over(bad)
                    else:
                        yield Record(path, f"byte {offset}", content)
                offset += HEAD + length + 4


def write_tfrecords(path: str | Path, records: Iterable[bytes]) -> None:
    """Write a TFRecord file; a name that ends in .gz is packed."""
    packed = str(path).endswith(".gz")
    with gzip.open(path, "wb") if packed else open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + struct.pack("<I", masked_crc32c(length)))
            file.write(record + struct.pack("<I", masked_crc32c(record)))


def _length(path: str, offset: int, head: bytes) -> int:
    """The length that the head of a record tells."""
    if len(head) < HEAD:
        raise BadRecord(path, f"byte {offset}", "the file ends within the head of a record")
    length, checksum = struct.unpack("<QI", head)
    if masked_crc32c(head[:8]) != checksum or length >= LONGEST:
        problem = f"a length with a wrong checksum; {REST}"
        raise BadRecord(path, f"byte {offset}", problem)
    return int(length)


def _content(path: str, offset: int, file: IO[bytes], length: int) -> bytes | None:
    """The bytes of a record; `None` if they do not have their checksum."""
    body = file.read(length + 4)
    if len(body) < length + 4:
        problem = f"the file ends after {len(body)} of the {length + 4} bytes of a record"
        raise BadRecord(path, f"byte {offset}", problem)
    content = body[:length]
    return content if struct.unpack("<I", body[length:])[0] == masked_crc32c(content) else None
