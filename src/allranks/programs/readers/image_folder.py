"""A folder with a folder of JPEG or PNG files for each class, the layout of ImageNet.

Classes are numbered in the sorted order of their folders, samples in that of classes and files, so
the numbers are the same on every machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from allranks.errors import RequestError
from allranks.programs.readers.bad_record import BadRecord, OnBadRecord
from allranks.programs.readers.files import require
from allranks.programs.readers.images import centre_view, decoded, normalised, training_view
from allranks.programs.readers.pixels import Pixels
from allranks.programs.readers.staged import Staged

ENDINGS = (".jpg", ".jpeg", ".png")


class ImageFolder(Staged):
    """Images, (3, size, size) float32 of mean 0 and deviation 1, with the number of their class.

    Decoded with a generator a sample is a random view for training, without one the centre.
    """

    def __init__(
        self, folder: str | Path, size: int = 224, *, on_bad_record: OnBadRecord = "stop"
    ) -> None:
        super().__init__(on_bad_record)
        self.folder, self.size = Path(folder), size
        require("a folder of images", [self.folder], "put a folder for each class there")
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        names: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            files = _images_below(os.path.join(folder, name))
            names += (os.fsencode(os.path.relpath(path, folder)) for path in files)
            labels += [label] * len(files)
            if not files:
                raise self._no_image(name)
        if not names:
            raise self._no_image(".")
        self._names = np.array(names)  # one block of memory: processes that are forked share it
        self._labels: NDArray[np.int32] = np.array(labels, np.int32)

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, number: int) -> str:
        """The file of a sample."""
        return os.path.join(self.folder, os.fsdecode(self._names[number]))

    def read_record(self, number: int) -> bytes:
        path = self.path(number)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise BadRecord(path, "byte 0", f"cannot be read: {error.strerror}") from error

    def decode_record(
        self, number: int, record: bytes, random: np.random.Generator | None
    ) -> tuple[Pixels, int]:
        try:
            image = decoded(record)
        except ValueError as error:
            place = f"bytes 0 to {len(record)}"
            raise BadRecord(self.path(number), place, str(error)) from error
        if random is None:
            view = centre_view(image, self.size)
        else:
            view = training_view(image, self.size, random)
        return normalised(view), int(self._labels[number])

    def _no_image(self, name: str) -> RequestError:
        return RequestError(
            asked=f"a folder of images, {self.folder}",
            found=f"no file {', '.join(f'*{ending}' for ending in ENDINGS)} in {name}",
            why="every folder in it is a class, and a class has images",
            do="put images there, or take the folder away",
        )


def _images_below(folder: str) -> list[str]:
    """All images in a folder and below it, sorted."""
    found = []
    for parent, _, files in os.walk(folder, followlinks=True):
        found += [os.path.join(parent, f) for f in files if f.lower().endswith(ENDINGS)]
    return sorted(found)
