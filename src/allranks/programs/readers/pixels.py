"""Pixels as a network wants them: floats of mean 0 and deviation 1, colour by colour."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.float32]


def standardised(
    image: NDArray[np.uint8], mean: Sequence[float], deviation: Sequence[float]
) -> Pixels:
    """An image (colours, height, width); `mean` and `deviation` of its colours are from 0 to 1."""
    scale = np.divide(1 / 255, deviation).astype(np.float32)
    shift: Pixels = np.divide(mean, deviation).astype(np.float32)
    found: Pixels = np.multiply(image, scale[:, None, None], dtype=np.float32, order="C")
    found -= shift[:, None, None]
    return found
