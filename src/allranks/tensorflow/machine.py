"""The machine under a training with TensorFlow: its devices, its threads, how numbers are kept.

TensorFlow takes all this once in a process, before its first operation. Where it has begun already
(a notebook), what is there is used if it is enough, and refused if not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.training.keras_task import Task

# --- quiet ---------------------------------------------------------------------------------------
# Hide what TensorFlow's C++ writes to standard error at its start; show it if the start fails.
#
# Its notes on instructions and missing drivers cannot be disabled, and would precede every run.
# They bypass Python, so the file descriptor itself is redirected.


STDERR = 2


@contextmanager
def quietly() -> Iterator[None]:
    """Hold back standard error; write what was held back if the block raises."""
    sys.stderr.flush()
    saved = os.dup(STDERR)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), STDERR)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            aside.seek(0)
            os.write(saved, aside.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, STDERR)
            os.close(saved)


POLICIES = {
    "fp32": "float32",
    "tf32": "float32",
    "bf16": "mixed_bfloat16",
    "fp16": "mixed_float16",
    "fp64": "float64",
}


def set_threads(threads: int) -> None:
    """Set the threads of one operation, and enough parallel operations for a collective."""
    config = tf.config.threading
    try:
        config.set_intra_op_parallelism_threads(threads)
        config.set_inter_op_parallelism_threads(max(2, threads))
    except RuntimeError:  # it has begun: the threads are what they are
        return


def devices_for(job: Job, replicas: int) -> list[str]:
    """The names of `replicas` devices of this process; raises `RequestError` if there are fewer."""
    take_devices(job, replicas)
    names = [
        d.name for d in tf.config.list_logical_devices("CPU" if job.device == "cpu" else "GPU")
    ]
    if len(names) < replicas:
        raise begun(job, f"{len(names)} devices")
    return names[:replicas]


def take_devices(job: Job, replicas: int, local_rank: int = 0, ranks_here: int = 1) -> None:
    """Leave this process `replicas` devices, without a first operation; raises `RequestError`.

    On the CPU they are logical devices that share its cores. Of the GPUs rank r takes the r-th.
    """
    if job.device == "cpu":
        _take_logical_cpus(replicas)
        return
    gpus = tf.config.list_physical_devices("GPU")
    needed = ranks_here if replicas == 1 else replicas
    if len(gpus) < needed:
        raise RequestError(
            asked=f"--device {job.device} --strategy {job.strategy} --ranks {job.ranks}",
            found=f"{len(gpus)} GPUs that TensorFlow can use",
            why="every replica needs a GPU of its own",
            do="--device cpu, or fewer ranks or replicas",
        )
    chosen = [gpus[local_rank]] if replicas == 1 else gpus[:replicas]
    try:
        tf.config.set_visible_devices(chosen, "GPU")
        for gpu in chosen:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise begun(job, str(error)) from error


def _take_logical_cpus(replicas: int) -> None:
    with quietly():  # it looks for GPUs, and says so where there are none
        cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_visible_devices([], "GPU")
        if replicas > 1:
            parts = [tf.config.LogicalDeviceConfiguration()] * replicas
            tf.config.set_logical_device_configuration(cpu, parts)
    except RuntimeError:
        return  # it has begun: what there is may be enough


def set_arithmetic(job: Job) -> Callable[[], None]:
    """Set the job's precision in Keras and TensorFlow; returns a function that restores it."""
    floats, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64" if job.precision == "fp64" else "float32")
    keras.config.set_dtype_policy(POLICIES[job.precision])
    tensor_floats = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(job.precision == "tf32")

    def undo() -> None:
        keras.config.set_floatx(floats)
        keras.config.set_dtype_policy(policy)
        tf.config.experimental.enable_tensor_float_32_execution(tensor_floats)

    return undo


def check_backend() -> None:
    """Raise `RequestError` unless Keras computes with TensorFlow in this process."""
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise RequestError(
            asked="a Keras task with the TensorFlow engine",
            found=f"Keras computes with {backend} in this process",
            why="it takes its backend once, when it is imported",
            do="set KERAS_BACKEND=tensorflow before that, or use `allranks train`, which does",
        )


def begun(job: Job, found: str) -> RequestError:
    return RequestError(
        asked=f"--strategy {job.strategy} in a process where TensorFlow has begun",
        found=found,
        why="it takes its devices once, before its first operation",
        do="make the Trainer before anything else uses TensorFlow, or use `allranks train`",
    )


def described(value: Any) -> str:
    """A short description of a user's value, by its type."""
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def flip_one_bit(variable: Any) -> None:
    """Flip one bit of the mantissa of the first value, as a failing chip would."""
    values = np.array(variable)
    values.reshape(-1)[:1].view(np.uint8)[-2] ^= 1
    variable.assign(values)


# --- limits --------------------------------------------------------------------------------------
# What of a task this engine does not do: refused by name, before anything is built.


def check_task_limits(task: Task) -> None:
    """Raise `RequestError` for what only the torch engine does."""
    if task.ema is not None:
        raise RequestError(
            asked=f"ema = {task.ema} with the TensorFlow engine",
            found="a moving average of the weights",
            why="this engine keeps none, and evaluates the weights themselves",
            do="--set ema=none, or --engine torch",
        )
    if task.loss_over != "sample":
        raise RequestError(
            asked=f'loss_over = "{task.loss_over}" with the TensorFlow engine',
            found="a loss that couples the samples of all ranks",
            why="outputs are not gathered here",
            do="--engine torch",
        )
