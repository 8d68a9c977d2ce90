"""MNIST and Fashion-MNIST: 70,000 images of 28 by 28 grey pixels, of ten digits or ten garments.

`data` is a folder; `mnist` or `fashion` in it has the four IDX files. Plain files are used as they
are, packed ones (.gz) must be the published ones, and each node downloads missing ones once.
LeCun et al. 1998; Xiao, Rasul and Vollgraf 2017, arXiv 1708.07747.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from allranks.programs.mnist_data import (
    CLASSES,
    FASHION,
    TEST,
    TRAINING,
    Collection,
    MnistFields,
)
from allranks.programs.models import mnist_cnn
from allranks.torch.task import Task


@dataclass(kw_only=True)
class Mnist(MnistFields, Task):
    """Classify handwritten digits. With `download` off nothing is fetched."""

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
        pictures, numbers = self.labelled(images, labels)
        return torch.from_numpy(pictures).unsqueeze(1), torch.from_numpy(numbers)


@dataclass(kw_only=True)
class Fashion(Mnist):
    """Classify pieces of clothing: as many images, of the same size, and harder."""

    collection: ClassVar[Collection] = FASHION
