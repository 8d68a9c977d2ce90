"""A Keras optimizer in the form of one of torch, as the engine steps, saves and restores it.

What Keras keeps for a weight stands in `state` under that weight, and what it keeps for none (the
number of steps) under `SHARED`: the tensors themselves, so nothing is ever copied back and forth.
The engine sets the rate in `param_groups`; a `LearningRateSchedule` of Keras goes on by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.keras.shards import KerasSetting

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
