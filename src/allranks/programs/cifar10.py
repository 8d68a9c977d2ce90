"""CIFAR-10 with ResNet-20: 60,000 images of 32 by 32 pixels in ten classes.

As in He et al. 2015, arXiv 1512.03385, section 4.2: SGD with momentum, images shifted by up to 4
pixels and mirrored, a tenth of the rate after 1/2 and after 3/4 of the training. `data` is a
folder; `cifar10` in it has the binary version, as files or archive, else each node downloads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.programs.models import resnet20
from allranks.programs.readers.arrays import ARCHIVE, CLASSES, TEST, CifarImages
from allranks.programs.readers.stream import OnBadRecord, Remote, fetch, require
from allranks.torch.task import Task
from allranks.training.order import Order
from allranks.training.schedules import steps

PUBLISHED = Remote(
    f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}", "md5:c32a1d4ab5d03f1284b67883e8d87530"
)
UNPACKED = "cifar-10-batches-bin"  # the folder in the archive
SHIFT = 4  # pixels, to every side
SIDE = 32

Sample = tuple[NDArray[np.float32], int]


@dataclass(kw_only=True)
class Cifar10(Task):
    """Classify small photographs. With `download` off nothing is fetched."""

    batch_size: int = 128
    epochs: int = 164  # 64,000 steps
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    data: str = "data"
    download: bool = True
    on_bad_record: OnBadRecord = "stop"

    def model(self) -> nn.Module:
        return resnet20(CLASSES)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(
            model.parameters(),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def schedule(self, step: int) -> float:
        order = Order(len(self._training), self.batch_size, 0, self.last_batch)
        total = self.epochs * order.steps_per_epoch
        return steps((total // 2,), 0.1)(step) * steps((total * 3 // 4,), 0.1)(step)

    def train_data(self) -> CifarImages:
        return self._training

    def eval_data(self) -> CifarImages:
        return CifarImages(self._path, train=False, on_bad_record=self.on_bad_record)

    def augment(self, sample: Sample, random: np.random.Generator) -> Sample:
        """Shift with the mean colour as padding, and mirror with probability 1/2."""
        image, label = sample
        around = np.pad(image, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)))
        row, column = random.integers(2 * SHIFT + 1, size=2)
        image = around[:, row : row + SIDE, column : column + SIDE]
        return np.ascontiguousarray(image[..., ::-1] if random.random() < 0.5 else image), label

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = output.argmax(dim=1) == batch[1]
        return {"accuracy": (right.sum(), len(right))}

    @cached_property
    def _training(self) -> CifarImages:
        return CifarImages(self._path, on_bad_record=self.on_bad_record)

    @cached_property
    def _path(self) -> Path:
        """The folder with the files, or the archive."""
        folder = Path(self.data) / "cifar10"
        for place in (folder, folder / UNPACKED):
            if (place / TEST).exists():
                return place
        if self.download or (folder / ARCHIVE).exists():
            (path,) = fetch([PUBLISHED], folder)
            return path
        looked_for = [folder / TEST, folder / UNPACKED / TEST, folder / ARCHIVE]
        do = "put the binary version of CIFAR-10 there, or --set download=yes"
        require("the data of Cifar10", looked_for, do)
        raise AssertionError("one of them is there")
