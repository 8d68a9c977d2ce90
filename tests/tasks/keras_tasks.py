"""A network of Keras layers and the same one of torch's, and models that Keras trains otherwise.

The backend and the folder of Keras' settings have to be known before it is imported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
os.environ["KERAS_HOME"] = str(Path(tempfile.gettempdir()) / "keras")

import keras
import pytest
import torch
from keras import layers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Task, Trainer
from contract_tasks import made

SHAPES = {
    "conv/kernel": (3, 3, 2, 5),
    "conv/bias": (5,),
    "dense/kernel": (45, 8),
    "dense/bias": (8,),
    "out/kernel": (8, 3),
    "out/bias": (3,),
}


def initial() -> dict[str, Tensor]:
    """The same initial weights for both, as Keras lays them out."""
    shapes = enumerate(SHAPES.items())
    return {name: 0.2 * made(*shape, seed=100 + number) for number, (name, shape) in shapes}


@dataclass(kw_only=True)
class OfKeras(Task):
    """Convolution and dense layers of Keras."""

    batch_size: int = 24
    epochs: int = 4

    def model(self) -> nn.Module:
        net = keras.Sequential(
            [
                keras.Input((8, 8, 2)),
                layers.Conv2D(5, 3, activation="relu", name="conv"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(8, activation="tanh", name="dense"),
                layers.Dense(3, name="out"),
            ],
            name="net",
        )
        for variable in net.weights:
            variable.assign(initial()[variable.path.removeprefix("net/")])
        return net

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_data(self) -> tuple[Tensor, Tensor]:
        images = made(101, 8, 8, 2)
        return images, images.mean(dim=(1, 2, 3)).mul(40).long().remainder(3)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return self.train_data()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class OfTorch(OfKeras):
    """The same of torch."""

    def model(self) -> nn.Module:
        net = _Net()
        with torch.no_grad():
            for name, value in initial().items():
                layer, _, kind = name.partition("/")
                weight = getattr(getattr(net, layer), "weight" if kind == "kernel" else "bias")
                weight.data = as_torch(value)
        return net


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dense, self.out = nn.Conv2d(2, 5, 3), nn.Linear(45, 8), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps = F.max_pool2d(self.conv(images.permute(0, 3, 1, 2)).relu(), 2)
        return self.out(self.dense(maps.permute(0, 2, 3, 1).flatten(1)).tanh())


def as_torch(value: Tensor) -> Tensor:
    """A weight as torch lays it out: outputs first."""
    order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}
    return value.permute(order[value.ndim]).contiguous()


class Mixed(OfKeras):
    """Layers of Keras in a model of torch, with those of torch that belong to a shard."""

    def model(self) -> nn.Module:
        conv, out = layers.Conv2D(5, 3, use_bias=False), layers.Dense(3)
        conv.build((None, 8, 8, 2))
        out.build((None, 180))
        flat = nn.Flatten()
        return nn.Sequential(conv, flat, nn.BatchNorm1d(180), nn.ReLU(), nn.Dropout(0.2), out)


class Normed(OfKeras):
    """A model of Keras with its BatchNormalization, and with its dropout."""

    def model(self) -> nn.Module:
        inner = [layers.Conv2D(5, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
        head = [layers.Flatten(), layers.Dropout(0.2), layers.Dense(3)]
        net: nn.Module = keras.Sequential([keras.Input((8, 8, 2)), *inner, *head])
        return net


class Narrow(OfKeras):
    """A layer of 32 bits, whatever the job says."""

    def model(self) -> nn.Module:
        head = [layers.Flatten(), layers.Dense(3, dtype="float32")]
        net: nn.Module = keras.Sequential([keras.Input((8, 8, 2)), *head])
        return net


class _Norm(layers.BatchNormalization):  # type: ignore[misc]
    """One of a user's own, of which nobody knows what it counts."""


def _net(*inner: Any) -> nn.Module:
    net: nn.Module = keras.Sequential([keras.Input((8, 8, 2)), *inner, layers.Flatten()])
    return net


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "BatchNormalization itself": lambda: _net(_Norm()),
    "renorm=True": lambda: _net(layers.BatchNormalization(renorm=True)),
    "keras.layers.Dropout": lambda: nn.Sequential(_net(layers.Dense(2), layers.GaussianNoise(0.1))),
    "None for the samples": lambda: _net(layers.Dropout(0.1, noise_shape=(1, 8, 8, 2))),
    "keras.Input": lambda: keras.Sequential([layers.Dense(2)]),
    "regularizer(model)": lambda: _net(layers.Dense(2, kernel_regularizer="l2")),
    "loss(output, batch)": lambda: _net(layers.Dense(2, activity_regularizer="l2")),
    "a torch Dropout": lambda: _net(layers.TorchModuleWrapper(nn.Dropout(0.1))),
}


def refuse(argument: None) -> None:
    """Each of `REFUSED` is, and the refusal says what to do; a rate of 0 is no dropout."""
    for what, model in REFUSED.items():
        task = OfKeras()
        task.model = model  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="the Keras") as raised:
            Trainer(task, Job())
        assert what in str(raised.value), (what, str(raised.value))
    task = OfKeras()
    task.model = lambda: _net(layers.Dropout(0.0), layers.Dense(3))  # type: ignore[method-assign]
    Trainer(task, Job()).close()
