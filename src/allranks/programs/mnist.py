"""MNIST and Fashion-MNIST: 70,000 images of 28 by 28 grey pixels, of ten digits or ten garments.

`data` is a folder; `mnist` or `fashion` in it has the four IDX files. Plain ones are taken as they
are, packed ones (.gz) have to be the published ones, and what is missing is fetched once per node.
LeCun et al. 1998; Xiao, Rasul and Vollgraf 2017, arXiv 1708.07747.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from allranks.models import mnist_cnn
from allranks.on_torch.task import Task
from allranks.readers.bad_record import OnBadRecord
from allranks.readers.download import Remote, fetch
from allranks.readers.files import require
from allranks.readers.idx import read_labelled

CLASSES = 10
TRAINING = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


@dataclass(kw_only=True)
class Mnist(Task):
    """Classify handwritten digits. With `download` off nothing is fetched."""

    batch_size: int = 128
    epochs: int = 12
    lr: float = 1e-3
    data: str = "data"
    download: bool = True
    on_bad_record: OnBadRecord = "stop"

    folder: ClassVar[str] = "mnist"
    mean: ClassVar[float] = 0.1307  # of the training images, as is their deviation
    deviation: ClassVar[float] = 0.3081
    published: ClassVar[tuple[Remote, ...]] = (
        Remote(f"{_MNIST}{TRAINING[0]}.gz", "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Remote(f"{_MNIST}{TRAINING[1]}.gz", "md5:d53e105ee54ea40749a09fcbcd1e9432"),
        Remote(f"{_MNIST}{TEST[0]}.gz", "md5:9fb629c4189551a2d022fa330f9573f3"),
        Remote(f"{_MNIST}{TEST[1]}.gz", "md5:ec29112dd5afa0611ce80d1b7f02629c"),
    )

    def model(self) -> nn.Module:
        return mnist_cnn(CLASSES)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return self._labelled(*TRAINING)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return self._labelled(*TEST)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = output.argmax(dim=1) == batch[1]
        return {"accuracy": (right.sum(), len(right))}

    def _labelled(self, images: str, labels: str) -> tuple[Tensor, Tensor]:
        """Images (n, 1, 28, 28) of mean 0 and deviation 1, and labels (n,)."""
        paths = self._path(images), self._path(labels)
        pixels, numbers = read_labelled(*paths, CLASSES, self.on_bad_record)
        pictures = torch.from_numpy(pixels).float().div_(255).sub_(self.mean).div_(self.deviation)
        return pictures.unsqueeze(1), torch.from_numpy(numbers)

    def _path(self, name: str) -> Path:
        """The file of this name, plain if it is there, else packed."""
        folder = Path(self.data) / self.folder
        packed = [r for r in self.published if not (folder / r.name.removesuffix(".gz")).exists()]
        if not self.download:  # but what is there has to be the published file
            packed = [remote for remote in packed if (folder / remote.name).exists()]
        fetch(packed, folder)  # all of them at once: whoever has no network is told once
        looked_for = [folder / name, folder / f"{name}.gz"]
        found = [path for path in looked_for if path.exists()]
        if not found:
            do = "put one of them there, or --set download=yes"
            require(f"the data of {type(self).__name__}", looked_for, do)
        return found[0]


@dataclass(kw_only=True)
class Fashion(Mnist):
    """Classify pieces of clothing: as many images, of the same size, and harder."""

    folder: ClassVar[str] = "fashion"
    mean: ClassVar[float] = 0.2860
    deviation: ClassVar[float] = 0.3530
    published: ClassVar[tuple[Remote, ...]] = (
        Remote(f"{_FASHION}{TRAINING[0]}.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Remote(f"{_FASHION}{TRAINING[1]}.gz", "md5:25c81989df183df01b3e8a0aad5dffbe"),
        Remote(f"{_FASHION}{TEST[0]}.gz", "md5:bef4ecab320f06d8554ea6380940ec79"),
        Remote(f"{_FASHION}{TEST[1]}.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310"),
    )
