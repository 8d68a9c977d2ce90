"""From a task to a model under a strategy: weights, keyed layers, the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.tensorflow.built import Built
from allranks.tensorflow.machine import described
from allranks.tensorflow.step.layers import swap_layers
from allranks.tensorflow.strategies.base import Strategy
from allranks.training.keras_task import Task

SUMS = "_all_reduce_sum_gradients"
OPTIMIZER = "optimizer() of the task"


def build(task: Task, job: Job, strategy: Strategy) -> Built:
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
    rate = optimizer._learning_rate
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return Built(model, optimizer, swapped, None if is_schedule else float(rate.numpy()))


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
    for rule in OPTIMIZER_RULES:
        found = rule.found(optimizer)
        if found:
            raise _refused(OPTIMIZER, found, rule.why, rule.do)
    rate = optimizer._learning_rate
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if is_schedule and task.overrides("schedule"):
        raise _refused(
            "schedule() of the task",
            f"{described(rate)} in its optimizer too",
            "two schedules would both set one learning rate",
            "leave one of them out",
        )


@dataclass(frozen=True)
class _Rule:
    """What an optimizer must not have: how it is found, "" if it is not there."""

    found: Callable[[Any], str]
    why: str
    do: str


def _own_average(optimizer: Any) -> str:
    return "use_ema=True" if optimizer.use_ema else ""


def _own_loss_scale(optimizer: Any) -> str:
    wraps = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return "a LossScaleOptimizer" if wraps else ""


def _clipped_copy(optimizer: Any) -> str:
    clips = [name for name in ("clipnorm", "clipvalue") if getattr(optimizer, name)]
    return f"{clips[0]}={getattr(optimizer, clips[0])}" if clips else ""


def _matter_of_the_engine(optimizer: Any) -> str:
    if optimizer.global_clipnorm:
        return "global_clipnorm"
    others = optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor
    return "gradient_accumulation_steps or loss_scale_factor" if others else ""


OPTIMIZER_RULES = (
    _Rule(
        _own_loss_scale,
        "the loss scale belongs to the job, which skips a step on all replicas alike",
        "return the optimizer in it, and ask for --precision fp16",
    ),
    _Rule(
        _own_average,
        "the average that Keras keeps is put in the place of the weights by `fit` alone, so "
        "neither the evaluation nor the final weights would be those of the average",
        "leave it out; with --engine torch, --set ema=0.999 keeps and evaluates one",
    ),
    _Rule(
        _clipped_copy,
        "each replica would clip its copy, of values that Keras takes for those of one device",
        "set clip_norm in the task: the norm of the whole gradient",
    ),
    _Rule(
        _matter_of_the_engine,
        "norm, global batch and loss scale are the engine's: the same on any number of ranks",
        "set clip_norm, batch_size and --micro-batch, or --precision fp16 instead",
    ),
)


def _refused(asked: str, found: str, why: str, do: str) -> RequestError:
    return RequestError(asked=asked, found=found, why=why, do=do)
