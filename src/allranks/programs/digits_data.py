"""The handwritten digits as arrays: 1,797 images that come with scikit-learn, a fifth held out.

For the program of each engine, so that all hold out the same. The order was first drawn by
`torch.randperm`; it is drawn here without torch, from the same 32-bit numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TRAINING = 1437  # 1437 = 5 * 256 + 157: the last batch of an epoch is uneven
SEED = 1797
TABLE = Path("datasets", "data", "digits.csv.gz")  # a row: 64 pixels of 0 to 16, the label


@dataclass(kw_only=True)
class DigitsFields:
    """The hyper-parameters of the program of each engine."""

    batch_size: int = 256
    epochs: int = 20
    lr: float = 3e-3
    dropout: float = 0.1
    width: int = 16

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width = {self.width}, and a layer has at least 1 channel")


def digits(part: slice) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images (n, 8, 8) in [0, 1] and labels (n,), in an order that mixes the writers."""
    table = _table()
    chosen = table[_order(len(table))[part]]
    images = chosen[:, :-1].astype(np.float32).reshape(-1, 8, 8)
    return images / np.float32(16), chosen[:, -1].astype(np.int64)


@cache
def _table() -> NDArray[np.float64]:
    """What `sklearn.datasets.load_digits` reads, without the 1.4 s that its import takes.

    Cached per process: a read takes as long as five steps of the program.
    """
    installed = find_spec("sklearn")
    if installed is None or installed.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    return np.loadtxt(Path(installed.origin).parent / TABLE, delimiter=",")


def _order(samples: int) -> NDArray[np.int64]:
    """A random permutation (Fisher-Yates): each place is swapped with one not before it."""
    draws = np.frombuffer(np.random.RandomState(SEED).bytes(4 * samples), "<u4")
    order = np.arange(samples)
    for place, draw in enumerate(draws[:-1].tolist()):
        other = place + draw % (samples - place)
        order[place], order[other] = order[other], order[place]
    return order
