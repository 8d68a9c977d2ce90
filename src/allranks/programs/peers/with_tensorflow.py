"""The training of a Keras task under MultiWorkerMirroredStrategy, as TensorFlow's guide has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from allranks.job.job import Job
from allranks.programs.peers.given import Notes, asked, main, shares
from allranks.programs.peers.keras_task import KerasTask


def train() -> None:
    """From the first step to the last."""
    job, folder = asked()
    tf.config.threading.set_intra_op_parallelism_threads(job.threads or 1)
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    given = KerasTask(job)
    task = given.task
    keras.utils.set_random_seed(job.seed % 2**32)
    with strategy.scope():
        model, optimizer = task.model(), task.optimizer()
        optimizer.build(model.trainable_variables)
    _steps(strategy, given, model, optimizer, job, folder)


def _steps(
    strategy: Any, given: KerasTask, model: Any, optimizer: Any, job: Job, folder: Path
) -> None:
    task, arrays = given.task, given.arrays
    rank, ranks = strategy.cluster_resolver.task_id or 0, strategy.num_replicas_in_sync
    notes = Notes(folder, rank)

    def replica(batch: Any, of_all: Any) -> Any:
        with tf.GradientTape() as tape:
            output = model(task.inputs(batch), training=True)
            losses = task.loss(output, batch)
            loss = tf.reduce_sum(losses) / of_all
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def step(batch: Any, of_all: Any) -> Any:
        losses = strategy.run(replica, args=(batch, of_all))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    for share in shares(len(arrays[0]), task, job, rank, ranks):
        batch = tuple(tf.constant(array[share.numbers]) for array in arrays)
        loss = step(batch, tf.constant(float(share.of_all)))
        notes.step(float(loss), share.of_all)
    notes.close()


if __name__ == "__main__":
    main(train)
