"""A Keras task, trained by the torch engine: the same methods, in the form of a torch `Task`.

Keras computes with torch here (`KERAS_BACKEND=torch`), so its model is an `nn.Module` and its
functions return tensors. The user's task is wrapped, not changed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.catalog import load
from allranks.errors import RequestError
from allranks.torch.data.collate import map_tensors
from allranks.torch.keras.shards import KerasSetting, check_types
from allranks.torch.task import Task
from allranks.training.keras_task import Task as KerasTask
from allranks.training.schedules import Plateau

# --- optimizer -----------------------------------------------------------------------------------
# A Keras optimizer with the interface of torch's, for the engine's steps and checkpoints.
#
# `state` has Keras' own tensors, so nothing is copied back and forth: those of a weight under that
# weight, and others (the number of steps) under `SHARED`. The engine sets the rate in
# `param_groups`; a `LearningRateSchedule` of Keras sets it itself.


SHARED = "of no weight"

REPLACEMENTS = {  # options which the engine replaces, and what to use instead
    "use_ema": "--set ema=0.99 averages the weights, and evaluates the average",
    "gradient_accumulation_steps": "--set batch_size=…, and --micro-batch for less memory",
    "loss_scale_factor": "--precision fp16 scales the loss",
}


class KerasOptimizer(Optimizer):
    """Updates the trainable weights of a Keras model in place, by the `wrapped` optimizer."""

    wrapped: Any

    def __init__(self, wrapped: Any, model: nn.Module, setting: KerasSetting) -> None:
        keras_model: Any = model
        self.wrapped, self.setting = wrapped, setting
        self.variables = list(keras_model.trainable_variables)
        _check(wrapped, self.variables)
        with setting.in_force(), _recorded(wrapped) as slots_of:
            wrapped.build(self.variables)
        rate = wrapped.learning_rate
        self.is_settable = isinstance(rate, sys.modules["keras"].Variable)
        super().__init__([v.value for v in self.variables], {"lr": self._rate()})
        for variable in self.variables:
            if id(variable) in slots_of:
                self.state[variable.value] = slots_of[id(variable)]
        used = {id(tensor) for slots in slots_of.values() for tensor in slots.values()}
        shared = [v for v in wrapped.variables if id(v.value) not in used and v is not rate]
        state: Any = self.state  # torch takes other keys, too
        state[SHARED] = {str(n): v.value for n, v in enumerate(shared)}  # Keras' names are numbered

    def _rate(self) -> float:
        """The rate in the user's decimal notation, without Keras' rounding to 32 bits."""
        with self.setting.in_force():
            rate = float(self.wrapped.learning_rate)
        return float(str(np.float32(rate))) if self.setting.floatx == "float32" else rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient, if there are any."""
        pairs = [(v.value.grad, v) for v in self.variables if v.value.grad is not None]
        if not pairs:
            return
        with self.setting.in_force():
            if self.is_settable:
                self.wrapped.learning_rate = self.param_groups[0]["lr"]
            self.wrapped.apply(*zip(*pairs, strict=True))
        if not self.is_settable:
            self.param_groups[0]["lr"] = self._rate()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, into the tensors of Keras."""
        state = state_dict["state"]
        shared: Any = self.state
        _copy("the optimizer", shared[SHARED], state.get(SHARED, {}))
        for number, variable in enumerate(self.variables):
            _copy(variable.path, self.state.get(variable.value, {}), state.get(number, {}))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        if not self.is_settable:
            self.param_groups[0]["lr"] = self._rate()


def keras_optimizer(wrapped: Any, model: nn.Module, setting: KerasSetting) -> KerasOptimizer:
    """A torch optimizer around a Keras one; raises `RequestError` for unsupported optimizers."""
    keras: Any = sys.modules["keras"]
    if not isinstance(wrapped, keras.optimizers.Optimizer):
        raise RequestError(
            asked="optimizer() of the task",
            found=f"a {type(wrapped).__name__}",
            why="a Keras task is trained by an optimizer of Keras",
            do="return one: keras.optimizers.AdamW(1e-3)",
        )
    # one class for each kind, so that no optimizer loads the state of another kind
    kind = type(f"Keras{type(wrapped).__name__}", (KerasOptimizer,), {})
    optimizer: KerasOptimizer = kind(wrapped, model, setting)
    return optimizer


def _check(wrapped: Any, variables: list[Any]) -> None:
    name = type(wrapped).__name__
    if not variables:
        raise RequestError(
            asked="model() of the task",
            found="no weight that is trainable",
            why="there would be nothing to train",
            do="leave some layer with trainable = True",
        )
    set_here = [option for option in REPLACEMENTS if getattr(wrapped, option, None)]
    if name == "LossScaleOptimizer":
        set_here = ["loss_scale_factor"]
    if set_here:
        raise RequestError(
            asked=f"optimizer() of the task: {name} with {set_here[0]}",
            found=f"{set_here[0]} = {getattr(wrapped, set_here[0], None)}",
            why="it belongs to Keras' own fit; the engine provides it for every optimizer",
            do=f"leave it out: {REPLACEMENTS[set_here[0]]}",
        )
    if wrapped.built:
        raise RequestError(
            asked=f"optimizer() of the task: {name}",
            found="one that is built already",
            why="the engine builds it for the weights of the trained model",
            do="let optimizer() make a new one",
        )


@contextmanager
def _recorded(wrapped: Any) -> Iterator[dict[int, dict[str, Tensor]]]:
    """Within, records the tensors that Keras creates: by the id of the weight, then by name."""
    slots_of: dict[int, dict[str, Tensor]] = {}
    make = wrapped.add_variable_from_reference

    def recorded(reference_variable: Any, *arguments: Any, **keywords: Any) -> Any:
        variable = make(reference_variable, *arguments, **keywords)
        slots = slots_of.setdefault(id(reference_variable), {})
        name = arguments[0] if arguments else keywords.get("name")
        slots[f"{len(slots)}.{name or 'var'}"] = variable.value
        return variable

    wrapped.add_variable_from_reference = recorded
    try:
        yield slots_of
    finally:
        del wrapped.add_variable_from_reference


def _copy(whose: str, mine: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    now, was = ({n: tuple(t.shape) for n, t in values.items()} for values in (mine, saved))
    if now != was:
        raise RequestError(
            asked="to resume from a checkpoint",
            found=f"other values kept for {whose}: {now}, were {was}",
            why="the state is loaded name by name",
            do="resume with the optimizer as it was, or start anew in another folder",
        )
    for name, tensor in mine.items():
        tensor.copy_(saved[name])


METHODS_OF_TORCH_TASKS = ("collate", "eval_collate", "blocks", "initialise")
BATCHED_SOURCES = ("tensorflow.", "keras.")  # modules of tf.data and PyDataset


def torch_task(task: Task | KerasTask, precision: str) -> Task:
    """A Keras task as a torch task with the same fields; a torch task is returned unchanged.

    `precision` is that of the job.
    """
    if isinstance(task, Task):
        return task
    values = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    kind: Any = dataclasses.make_dataclass(
        type(task).__name__, [(name, Any) for name in values], bases=(_OnTorch,), kw_only=True
    )
    adapter: _OnTorch = kind(**values)
    adapter.wrap(task, "float64" if precision == "fp64" else "float32")
    return adapter


class _OnTorch(Task):
    """Passes calls to `user_task`, and translates between Keras and the engine."""

    def wrap(self, user_task: KerasTask, floatx: str) -> None:
        self.user_task, self.setting = user_task, KerasSetting(floatx=floatx)
        self.is_regularized = False
        vars(self)["loss_over"] = user_task.loss_over

    @property
    def as_written(self) -> KerasTask:
        return self.user_task

    def overrides(self, method: str) -> bool:
        if method == "regularizer" and self.is_regularized:
            return True
        return method not in METHODS_OF_TORCH_TASKS and self.user_task.overrides(method)

    def model(self) -> nn.Module:
        """The model on the CPU, so that its initial weights are the same for every device."""
        _check_backend(load("keras"))
        with self.setting.in_force():
            model = self.user_task.model()
            check_types(model, self.setting.floatx)
            weights_file = self.user_task.pretrained()
            if weights_file is not None:
                _read_weights(model, Path(weights_file))
        variables = getattr(model, "trainable_variables", ())
        self.is_regularized = any(v.regularizer is not None for v in variables)
        return model  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module) -> Optimizer:
        device = next(iter(model.parameters())).device
        self.setting = dataclasses.replace(self.setting, device=str(device))
        with self.setting.in_force():
            wrapped = self.user_task.optimizer()
        optimizer = keras_optimizer(wrapped, model, self.setting)
        ours = [name for name in ("schedule", "plateau") if self.user_task.overrides(name)]
        if ours and not optimizer.is_settable:
            raise RequestError(
                asked=f"{ours[0]}() of the task",
                found=f"a {type(wrapped).__name__} with a schedule of its own",
                why="only one of the two can set the learning rate",
                do=f"give the optimizer a number, or leave {ours[0]}() out",
            )
        return optimizer

    def train_data(self) -> Any:
        return _arrays(self.user_task.train_data(), "train_data")

    def eval_data(self) -> Any:
        return _arrays(self.user_task.eval_data(), "eval_data")

    def inputs(self, batch: Any) -> Any:
        """A single argument: Keras models also take a list or a dict as one."""
        with self.setting.in_force():
            return (self.user_task.inputs(batch),)

    def loss(self, output: Any, batch: Any) -> Tensor:
        with self.setting.in_force():
            return self.user_task.loss(output, batch)  # type: ignore[no-any-return]

    def weight(self, batch: Any) -> Tensor | None:
        with self.setting.in_force():
            weight = self.user_task.weight(batch)
        if weight is None or isinstance(weight, Tensor):
            return weight
        return torch.as_tensor(weight, device=self.setting.device)

    def regularizer(self, model: nn.Module) -> Tensor | None:
        with self.setting.in_force():
            return self.user_task.regularizer(model)  # type: ignore[no-any-return]

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        with self.setting.in_force():
            return self.user_task.metrics(output, batch)

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.user_task.finalize(metrics)

    def schedule(self, step: int) -> float:
        return self.user_task.schedule(step)

    def plateau(self) -> Plateau | None:
        return self.user_task.plateau()

    def augment(self, sample: Any, random: np.random.Generator) -> Any:
        """Samples of a Keras task are arrays, whatever their source."""
        return self.user_task.augment(map_tensors(Tensor.numpy, sample), random)  # type: ignore[arg-type]

    def callbacks(self) -> Sequence[Any]:
        return self.user_task.callbacks()


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
    """`data`; raises `RequestError` if it makes batches itself."""
    for kind in type(data).__mro__:
        of_framework = kind.__module__.startswith(BATCHED_SOURCES)
        if of_framework and kind.__name__ in ("DatasetV2", "PyDataset"):
            raise RequestError(
                asked=f"{name}() of the task, on the torch engine",
                found=f"a {type(data).__module__.partition('.')[0]} {type(data).__name__}",
                why="it makes batches itself, and the torch engine reads samples by number",
                do="return arrays, or a data set with __getitem__ and __len__ of samples; "
                "or train with --engine tensorflow",
            )
    return data
