"""MNIST and Fashion-MNIST as arrays, for the program of each engine.

A folder has the four IDX files of one of them. Plain files are used as they are, packed ones (.gz)
must be the published ones, and each node downloads missing ones once.
LeCun et al. 1998; Xiao, Rasul and Vollgraf 2017, arXiv 1708.07747.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from allranks.programs.readers.arrays import read_labelled
from allranks.programs.readers.stream import OnBadRecord, Remote, fetch, require

CLASSES = 10
TRAINING = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@dataclass(frozen=True)
class Collection:
    """A data set; `mean` and `deviation` are those of its training pixels."""

    name: str
    mean: float
    deviation: float
    published: tuple[Remote, ...]


def _published(folder: str, *digests: str) -> tuple[Remote, ...]:
    """The packed files of a collection, below `folder`, with their MD5."""
    names = zip((*TRAINING, *TEST), digests, strict=True)
    return tuple(Remote(f"{folder}{name}.gz", f"md5:{digest}") for name, digest in names)


MNIST = Collection(
    "mnist",
    0.1307,
    0.3081,
    _published(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        *("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
        *("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
)
FASHION = Collection(
    "fashion",
    0.2860,
    0.3530,
    _published(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        *("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
        *("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
)


@dataclass(kw_only=True)
class MnistFields:
    """The hyper-parameters of the program of each engine, and its files, which are below `data`."""

    batch_size: int = 128
    epochs: int = 12
    lr: float = 1e-3
    data: str = "data"
    download: bool = True
    on_bad_record: OnBadRecord = "stop"

    collection: ClassVar[Collection] = MNIST

    def labelled(self, images: str, labels: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Images (n, 28, 28) of mean 0 and deviation 1, and labels (n,)."""
        paths = self._path(images), self._path(labels)
        pixels, numbers = read_labelled(*paths, CLASSES, self.on_bad_record)
        pictures = pixels.astype(np.float32)
        pictures /= 255
        pictures -= self.collection.mean
        pictures /= self.collection.deviation
        return pictures, numbers

    def _path(self, name: str) -> Path:
        """The plain file of this name if it exists, else the packed one."""
        folder = Path(self.data) / self.collection.name
        packed = [
            remote
            for remote in self.collection.published
            if not (folder / remote.name.removesuffix(".gz")).exists()
        ]
        if not self.download:  # but existing files must be the published ones
            packed = [remote for remote in packed if (folder / remote.name).exists()]
        fetch(packed, folder)  # all at once: without a network there is one error
        looked_for = [folder / name, folder / f"{name}.gz"]
        paths = [path for path in looked_for if path.exists()]
        if not paths:
            do = "put one of them there, or --set download=yes"
            require(f"the data of {type(self).__name__}", looked_for, do)
        return paths[0]
