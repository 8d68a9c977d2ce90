"""The handwritten digits as arrays: 1,797 images that come with scikit-learn, a fifth held out.

For the program of each engine, so that all hold out the same. The order was first drawn by
`torch.randperm`; it is drawn here without torch, from the same 32-bit numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

TRAINING = 1437  # 1437 = 5 * 256 + 157: the last batch of an epoch is uneven
SEED = 1797


def digits(part: slice) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images (n, 8, 8) in [0, 1] and labels (n,), in an order that mixes the writers."""
    images, labels = load_digits(return_X_y=True)
    chosen = _order(len(labels))[part]
    pictures = images.astype(np.float32).reshape(-1, 8, 8) / 16
    return pictures[chosen], labels.astype(np.int64)[chosen]


def _order(samples: int) -> NDArray[np.int64]:
    """A permutation: each place in turn is exchanged with one that comes no earlier."""
    draws = np.frombuffer(np.random.RandomState(SEED).bytes(4 * samples), "<u4")
    order = np.arange(samples)
    for place, draw in enumerate(draws[:-1].tolist()):
        other = place + draw % (samples - place)
        order[place], order[other] = order[other], order[place]
    return order
