"""Readers of images that are stored as arrays: IDX, the format of MNIST, and CIFAR-10.

Network inputs are floats of mean 0 and deviation 1, per colour.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allranks.programs.readers.stream import (
    BadRecord,
    BadRecords,
    OnBadRecord,
    StagedReader,
    opened,
    require,
)
from allranks.programs.readers.tar_shards import Archive

Pixels = NDArray[np.float32]


def standardised(
    image: NDArray[np.uint8], mean: Sequence[float], deviation: Sequence[float]
) -> Pixels:
    """An image (colours, height, width); `mean` and `deviation` of its colours are from 0 to 1."""
    scale = np.divide(1 / 255, deviation).astype(np.float32)
    shift: Pixels = np.divide(mean, deviation).astype(np.float32)
    pixels: Pixels = np.multiply(image, scale[:, None, None], dtype=np.float32, order="C")
    pixels -= shift[:, None, None]
    return pixels


# --- idx -----------------------------------------------------------------------------------------
# IDX, the format of MNIST and Fashion-MNIST: a magic number, the dimensions, the values.
#
# The magic number is two zero bytes, a byte for the type of the values and one for the number of
# dimensions; each dimension follows in four bytes. All numbers are big-endian. LeCun, Cortes and
# Burges, "The MNIST database", the section on file formats.


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
        values = np.frombuffer(bytearray(content), dtype)
    elif dtype.itemsize == 1 and wanted:  # copied on writing: torch wants to write to it
        return np.memmap(path, dtype, "c", start, shape)
    else:
        values = np.fromfile(path, dtype, offset=start)
    return values.reshape(shape).astype(dtype.newbyteorder("="))


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


def _magic(path: str | Path, head: bytes) -> tuple[np.dtype[Any], int]:
    """The type of the values, and how many dimensions there are."""
    known = len(head) == 4 and head[:2] == b"\0\0" and head[2] in TYPES
    if not known or not 1 <= head[3] <= MOST_DIMENSIONS:
        problem = f"no IDX file: it starts with {head.hex(' ') or 'nothing'}"
        raise BadRecord(path, "byte 0", problem)
    return np.dtype(TYPES[head[2]]), head[3]


# --- cifar ---------------------------------------------------------------------------------------
# CIFAR-10, the binary version: records of a label and 3 × 32 × 32 bytes, colour by colour.
#
# From a folder of `data_batch_*.bin` and `test_batch.bin`, or from the archive that holds them.
# Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images".


CLASSES = 10
SHAPE = 3, 32, 32
RECORD_BYTES = 1 + 3 * 32 * 32
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images
TRAINING, TEST = "data_batch_*.bin", "test_batch.bin"
ARCHIVE = "cifar-10-binary.tar.gz"


class CifarImages(StagedReader):
    """The images, (3, 32, 32) float32 of mean 0 and deviation 1, with their labels.

    `path` is the folder or the .tar.gz. Plain files are mapped into memory, an archive is unpacked
    into it, 184 MB on each rank.
    """

    def __init__(
        self, path: str | Path, *, train: bool = True, on_bad_record: OnBadRecord = "stop"
    ) -> None:
        super().__init__(on_bad_record)
        pattern = TRAINING if train else TEST
        path = Path(path)
        contents = _in_folder(path, pattern) if path.is_dir() else _in_archive(path, pattern)
        self._files = [(name, self._records(name, content)) for name, content in contents]
        counts = [len(records) for _, records in self._files]
        self._starts = np.cumsum([0, *counts])
        if not len(self):
            require("the CIFAR-10 data set", [path / pattern], "fetch its binary version")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read_record(self, number: int) -> NDArray[np.uint8]:
        file = int(np.searchsorted(self._starts, number, "right")) - 1
        name, records = self._files[file]
        at = number - int(self._starts[file])
        record: NDArray[np.uint8] = records[at]
        if record[0] >= CLASSES:
            problem = f"label {record[0]}, of {CLASSES} classes"
            raise BadRecord(name, f"byte {at * RECORD_BYTES}", problem)
        return record.copy()  # reads the disk here, and not in decode

    def decode_record(
        self, number: int, record: NDArray[np.uint8], random: np.random.Generator | None
    ) -> tuple[Pixels, int]:
        return standardised(record[1:].reshape(SHAPE), MEAN, DEVIATION), int(record[0])

    def _records(self, name: str, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(records, 3073); an incomplete record at the end of a file is bad."""
        count, remainder = divmod(len(content), RECORD_BYTES)
        if remainder:
            problem = f"the file ends after {remainder} of the {RECORD_BYTES} bytes of a record"
            self.bad_records.pass_over(BadRecord(name, f"byte {count * RECORD_BYTES}", problem))
        return content[: count * RECORD_BYTES].reshape(count, RECORD_BYTES)


def _in_folder(folder: Path, pattern: str) -> list[tuple[str, NDArray[np.uint8]]]:
    contents = []
    for path in sorted(folder.glob(pattern)):
        filled = path.stat().st_size > 0  # an empty file cannot be mapped
        content = np.asarray(np.memmap(path, mode="r")) if filled else np.empty(0, np.uint8)
        contents.append((str(path), content))
    return contents


def _in_archive(path: Path, pattern: str) -> list[tuple[str, NDArray[np.uint8]]]:
    require("the CIFAR-10 data set", [path], "fetch its binary version")
    contents = []
    with opened(path) as file:
        archive = Archive(str(path), file)
        for member in archive.members():
            if Path(member.name).match(pattern):
                content = np.frombuffer(archive.content(member), np.uint8)
                contents.append((f"{path}, {member.name}", content))
    return sorted(contents, key=lambda pair: pair[0])
