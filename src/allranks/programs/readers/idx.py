"""IDX, the format of MNIST and Fashion-MNIST: a magic number, the dimensions, the values.

The magic number is two zero bytes, a byte for the type of the values and one for the number of
dimensions; each dimension follows in four bytes. All numbers are big-endian. LeCun, Cortes and
Burges, "The MNIST database", the section on file formats.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.programs.readers.bad_record import BadRecord, BadRecords, OnBadRecord
from allranks.programs.readers.files import opened

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MOST_DIMENSIONS = 64  # that NumPy takes


def read_idx(path: str | Path) -> NDArray[Any]:
    """The array in a file, packed (.gz) or plain; raises `BadRecord`.

    Plain files of bytes are mapped into memory, so the ranks of a machine share one copy.
    """
    packed = str(path).endswith(".gz")
    with opened(path) as file:
        head = file.read(4)
        dtype, dimensions = _magic(path, head)
        head = file.read(4 * dimensions)
        if len(head) < 4 * dimensions:
            raise BadRecord(path, f"byte {4 + len(head)}", "the file ends within its dimensions")
        shape = struct.unpack(f">{dimensions}I", head)
        start, wanted = 4 + 4 * dimensions, math.prod(shape) * dtype.itemsize
        content = file.read() if packed else b""
        size = len(content) if packed else Path(path).stat().st_size - start
    if size != wanted:
        problem = f"{size} bytes of values where the header, {shape}, promises {wanted}"
        raise BadRecord(path, f"byte {start + min(size, wanted)}", problem)
    if packed:
        return np.frombuffer(bytearray(content), dtype).reshape(shape).astype(_native(dtype))
    if dtype.itemsize == 1 and wanted:  # copied on writing: torch wants arrays that can be written
        return np.memmap(path, dtype, "c", start, shape)
    return np.fromfile(path, dtype, offset=start).reshape(shape).astype(_native(dtype))


def read_labelled(
    images: Path, labels: Path, classes: int, on_bad_record: OnBadRecord
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, height, width) and their labels (n,), each of which is a class."""
    pixels, numbers = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise BadRecord(images, "byte 2", f"{pixels.dtype} in shape {pixels.shape}, no images")
    if numbers.shape != pixels.shape[:1]:
        raise BadRecord(labels, "byte 3", f"shape {numbers.shape} for {len(pixels)} images")
    known = (numbers >= 0) & (numbers < classes)
    bad_records = BadRecords(on_bad_record)
    for number in np.flatnonzero(~known):
        problem = f"label {numbers[number]}, of {classes} classes"
        place = f"byte {8 + number * numbers.itemsize}"
        bad_records.pass_over(BadRecord(labels, place, problem))
    if not known.all():
        pixels, numbers = pixels[known], numbers[known]
    return pixels, numbers.astype(np.int64)


def write_idx(path: str | Path, array: NDArray[Any]) -> None:
    """Write an array as IDX; a name that ends in .gz is packed. Of whole numbers u1, i1, i2, i4."""
    types = {np.dtype(kind).newbyteorder("="): number for number, kind in TYPES.items()}
    number = types[array.dtype.newbyteorder("=")]
    head = struct.pack(f">HBB{array.ndim}I", 0, number, array.ndim, *array.shape)
    content = head + array.astype(TYPES[number]).tobytes()
    Path(path).write_bytes(
        gzip.compress(content, mtime=0) if str(path).endswith(".gz") else content
    )


def _magic(path: str | Path, head: bytes) -> tuple[np.dtype[Any], int]:
    """The type of the values, and how many dimensions there are."""
    known = len(head) == 4 and head[:2] == b"\0\0" and head[2] in TYPES
    if not known or not 1 <= head[3] <= MOST_DIMENSIONS:
        problem = f"no IDX file: it starts with {head.hex(' ') or 'nothing'}"
        raise BadRecord(path, "byte 0", problem)
    return np.dtype(TYPES[head[2]]), head[3]


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")
