"""A Keras task, trained by the torch engine: the same methods, in the form of a torch `Task`.

Keras computes with torch here (`KERAS_BACKEND=torch`), so its model is an `nn.Module` and what its
functions return are tensors. The user's task stays as it is; it is only asked in another way.
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
# A Keras optimizer in the form of one of torch, as the engine steps, saves and restores it.
#
# What Keras keeps for a weight stands in `state` under that weight, and what it keeps for none (the
# number of steps) under `SHARED`: the tensors themselves, so nothing is ever copied back and forth.
# The engine sets the rate in `param_groups`; a `LearningRateSchedule` of Keras goes on by itself.


SHARED = "of no weight"

REPLACEMENTS = {  # what the engine does itself, by what the task can say in its place
    "use_ema": "--set ema=0.99 averages the weights, and evaluates the average",
    "gradient_accumulation_steps": "--set batch_size=…, and --micro-batch for less memory",
    "loss_scale_factor": "--precision fp16 scales the loss",
}


class KerasOptimizer(Optimizer):
    """Updates the trainable weights of a Keras model, in place, as `own` says."""

    own: Any

    def __init__(self, own: Any, model: nn.Module, setting: KerasSetting) -> None:
        keras_model: Any = model
        self.own, self.setting = own, setting
        self.variables = list(keras_model.trainable_variables)
        _check(own, self.variables)
        with setting.in_force(), _recorded(own) as kept:
            own.build(self.variables)
        rate = own.learning_rate
        self.is_settable = isinstance(rate, sys.modules["keras"].Variable)
        super().__init__([v.value for v in self.variables], {"lr": self._rate()})
        for variable in self.variables:
            if id(variable) in kept:
                self.state[variable.value] = kept[id(variable)]
        used = {id(tensor) for slots in kept.values() for tensor in slots.values()}
        shared = [v for v in own.variables if id(v.value) not in used and v is not rate]
        state: Any = self.state  # torch takes other keys, too
        state[SHARED] = {str(n): v.value for n, v in enumerate(shared)}  # Keras counts the names up

    def _rate(self) -> float:
        """The rate as its owner wrote it, where Keras has rounded that to 32 bits."""
        with self.setting.in_force():
            rate = float(self.own.learning_rate)
        return float(str(np.float32(rate))) if self.setting.floatx == "float32" else rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of the weights that have a gradient; none of them: no update."""
        pairs = [(v.value.grad, v) for v in self.variables if v.value.grad is not None]
        if not pairs:
            return
        with self.setting.in_force():
            if self.is_settable:
                self.own.learning_rate = self.param_groups[0]["lr"]
            self.own.apply(*zip(*pairs, strict=True))
        if not self.is_settable:
            self.param_groups[0]["lr"] = self._rate()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned: copied into the tensors that Keras has."""
        given = state_dict["state"]
        shared: Any = self.state
        _copy("the optimizer", shared[SHARED], given.get(SHARED, {}))
        for number, variable in enumerate(self.variables):
            _copy(variable.path, self.state.get(variable.value, {}), given.get(number, {}))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        if not self.is_settable:
            self.param_groups[0]["lr"] = self._rate()


def keras_optimizer(own: Any, model: nn.Module, setting: KerasSetting) -> KerasOptimizer:
    """`own` for the weights of `model`; raises `RequestError` for what it cannot be."""
    keras: Any = sys.modules["keras"]
    if not isinstance(own, keras.optimizers.Optimizer):
        raise RequestError(
            asked="optimizer() of the task",
            found=f"a {type(own).__name__}",
            why="a Keras task is trained by an optimizer of Keras",
            do="return one: keras.optimizers.AdamW(1e-3)",
        )
    # a class of its own for each, so that a state is not taken up by another optimizer
    kind = type(f"Keras{type(own).__name__}", (KerasOptimizer,), {})
    made: KerasOptimizer = kind(own, model, setting)
    return made


def _check(own: Any, variables: list[Any]) -> None:
    name = type(own).__name__
    if not variables:
        raise RequestError(
            asked="model() of the task",
            found="no weight that is trainable",
            why="there would be nothing to train",
            do="leave some layer with trainable = True",
        )
    set_here = [option for option in REPLACEMENTS if getattr(own, option, None)]
    if name == "LossScaleOptimizer":
        set_here = ["loss_scale_factor"]
    if set_here:
        raise RequestError(
            asked=f"optimizer() of the task: {name} with {set_here[0]}",
            found=f"{set_here[0]} = {getattr(own, set_here[0], None)}",
            why="it belongs to Keras' own fit; the engine has it for every optimizer",
            do=f"leave it out: {REPLACEMENTS[set_here[0]]}",
        )
    if own.built:
        raise RequestError(
            asked=f"optimizer() of the task: {name}",
            found="one that is built already",
            why="it is made for the weights of the model that is trained",
            do="let optimizer() make a new one",
        )


@contextmanager
def _recorded(own: Any) -> Iterator[dict[int, dict[str, Tensor]]]:
    """Within, what Keras makes for a weight is told: by the weight's id, its tensors by name."""
    kept: dict[int, dict[str, Tensor]] = {}
    make = own.add_variable_from_reference

    def recorded(reference_variable: Any, *arguments: Any, **keywords: Any) -> Any:
        made = make(reference_variable, *arguments, **keywords)
        slots = kept.setdefault(id(reference_variable), {})
        name = arguments[0] if arguments else keywords.get("name")
        slots[f"{len(slots)}.{name or 'var'}"] = made.value
        return made

    own.add_variable_from_reference = recorded
    try:
        yield kept
    finally:
        del own.add_variable_from_reference


def _copy(whose: str, mine: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    now, was = ({n: tuple(t.shape) for n, t in values.items()} for values in (mine, saved))
    if now != was:
        raise RequestError(
            asked="to resume from a checkpoint",
            found=f"other values kept for {whose}: {now}, were {was}",
            why="the state is taken up name by name",
            do="resume with the optimizer as it was, or start anew in another folder",
        )
    for name, tensor in mine.items():
        tensor.copy_(saved[name])


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
