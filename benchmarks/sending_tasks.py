"""What `slow_link.py` and `quality.py` train: a GPT on bytes, ResNet-20, and a VGG-like model.

The text is Python's own standard library, which every machine here has. Images are made up, of
CIFAR's shape: a class is a smooth pattern, a sample is its pattern shifted, scaled and under noise,
so that a model has to generalise. All sizes are for two cores.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.programs.models import resnet20
from allranks.programs.text import Text
from allranks.torch import Task
from allranks.training.schedules import cosine, linear_warmup

CORPUS_BYTES = 4_000_000
CLASSES, SIDE, COARSE = 10, 32, 8
TRAIN, EVALUATED = 8192, 1024
FLOAT = torch.float32


def corpus() -> Path:
    """A file of text: the modules of the standard library, in the order of their names."""
    path = Path(tempfile.gettempdir()) / f"allranks-benchmark-corpus-{CORPUS_BYTES}.txt"
    if path.is_file():
        return path
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)[:CORPUS_BYTES]
    own = path.with_suffix(f".{os.getpid()}")
    own.write_bytes(text)
    own.replace(path)
    return path


@dataclass(kw_only=True)
class CharGPT(Text):
    """`text` as it is: 842,496 parameters."""

    path: str = ""
    batch_size: int = 16
    context: int = 64
    dropout: float = 0.0
    warmup_steps: int = 20
    validation: float = 0.01

    def __post_init__(self) -> None:
        self.path = self.path or str(corpus())
        super().__post_init__()


@dataclass(kw_only=True)
class Images(Task):
    """Made-up images in ten classes; SGD with momentum, whose rate ends at `total_steps`."""

    batch_size: int = 32
    epochs: int = 100
    lr: float = 0.05
    momentum: float = 0.9
    noise: float = 1.5
    warmup_steps: int = 20
    total_steps: int | None = None
    shards: int = 4

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=self.momentum)

    def schedule(self, step: int) -> float:
        if self.total_steps is None:
            return linear_warmup(self.warmup_steps)(step)
        return cosine(self.total_steps, self.warmup_steps)(step)

    def train_data(self) -> tuple[Tensor, Tensor]:
        images, labels = self._made
        return images[:TRAIN], labels[:TRAIN]

    def eval_data(self) -> tuple[Tensor, Tensor]:
        images, labels = self._made
        return images[TRAIN:], labels[TRAIN:]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = output.argmax(dim=1) == batch[1]
        return {"accuracy": (right.sum(), len(right))}

    @cached_property
    def _made(self) -> tuple[Tensor, Tensor]:
        """All images, (n, 3, 32, 32), and their labels."""
        random = torch.Generator().manual_seed(1)
        coarse = torch.randn(CLASSES, 3, COARSE, COARSE, generator=random)
        patterns = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
        count = TRAIN + EVALUATED
        labels = torch.randint(CLASSES, (count,), generator=random)
        shifts = torch.randint(SIDE, (count, 2), generator=random)
        images = self.noise * torch.randn(count, 3, SIDE, SIDE, generator=random, dtype=FLOAT)
        for image, label, (down, right) in zip(images, labels, shifts.tolist(), strict=True):
            image += torch.roll(patterns[label], (down, right), (1, 2))
        return images, labels


@dataclass(kw_only=True)
class ResNet20(Images):
    """ResNet-20 of He et al. 2016: 269,722 parameters."""

    def model(self) -> nn.Module:
        return resnet20(CLASSES)


@dataclass(kw_only=True)
class VGGLike(Images):
    """Few convolutions, large dense layers: 9.7 million parameters, most of them in two layers."""

    lr: float = 0.01
    width: int = 2048

    def model(self) -> nn.Module:
        def block(channels: int, more: int) -> list[nn.Module]:
            return [nn.Conv2d(channels, more, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

        dense = [nn.Linear(128 * 4 * 4, self.width), nn.ReLU(), nn.Linear(self.width, self.width)]
        convolutions = [*block(3, 32), *block(32, 64), *block(64, 128)]
        head = [nn.ReLU(), nn.Linear(self.width, CLASSES)]
        return nn.Sequential(*convolutions, nn.Flatten(), *dense, *head)


TASKS = {"char-GPT": CharGPT, "ResNet-20": ResNet20, "VGG-like": VGGLike}
