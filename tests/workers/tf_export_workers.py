"""What runs in the processes of the export tests: forks of a server that has TensorFlow."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "tensorflow"  # before Keras is imported, below

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from allranks.checkpoint.commit import ALONE
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.tensorflow import Task
from allranks.tensorflow.build import names_of, set_weights, streams_of, value_of, values_of
from allranks.tensorflow.machine import set_arithmetic
from allranks.tensorflow.saving import TensorFlowSaving
from allranks.training.task_fields import task_of

INPUTS = np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8)


class Held:
    """Variables of no model."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def arrays(self) -> dict[str, Any]:
        return self.values

    def load(self, state: dict[str, Any]) -> None:
        self.values = state


def saves(argument: dict[str, Any]) -> None:
    """A checkpoint of a model that was made second in its process, and the logits of that model."""
    job = Job.from_data(argument)
    set_arithmetic(job)
    task = task_of(job, Task)
    task.model()
    model = task.model()
    random = np.random.default_rng(5)
    values = {
        name: (random.random(v.shape) + 0.5).astype(value_of(v).dtype)
        for name, v in names_of(model).items()
    }
    assert "sequential_1/dense_2/kernel" in values, "its layers are numbered on"
    set_weights(model, values)
    state: Any = Held({"model": values_of(names_of(model)), "optimizer": {}})
    saving = TensorFlowSaving(
        *(task, job, ALONE, state, 0, lambda point, step: None), lambda event, **values: None
    )
    saving.save(3, {"progress": {"batch_index": 3}}, {})
    assert saving.checkpointer.wait()
    np.save(Path(job.run_dir) / "logits.npy", np.asarray(model(INPUTS, training=False)))


def resumes(argument: dict[str, Any]) -> None:
    """Load what `saves` saved; the events tell what has changed."""
    job = Job.from_data(argument["job"])
    told: list[tuple[str, dict[str, Any]]] = []
    held: Any = Held({})
    saving = TensorFlowSaving(
        *(task_of(job, Task), job, ALONE, held, 1, lambda point, step: None),
        lambda event, **values: told.append((event, values)),
    )
    states: list[dict[str, Any]] = []
    assert saving.load(states.append) == 3
    (state,) = states
    assert state["step"] == state["progress"]["batch_index"] == 3
    assert held.values["model"].keys() == state["model"].keys() != set()
    ((event, values),) = told
    assert event == "resumed" and values["changes"] == argument["changes"], values
    assert values["differs"] == {} and values["ranks_were"] == 1


def keras_reads(argument: dict[str, Any]) -> None:
    """Plain Keras, which knows nothing of the task, gives the same logits."""
    model = keras.models.load_model(argument["target"])
    _check(np.asarray(model(INPUTS, training=False)), argument)


def serving_reads(argument: dict[str, Any]) -> None:
    served = tf.saved_model.load(argument["target"])
    inputs = tf.constant(INPUTS, np.load(argument["logits"]).dtype)
    _check(served.serve(inputs).numpy(), argument)
    signature = served.signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    (logits,) = signature(**{name: inputs}).values()
    _check(logits.numpy(), argument)


def _check(logits: Any, argument: dict[str, Any]) -> None:
    wanted = np.load(argument["logits"])
    assert logits.dtype == wanted.dtype and np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(logits, wanted, rtol=1e-6, atol=1e-6)


def names_of_mirrored_variables(argument: None) -> None:
    """The same names as on one device; a value is set on every device, and read from the first."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    layers = keras.layers

    def made() -> Any:
        same = [layers.Dense(2, name="same"), layers.BatchNormalization(), layers.Dropout(0.5)]
        return keras.Sequential([keras.Input((2,)), *same])

    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    with strategy.scope():
        model = made()
    alone = made()
    ends = ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance")
    assert tuple(name.split("/")[-1] for name in names_of(model)) == ends
    assert list(streams_of(model)) == ["seed_generator/seed_generator_state"]
    values = {name: np.full(v.shape, 7.0, np.float32) for name, v in names_of(alone).items()}
    set_weights(model, values)
    for variable in names_of(model).values():
        assert [float(copy.numpy().max()) for copy in variable.value.values] == [7.0, 7.0]
    taken = values_of(names_of(model))
    set_weights(model, {name: value * 2 for name, value in taken.items()})
    assert all(value.max() == value.min() == 7.0 for value in taken.values()), "copies"
    assert {float(v.max()) for v in values_of(names_of(model)).values()} == {14.0}


def odd_weights_are_refused(argument: None) -> None:
    """Nothing is set where not all fits."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="a")])
    arrays = {name: np.ones(v.shape, np.float32) for name, v in names_of(model).items()}
    kernel, bias = arrays
    wrong = {
        r"\(3,\)": {**arrays, bias: np.ones(3, np.float32)},
        "float64": {**arrays, bias: np.ones(2)},
        "not in the model": {**arrays, "more": np.ones(2, np.float32)},
        "not in the checkpoint": {kernel: arrays[kernel]},
        "b/": {name.replace("a/", "b/"): array for name, array in arrays.items()},
    }
    before = values_of(names_of(model))
    for words, given in wrong.items():
        with pytest.raises(RequestError, match=words):
            set_weights(model, given)
    for name, value in values_of(names_of(model)).items():
        assert np.array_equal(value, before[name])
