"""Tasks of the GPU session. With `GPU_SESSION_SHARE` set, several ranks share device 0, over Gloo.

NCCL refuses two ranks on one GPU, so what is shared has real kernels, streams, generators and hooks
of a GPU, and collectives of Gloo over its tensors. Only real GPUs beside each other show NCCL.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import allranks.torch.accelerator as accelerator
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.programs.models.gpt import GPTShape, gpt
from allranks.torch import Task, joining, trainer, worker

SHARE = "GPU_SESSION_SHARE"


def _share_the_device() -> None:
    def device_of(job: Job, world: World) -> torch.device:
        device = torch.device(job.device, *([] if job.device == "cpu" else [0]))
        accelerator.use(device)
        return device

    def nothing(*asked: Any) -> None:
        pass

    accelerator.backend_of = lambda device: "gloo"
    trainer.device_of = device_of  # type: ignore[attr-defined]
    worker.check_devices = nothing  # type: ignore[attr-defined]
    joining.check_own_device = nothing  # type: ignore[attr-defined]


if os.environ.get(SHARE):
    _share_the_device()


class Net(nn.Module):
    """Two convolutions. With 10 classes all that follows the last bias lies at odd addresses."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second, self.norm2 = nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.first(x)))
        x = F.relu(self.norm2(self.second(x))).mean((2, 3))
        out: Tensor = self.last(self.drop(x))
        return out


@dataclass(kw_only=True)
class Pictures(Task):
    """520 images by 64: the last batch of an epoch has 8."""

    batch_size: int = 64
    classes: int = 10
    dropout: float = 0.2
    epochs: int = 99

    def model(self) -> nn.Module:
        return Net(self.classes, self.dropout)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return self._pictures(520)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return self._pictures(200)

    def _pictures(self, count: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(5)
        labels = torch.randint(self.classes, (count,), generator=drawn)
        return torch.randn(count, 3, 16, 16, generator=drawn), labels

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}


@dataclass(kw_only=True)
class Words(Task):
    """A GPT of three layers, with dropout."""

    batch_size: int = 64
    epochs: int = 99

    def model(self) -> nn.Module:
        return gpt(GPTShape(vocabulary=96, context=64, width=96, layers=3, heads=4, dropout=0.1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_data(self) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(5)
        text = torch.randint(96, (256, 65), generator=drawn)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="none")
        return losses.view(batch[1].shape)


@dataclass(kw_only=True)
class TooLarge(Pictures):
    """Asks for more memory than there is."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if output.is_cpu:
            raise torch.OutOfMemoryError("CUDA out of memory. (as a GPU would say it)")
        self.held = [torch.empty(2**34, device=output.device) for _ in range(99)]
        return super().loss(output, batch)
