"""What `tensorflow.py` starts four times by hand: the training of `first_step_task.py`, or less.

    TF_CONFIG='{…}' python first_step_script.py FILE

A loop under MultiWorkerMirroredStrategy, two steps, no log and no file of weights. Worker 0 writes
the time of the end of the first step, and the number of workers, to FILE.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH = 32


def main(first: Path) -> None:
    """Two steps as one worker."""
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    workers = strategy.num_replicas_in_sync
    worker = strategy.cluster_resolver.task_id
    with strategy.scope():
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((8,)), dense(16, activation="relu"), dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    share = BATCH // workers
    own = slice(worker * share, (worker + 1) * share)
    inputs, targets = np.ones((64, 8), np.float32)[own], np.ones(64, np.float32)[own]

    def replica(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            output = model(inputs, training=True)
            loss = tf.reduce_sum(keras.ops.square(output[:, 0] - targets)) / BATCH
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def step(inputs: Any, targets: Any) -> Any:
        losses = strategy.run(replica, args=(inputs, targets))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    for number in range(2):
        float(step(inputs, targets))
        if number == 0 and worker == 0:
            first.write_text(f"{time.monotonic()} {workers}")


main(Path(sys.argv[1]))
