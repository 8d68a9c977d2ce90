"""One JPEG or PNG: from its bytes to what a network for ImageNet is fed with. Needs Pillow.

For training a random part of the image, scaled to the size and mirrored half of the time; for
evaluation the centre. Szegedy et al. 2014, arXiv 1409.4842 (the random part); Goyal et al. 2017,
arXiv 1706.02677, section 5.1. Pillow lets other threads run while it decodes and scales.
"""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image

from allranks.programs.readers.pixels import Pixels, standardised

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
    left, upper = (image.width - side) / 2, (image.height - side) / 2
    return _scaled(image, (left, upper, left + side, upper + side), size)


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
            left = int(random.integers(width - wide + 1))
            upper = int(random.integers(height - high + 1))
            return left, upper, left + wide, upper + high
    wide = min(width, round(height * ASPECT[1])) or 1
    high = min(height, round(width / ASPECT[0])) or 1
    left, upper = (width - wide) // 2, (height - high) // 2
    return left, upper, left + wide, upper + high


def _scaled(image: Image.Image, box: Box, size: int) -> Image.Image:
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)
