"""A Keras task, trained by the torch engine: the same methods, in the form of a torch `Task`.

Keras computes with torch here (`KERAS_BACKEND=torch`), so its model is an `nn.Module` and what its
functions return are tensors. The user's task stays as it is; it is only asked in another way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.catalog import load
from allranks.errors import RequestError
from allranks.torch.data.collate import map_tensors
from allranks.torch.keras.optimizer import keras_optimizer
from allranks.torch.keras.shards import KerasSetting, check_types
from allranks.torch.task import Task
from allranks.training.keras_task import Task as KerasTask
from allranks.training.schedules import Plateau

METHODS_OF_TORCH_TASKS = ("collate", "eval_collate", "blocks", "initialise")
BATCHED_SOURCES = ("tensorflow.", "keras.")  # where tf.data and PyDataset are from


def torch_task(task: Task | KerasTask, precision: str) -> Task:
    """`task` as the torch engine takes it, with the same fields; one of torch as it is.

    `precision` is that of the job.
    """
    if isinstance(task, Task):
        return task
    values = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    kind: Any = dataclasses.make_dataclass(
        type(task).__name__, [(name, Any) for name in values], bases=(_OnTorch,), kw_only=True
    )
    made: _OnTorch = kind(**values)
    made.take(task, "float64" if precision == "fp64" else "float32")
    return made


class _OnTorch(Task):
    """Passes calls to `own`, the user's task, and translates between Keras and the engine."""

    def take(self, own: KerasTask, floatx: str) -> None:
        self.own, self.setting = own, KerasSetting(floatx=floatx)
        self.is_regularized = False
        vars(self)["loss_over"] = own.loss_over

    @property
    def as_written(self) -> KerasTask:
        return self.own

    def overrides(self, method: str) -> bool:
        if method == "regularizer" and self.is_regularized:
            return True
        return method not in METHODS_OF_TORCH_TASKS and self.own.overrides(method)

    def model(self) -> nn.Module:
        """The model on the CPU, so that its initial weights are the same for every device."""
        _check_backend(load("keras"))
        with self.setting.in_force():
            model = self.own.model()
            check_types(model, self.setting.floatx)
            given = self.own.pretrained()
            if given is not None:
                _read_weights(model, Path(given))
        variables = getattr(model, "trainable_variables", ())
        self.is_regularized = any(v.regularizer is not None for v in variables)
        return model  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module) -> Optimizer:
        device = next(iter(model.parameters())).device
        self.setting = dataclasses.replace(self.setting, device=str(device))
        with self.setting.in_force():
            own = self.own.optimizer()
        made = keras_optimizer(own, model, self.setting)
        ours = [name for name in ("schedule", "plateau") if self.own.overrides(name)]
        if ours and not made.is_settable:
            raise RequestError(
                asked=f"{ours[0]}() of the task",
                found=f"a {type(own).__name__} with a schedule of its own",
                why="one of the two says the learning rate",
                do=f"give the optimizer a number, or leave {ours[0]}() out",
            )
        return made

    def train_data(self) -> Any:
        return _arrays(self.own.train_data(), "train_data")

    def eval_data(self) -> Any:
        return _arrays(self.own.eval_data(), "eval_data")

    def inputs(self, batch: Any) -> Any:
        """As one argument, which a list or a dict is for a Keras model too."""
        with self.setting.in_force():
            return (self.own.inputs(batch),)

    def loss(self, output: Any, batch: Any) -> Tensor:
        with self.setting.in_force():
            return self.own.loss(output, batch)  # type: ignore[no-any-return]

    def weight(self, batch: Any) -> Tensor | None:
        with self.setting.in_force():
            weight = self.own.weight(batch)
        if weight is None or isinstance(weight, Tensor):
            return weight
        return torch.as_tensor(weight, device=self.setting.device)

    def regularizer(self, model: nn.Module) -> Tensor | None:
        with self.setting.in_force():
            return self.own.regularizer(model)  # type: ignore[no-any-return]

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        with self.setting.in_force():
            return self.own.metrics(output, batch)

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.own.finalize(metrics)

    def schedule(self, step: int) -> float:
        return self.own.schedule(step)

    def plateau(self) -> Plateau | None:
        return self.own.plateau()

    def augment(self, sample: Any, random: np.random.Generator) -> Any:
        """A sample is of arrays for a Keras task, whatever it is read from."""
        return self.own.augment(map_tensors(Tensor.numpy, sample), random)  # type: ignore[arg-type]

    def callbacks(self) -> Sequence[Any]:
        return self.own.callbacks()


def _check_backend(keras: Any) -> None:
    if keras.backend.backend() != "torch":
        raise RequestError(
            asked="a Keras task on the torch engine",
            found=f"Keras, which computes with {keras.backend.backend()}",
            why="it is imported with KERAS_BACKEND, and cannot change afterwards",
            do="set KERAS_BACKEND=torch before anything imports keras, as `allranks train` does",
        )


def _read_weights(model: Any, path: Path) -> None:
    try:
        model.load_weights(path)
    except Exception as error:
        raise RequestError(
            asked=f"pretrained weights of {path}",
            found=f"{type(error).__name__}: {error}",
            why="Keras reads them into the model, layer by layer",
            do="make one: model.save_weights('NAME.weights.h5')",
        ) from error


def _arrays(data: Any, name: str) -> Any:
    """`data`, unless it makes batches by itself."""
    for kind in type(data).__mro__:
        of_framework = kind.__module__.startswith(BATCHED_SOURCES)
        if of_framework and kind.__name__ in ("DatasetV2", "PyDataset"):
            raise RequestError(
                asked=f"{name}() of the task, on the torch engine",
                found=f"a {type(data).__module__.partition('.')[0]} {type(data).__name__}",
                why="it makes batches by itself, and the torch engine takes samples by number",
                do="return arrays, or a data set with __getitem__ and __len__ of samples; "
                "or train with --engine tensorflow",
            )
    return data
