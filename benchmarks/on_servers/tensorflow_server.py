"""Plain TensorFlow: ParameterServerStrategy with a ClusterCoordinator, one batch in a step.

    TF_CONFIG='{…}' python tensorflow_server.py SIZE

The task of TF_CONFIG says what this process is: `ps` and `worker` run a server of TensorFlow's
until they are killed; the `chief` schedules steps. A step is a function on a worker: it reads the
variables from the server, computes, and updates them there. The chief prints the monotonic time at
which a quarter of the steps is over, and that at the end of all, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sizes import RATE, SAMPLES, SIZES, Size


def train(resolver: Any, size: Size) -> None:
    """Be the chief."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="relu") for width in size.widths[1:-1]]
        model = keras.Sequential(
            [keras.Input(size.widths[:1]), *hidden, keras.layers.Dense(size.widths[-1])]
        )
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def replica(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function
    def step(batches: Any) -> None:
        strategy.run(replica, args=next(batches))

    def data() -> Any:
        random = np.random.default_rng(0)
        inputs = random.standard_normal((SAMPLES, size.widths[0])).astype(np.float32)
        labels = random.integers(size.widths[-1], size=SAMPLES)
        pairs = tf.data.Dataset.from_tensor_slices((inputs, labels))
        return pairs.batch(size.batch, drop_remainder=True).repeat()

    batches = iter(coordinator.create_per_worker_dataset(data))
    times = []
    for steps in (size.steps // 4, size.steps - size.steps // 4):
        for _ in range(steps):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
        times.append(time.monotonic())
    print(json.dumps(times))


def main() -> None:
    """Be one process of the cluster."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "chief":
        train(resolver, SIZES[sys.argv[1]])
        return
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        start=True,
    )
    server.join()


main()
