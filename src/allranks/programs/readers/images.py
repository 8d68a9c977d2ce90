"""Turns the bytes of a JPEG or PNG into the input of an ImageNet network. Needs Pillow.

For training a random part of the image, scaled to the size and mirrored half of the time; for
evaluation the centre. Szegedy et al. 2014, arXiv 1409.4842 (the random part); Goyal et al. 2017,
arXiv 1706.02677, section 5.1. Pillow lets other threads run while it decodes and scales.
"""

from __future__ import annotations

import io
import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from allranks.errors import RequestError
from allranks.programs.readers.arrays import Pixels, standardised
from allranks.programs.readers.stream import (
    BadRecord,
    OnBadRecord,
    StagedReader,
    require,
)

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images
AREA = 0.08, 1.0  # of the image, that the random part covers
ASPECT = 3 / 4, 4 / 3
TRIES = 10
CENTRE = 224 / 256  # of the shorter side: the published crop of 224 from 256

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels


def decoded(content: bytes) -> Image.Image:
    """The image in red, green and blue; raises ValueError if it cannot be decoded whole."""
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(str(error).replace(" <_io.BytesIO", " <bytes")) from error


def training_view(image: Image.Image, size: int, random: np.random.Generator) -> Image.Image:
    """A random part of the image, scaled to `size` by `size`, mirrored half of the time."""
    view = _scaled(image, random_box(image.width, image.height, random), size)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else view


def centre_view(image: Image.Image, size: int) -> Image.Image:
    """The middle of the image, 7/8 of its shorter side, scaled to `size` by `size`."""
    side = min(image.width, image.height) * CENTRE
    x, upper = (image.width - side) / 2, (image.height - side) / 2
    return _scaled(image, (x, upper, x + side, upper + side), size)


def normalised(image: Image.Image) -> Pixels:
    """(3, height, width), each colour with mean 0 and deviation 1 over ImageNet."""
    return standardised(np.asarray(image).transpose(2, 0, 1), MEAN, DEVIATION)


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """A part of 8 % to 100 % of the area and of sides 3:4 to 4:3; the middle if none fits."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            x = int(random.integers(width - wide + 1))
            upper = int(random.integers(height - high + 1))
            return x, upper, x + wide, upper + high
    wide = min(width, round(height * ASPECT[1])) or 1
    high = min(height, round(width / ASPECT[0])) or 1
    x, upper = (width - wide) // 2, (height - high) // 2
    return x, upper, x + wide, upper + high


def _scaled(image: Image.Image, box: Box, size: int) -> Image.Image:
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


# --- image folder --------------------------------------------------------------------------------
# A folder with a folder of JPEG or PNG files for each class, the layout of ImageNet.
#
# Classes are numbered in the sorted order of their folders, samples in that of classes and files,
# so the numbers are the same on every machine.


ENDINGS = (".jpg", ".jpeg", ".png")


class ImageFolder(StagedReader):
    """Images, (3, size, size) float32 of mean 0 and deviation 1, with the number of their class.

    Decoding with a generator gives a random view for training, without one the centre.
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
        self._names = np.array(names)  # one block of memory, which forked processes share
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
    paths = []
    for parent, _, files in os.walk(folder, followlinks=True):
        paths += [os.path.join(parent, f) for f in files if f.lower().endswith(ENDINGS)]
    return sorted(paths)
