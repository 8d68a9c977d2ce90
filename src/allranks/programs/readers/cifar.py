"""CIFAR-10, the binary version: records of a label and 3 × 32 × 32 bytes, colour by colour.

From a folder of `data_batch_*.bin` and `test_batch.bin`, or from the archive that holds them.
Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images".
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from allranks.programs.readers.images import Pixels, standardised
from allranks.programs.readers.stream import BadRecord, OnBadRecord, StagedReader, opened, require
from allranks.programs.readers.tar_shards import Archive

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
