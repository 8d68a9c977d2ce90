"""Writers of the formats that `allranks.programs.readers` reads: TFRecord, Example, IDX."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.programs.readers.arrays import TYPES
from allranks.programs.readers.tfrecord import BYTES, FLOATS, INTEGERS, LENGTH, masked_crc32c


def write_tfrecords(path: str | Path, records: Iterable[bytes]) -> None:
    """Write a TFRecord file; a name that ends in .gz is packed."""
    packed = str(path).endswith(".gz")
    with gzip.open(path, "wb") if packed else open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + struct.pack("<I", masked_crc32c(length)))
            file.write(record + struct.pack("<I", masked_crc32c(record)))


def make_example(features: Mapping[str, Sequence[bytes] | NDArray[np.generic]]) -> bytes:
    """A serialized Example of lists of bytes, and of arrays of floats or of whole numbers."""
    entries = b""
    for name, values in features.items():
        entry = _tagged(1, name.encode()) + _tagged(2, _encoded_feature(values))
        entries += _tagged(1, entry)
    return _tagged(1, entries)


def _encoded_feature(values: Sequence[bytes] | NDArray[np.generic]) -> bytes:
    if not isinstance(values, np.ndarray):
        return _tagged(BYTES, b"".join(_tagged(1, bytes(value)) for value in values))
    if values.dtype.kind == "f":
        return _tagged(FLOATS, _tagged(1, values.astype("<f4").tobytes()))
    numbers = (int(number) & 0xFFFFFFFFFFFFFFFF for number in values.astype(np.int64))
    return _tagged(INTEGERS, _tagged(1, b"".join(map(_encoded_varint, numbers))))


def _tagged(number: int, content: bytes) -> bytes:
    return _encoded_varint(number << 3 | LENGTH) + _encoded_varint(len(content)) + content


def _encoded_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def write_idx(path: str | Path, array: NDArray[Any]) -> None:
    """Write an array as IDX; a name that ends in .gz is packed. Of whole numbers u1, i1, i2, i4."""
    types = {np.dtype(kind).newbyteorder("="): number for number, kind in TYPES.items()}
    number = types[array.dtype.newbyteorder("=")]
    head = struct.pack(f">HBB{array.ndim}I", 0, number, array.ndim, *array.shape)
    content = head + array.astype(TYPES[number]).tobytes()
    Path(path).write_bytes(
        gzip.compress(content, mtime=0) if str(path).endswith(".gz") else content
    )
