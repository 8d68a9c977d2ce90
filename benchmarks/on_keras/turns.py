"""The process of one loop of `tensorflow.py`: runs a block of steps whenever it is told to."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection

import tensorflow as tf
from loops import LOOPS
from workloads import WORKLOADS


def take_turns(
    name: str,
    end: Connection,
    workload: str,
    batch: int,
    replicas: int,
    per_call: int,
    checked_steps: int,
) -> None:
    """Send (mean loss of the first steps, tolerance); then, for each number of steps, seconds."""
    _take_devices(replicas)
    assert WORKLOADS[workload].batch == batch
    loop = LOOPS[name](WORKLOADS[workload], replicas, per_call)
    end.send((loop.first_loss(checked_steps), loop.workload.tolerance))
    gc.collect()
    gc.freeze()
    try:
        while True:
            end.send(loop.run(end.recv()))
    except EOFError:  # nobody asks any more
        loop.close()


def _take_devices(replicas: int) -> None:
    """As many logical devices of the CPU as there are replicas."""
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, parts)
