"""TFRecord files as a stream: each record framed by its length and two checksums.

    uint64 length · uint32 masked CRC-32C of the length · bytes · uint32 masked CRC-32C of the bytes

All little-endian. Both checksums of every read record are verified. A record is bytes, usually an
Example, which `parse_example` reads.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np
from numpy.typing import NDArray

from allranks.catalog import load
from allranks.errors import RequestError
from allranks.programs.readers.stream import BadRecord, FileStream, Record, opened

# --- crc32c --------------------------------------------------------------------------------------
# CRC-32C (Castagnoli), the checksum of TFRecord: RFC 3720, appendix B.4; RFC 3385.
#
# The package google-crc32c computes it, with the instruction that processors have for it.


def masked_crc32c(data: bytes) -> int:
    """The masked checksum that TFRecord stores: CRCs of data with CRCs inside are weak."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _of_the_package() -> Callable[[bytes], int]:
    """The package's function; raises `RequestError` if it is not installed."""
    try:
        function: Callable[[bytes], int] = load("google_crc32c:value")
    except ModuleNotFoundError:
        raise RequestError(
            asked="to read or write TFRecord files",
            found="no package google_crc32c in this Python",
            why="it computes the two checksums that each record has",
            do="pip install 'allranks[tfrecord]'",
        ) from None
    return function


crc32c = _of_the_package()
"""The checksum of the bytes, without a mask."""


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


def _length(path: str, offset: int, head: bytes) -> int:
    """The length in the head of a record; raises `BadRecord`."""
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


# --- example -------------------------------------------------------------------------------------
# `tf.train.Example`, what most TFRecord files hold: a mapping from names to lists, as protobuf.
#
#     Example      { Features features = 1; }
#     Features     { map<string, Feature> feature = 1; }       an entry is { key = 1; value = 2; }
#     Feature      { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
#     …List        { repeated value = 1; }                      numbers are packed, or one by one
#
# Only the wire format, by hand; neither protobuf nor TensorFlow is needed. Unknown fields are
# skipped, as the format requires. protobuf.dev, "Encoding".


VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types
BYTES, FLOATS, INTEGERS = 1, 2, 3  # fields of Feature

Values = list[bytes] | NDArray[np.float32] | NDArray[np.int64]


def parse_example(data: bytes | memoryview) -> dict[str, Values]:
    """The features of a serialized Example; raises ValueError if it is none.

    Bytes come as a list, floats as float32 and integers as int64 arrays; a feature with no list
    at all is an empty list.
    """
    parsed: dict[str, Values] = {}
    for features in _messages(memoryview(data), 1):
        for entry in _messages(features, 1):
            key, value = b"", memoryview(b"")
            for number, _, content in _fields(entry):
                if number == 1 and isinstance(content, memoryview):
                    key = bytes(content)
                elif number == 2 and isinstance(content, memoryview):
                    value = content
            parsed[key.decode()] = _feature(value)
    return parsed


def _feature(data: memoryview) -> Values:
    """The list of a Feature. The last of several kinds counts; lists of one kind are joined."""
    kind, items = BYTES, list[tuple[int, int | memoryview]]()
    for number, wire, content in _fields(data):
        if number not in (BYTES, FLOATS, INTEGERS) or wire != LENGTH:
            continue
        assert isinstance(content, memoryview)
        if number != kind:
            kind, items = number, []
        items += [(inner, value) for n, inner, value in _fields(content) if n == 1]
    if kind == BYTES:
        return [bytes(value) for wire, value in items if isinstance(value, memoryview)]
    return _floats(items) if kind == FLOATS else _integers(items)


def _floats(items: list[tuple[int, int | memoryview]]) -> NDArray[np.float32]:
    parts = [bytes(value) for wire, value in items if isinstance(value, memoryview)]
    if any(len(part) % 4 for part in parts):
        raise ValueError("a list of floats is cut short")
    return np.frombuffer(b"".join(parts), "<f4").astype(np.float32)


def _integers(items: list[tuple[int, int | memoryview]]) -> NDArray[np.int64]:
    values: list[int] = []
    for wire, value in items:
        if isinstance(value, int):
            values.append(value)
        elif wire == LENGTH:
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                values.append(number)
    return np.array(values, np.uint64).view(np.int64)


def _messages(data: memoryview, wanted: int) -> Iterator[memoryview]:
    """The contents of every field `wanted` that is a message."""
    for number, _, content in _fields(data):
        if number == wanted and isinstance(content, memoryview):
            yield content


def _fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """(number, wire type, content) of each field; raises ValueError for invalid data."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise ValueError(f"a field with the number 0 before byte {at}")
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        if wire not in (FIXED64, LENGTH, FIXED32):
            raise ValueError(f"a field of wire type {wire} before byte {at}")
        size = {FIXED64: 8, FIXED32: 4}.get(wire, 0)
        if wire == LENGTH:
            size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes, of which {len(data) - at} are there")
        yield number, wire, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number of up to 64 bits at `at`, and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise ValueError(f"a number without end at byte {at}")
