"""ImageNet with ResNet-50: 1,000 classes of photographs of any size, in folders of JPEG files.

As in Goyal et al. 2017, arXiv 1706.02677: the rate is proportional to the batch, with a warm-up,
and falls to a tenth after 1/3, 2/3 and 8/9 of the training; no decay on scales and biases; blocks
start as their shortcut. `data` is a folder; `imagenet/train` and `imagenet/val` in it have a folder
for each class. It is never downloaded, because users must accept its terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.errors import RequestError
from allranks.programs.models import resnet50
from allranks.programs.readers.images import ImageFolder
from allranks.programs.readers.stream import OnBadRecord
from allranks.torch.task import Task
from allranks.training.order import Order
from allranks.training.schedules import linear_scaling, product, steps

MILESTONES = 1 / 3, 2 / 3, 8 / 9  # parts of the training: epochs 30, 60 and 80 of 90
TOP = 5


@dataclass(kw_only=True)
class ImageNet(Task):
    """Classify photographs; `lr` is for a batch of 256, `size` is the side of an input."""

    batch_size: int = 256
    epochs: int = 90
    warmup_epochs: int = 5
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    label_smoothing: float = 0.0
    classes: int = 1000
    size: int = 224
    data: str = "data"
    on_bad_record: OnBadRecord = "stop"

    def model(self) -> nn.Module:
        return resnet50(self.classes, zero_gamma=True)

    def optimizer(self, model: nn.Module) -> Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return SGD(groups, lr=self.lr, momentum=self.momentum)

    def schedule(self, step: int) -> float:
        order = Order(len(self._training), self.batch_size, 0, self.last_batch)
        total, warmup = (n * order.steps_per_epoch for n in (self.epochs, self.warmup_epochs))
        drops = (steps((math.ceil(total * part),), 0.1) for part in MILESTONES)
        return product(linear_scaling(self.batch_size, warmup=warmup), *drops)(step)

    def train_data(self) -> ImageFolder:
        if len(self._training.classes) != self.classes:
            raise RequestError(
                asked=f"classes = {self.classes}",
                found=f"{len(self._training.classes)} folders in {self._training.folder}",
                why="every folder is a class, and the last layer has an output for each",
                do=f"--set classes={len(self._training.classes)}",
            )
        return self._training

    def eval_data(self) -> ImageFolder:
        data = self._images("val")
        if data.classes != self._training.classes:
            odd = sorted(set(data.classes) ^ set(self._training.classes))
            raise RequestError(
                asked=f"evaluation on {data.folder}",
                found=f"classes that only it or the training has: {', '.join(odd[:8])}",
                why="classes are numbered in the order of their folders, so both need the same",
                do="make the same folders in train and val",
            )
        return data

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(
            output, batch[1], label_smoothing=self.label_smoothing, reduction="none"
        )

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        best = output.topk(min(TOP, self.classes), dim=1).indices  # (n, 5)
        right = best == batch[1][:, None]
        return {
            "accuracy": (right[:, 0].sum(), len(right)),
            "top5_accuracy": (right.any(dim=1).sum(), len(right)),
        }

    @cached_property
    def _training(self) -> ImageFolder:
        return self._images("train")

    def _images(self, part: str) -> ImageFolder:
        folder = Path(self.data) / "imagenet" / part
        return ImageFolder(folder, self.size, on_bad_record=self.on_bad_record)
