"""From a task to a model under a strategy: weights, keyed layers, the optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.tensorflow.machine import described
from allranks.tensorflow.step.layers import swap_layers
from allranks.tensorflow.strategies.base import BuiltKerasModel, TensorFlowStrategy
from allranks.training.keras_task import Task

SUMS = "_all_reduce_sum_gradients"
OPTIMIZER = "optimizer() of the task"


def build(task: Task, job: Job, strategy: TensorFlowStrategy) -> BuiltKerasModel:
    """Build under the scope of a strategy; every rank calls this, and draws the same weights."""
    keras.utils.set_random_seed(job.seed % 2**32)
    with strategy.scope():
        model = task.model()
        _check_model(model)
        _load_pretrained(task, model)
        swapped = swap_layers(model)
        optimizer = task.optimizer()
        _check_optimizer(task, optimizer)
        optimizer.build(strategy.trained(model))
        take_sums_as_they_are(optimizer)
    has_rate = not _has_own_schedule(optimizer)
    made_rate = float(optimizer._learning_rate.numpy()) if has_rate else None
    return BuiltKerasModel(model, optimizer, swapped, made_rate)


def _has_own_schedule(optimizer: Any) -> bool:
    """Whether a schedule of Keras sets its rate."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    return isinstance(optimizer._learning_rate, schedule)


def take_sums_as_they_are(optimizer: Any) -> None:
    """Let an optimizer apply gradients that are summed over the replicas already.

    Keras sums them itself when it applies them, before anybody could divide by the weight of the
    whole batch, or clip. There is no public way to say that it need not.
    """
    if not hasattr(optimizer, SUMS):
        raise _refused(
            OPTIMIZER,
            f"an optimizer of Keras {keras.__version__} that does not sum by {SUMS}",
            "the gradients would be summed twice",
            "install the Keras that constraints.txt of allranks names",
        )
    setattr(optimizer, SUMS, list)


def let_sum_again(optimizer: Any) -> None:
    """Undo `take_sums_as_they_are`: the optimizer is Keras' own again."""
    vars(optimizer).pop(SUMS, None)


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise _refused(
            "model() of the task",
            described(model),
            "this engine trains Keras models",
            "return a keras.Model, or give a torch task to the torch engine",
        )
    if not model.built or not model.trainable_variables:
        raise _refused(
            "model() of the task",
            "a model without weights to train" if model.built else "a model that is not built",
            "its weights are made before the first step, in the scope of the strategy",
            "begin it with keras.Input(shape), or call build(shape) on it",
        )


def _load_pretrained(task: Task, model: Any) -> None:
    path = task.pretrained()
    if path is None:
        return
    if not Path(path).is_file():
        raise _refused(
            f"pretrained weights of {path}",
            "no file there",
            "weights are read from a file that Keras wrote",
            "give the path of a .weights.h5 or .keras file",
        )
    try:
        model.load_weights(path)
    except (ValueError, OSError, KeyError) as error:
        raise _refused(
            f"pretrained weights of {path}",
            f"{type(error).__name__}: {error}"[:400],
            "they must be those of this model, layer by layer",
            "write them with model.save_weights(…) of the same model",
        ) from error


def _check_optimizer(task: Task, optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise _refused(
            OPTIMIZER,
            described(optimizer),
            "a Keras model is updated by an optimizer of Keras",
            "return for example keras.optimizers.AdamW(3e-4)",
        )
    _check_settings(optimizer)
    ours = [name for name in ("schedule", "plateau") if task.overrides(name)]
    if ours and _has_own_schedule(optimizer):
        raise _refused(
            f"{ours[0]}() of the task",
            f"{described(optimizer._learning_rate)} in its optimizer too",
            "two schedules would both set one learning rate",
            "leave one of them out",
        )


def _check_settings(optimizer: Any) -> None:
    """Raise `RequestError` for a setting by which Keras would do what the engine does."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise _refused(
            OPTIMIZER,
            "a LossScaleOptimizer",
            "the loss scale belongs to the job, which skips a step on all replicas alike",
            "return the optimizer in it, and ask for --precision fp16",
        )
    if optimizer.use_ema:
        raise _refused(
            OPTIMIZER,
            "use_ema=True",
            "the average that Keras keeps is put in the place of the weights by `fit` alone, so "
            "neither the evaluation nor the final weights would be those of the average",
            "leave it out; with --engine torch, --set ema=0.999 keeps and evaluates one",
        )
    for name in ("clipnorm", "clipvalue"):
        if limit := getattr(optimizer, name):
            raise _refused(
                OPTIMIZER,
                f"{name}={limit}",
                "each replica would clip its copy, of values that Keras takes for those of one "
                "device",
                "set clip_norm in the task: the norm of the whole gradient",
            )
    others = optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor
    if optimizer.global_clipnorm or others:
        is_norm = bool(optimizer.global_clipnorm)
        raise _refused(
            OPTIMIZER,
            "global_clipnorm" if is_norm else "gradient_accumulation_steps or loss_scale_factor",
            "norm, global batch and loss scale are the engine's: the same on any number of ranks",
            "set clip_norm, batch_size and --micro-batch, or --precision fp16 instead",
        )


def _refused(asked: str, found: str, why: str, do: str) -> RequestError:
    return RequestError(asked=asked, found=found, why=why, do=do)


# --- names ---------------------------------------------------------------------------------------
# What the variables of a model are called in a checkpoint, and their values as arrays and back.
#
# A name is the path that Keras gives a variable: `sequential/dense_1/kernel`. Keras counts the
# layers of a process, so the same model made a second time there has other numbers in its paths
# (`dense_3`). Where names differ by such numbers alone, variables are taken in their order.


Array = NDArray[Any]
_COUNTED = re.compile(r"_[0-9]+(?=[_/@]|$)")


def names_of(model: Any) -> dict[str, Any]:
    """The weights of a Keras model, trained or not, by name; in the order of the model."""
    return unique_names(model.weights)


def streams_of(model: Any) -> dict[str, Any]:
    """The other variables of a model: the states from which its layers draw random numbers."""
    weights = {id(variable) for variable in model.weights}
    return unique_names(v for v in model.variables if id(v) not in weights)


def unique_names(variables: Iterable[Any]) -> dict[str, Any]:
    """Keras variables by path; where two have the same, the later ones get `@` and their place."""
    by_name: dict[str, Any] = {}
    for place, variable in enumerate(variables):
        name = str(variable.path)
        by_name[f"{name}@{place}" if name in by_name else name] = variable
    return by_name


def values_of(variables: Mapping[str, Any]) -> dict[str, Array]:
    """Copies of the values of variables; of one that lies on several devices, the first's."""
    return {name: value_of(variable) for name, variable in variables.items()}


def value_of(variable: Any) -> Array:
    """A copy of the value of a Keras variable, or of one of TensorFlow."""
    return copies_of(variable, 1)[0]


def copies_of(variable: Any, count: int) -> list[Array]:
    """Copies of the values of a variable on the first `count` devices of this process.

    What is there once is the same for all of them.
    """
    inner = getattr(variable, "value", variable)
    inner = inner() if callable(inner) else inner
    copies = getattr(inner, "values", None)
    copies = copies if isinstance(copies, (tuple, list)) else [inner] * count
    return [np.array(tf.convert_to_tensor(copy)) for copy in copies[:count]]


def set_weights(model: Any, arrays: Mapping[str, Array]) -> None:
    """Give the weights of a model the values that `values_of(names_of(model))` once had."""
    set_values(names_of(model), arrays, "the weights of the model")


def set_values(variables: Mapping[str, Any], arrays: Mapping[str, Array], subject: str) -> None:
    """Give every variable its array. Raises `RequestError`, before any is set, if they do not fit.

    `subject` names the variables in the error.
    """
    pairs = _paired(variables, arrays, subject)
    for name, variable, array in pairs:
        shape, dtype = tuple(variable.shape), tf.as_dtype(variable.dtype).name
        if (shape, dtype) != (array.shape, array.dtype.name):
            problem = f"{name} is {array.dtype.name} {array.shape} there, and {dtype} {shape} here"
            raise _unlike(subject, problem)
    for _, variable, array in pairs:
        variable.assign(array)


def _paired(
    variables: Mapping[str, Any], arrays: Mapping[str, Array], subject: str
) -> list[tuple[str, Any, Array]]:
    if variables.keys() == arrays.keys():
        return [(name, variable, arrays[name]) for name, variable in variables.items()]
    if [_uncounted(name) for name in variables] != [_uncounted(name) for name in arrays]:
        odd = next(iter([*(arrays.keys() - variables.keys()), *(variables.keys() - arrays.keys())]))
        where = "not in the model" if odd in arrays else "not in the checkpoint"
        raise _unlike(subject, f"{odd} is {where}")
    both = zip(variables.items(), arrays.values(), strict=True)
    return [(name, variable, array) for (name, variable), array in both]


def _uncounted(name: str) -> str:
    return _COUNTED.sub("", name)


def _unlike(subject: str, found: str) -> RequestError:
    return RequestError(
        asked=f"to take {subject} from a checkpoint",
        found=found,
        why="weights of another name, shape or type are those of another model",
        do="build the model as it was when they were saved, or start afresh",
    )
