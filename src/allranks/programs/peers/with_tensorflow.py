"""The training of a Keras task under MultiWorkerMirroredStrategy, as TensorFlow's guide has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.programs.peers.given import Notes, asked, check_task, main, shares
from allranks.training.keras_task import Task
from allranks.training.task_fields import task_of


def train() -> None:
    """From the first step to the last."""
    job, folder = asked()
    tf.config.threading.set_intra_op_parallelism_threads(job.threads or 1)
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    keras.utils.set_random_seed(job.seed % 2**32)
    task = task_of(job, Task)
    check_task(task)
    with strategy.scope():
        model, optimizer = task.model(), task.optimizer()
        optimizer.build(model.trainable_variables)
    _steps(strategy, task, model, optimizer, job, folder)


def _steps(strategy: Any, task: Task, model: Any, optimizer: Any, job: Job, folder: Path) -> None:
    arrays = _arrays(task)
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


def _arrays(task: Task) -> tuple[Any, ...]:
    data = task.train_data()
    if not isinstance(data, tuple) or not all(isinstance(part, np.ndarray) for part in data):
        raise RequestError(
            asked="a peer",
            found=f"train_data() that is a {type(data).__name__}",
            why="this script takes a tuple of arrays",
            do="bench it without --peers tf",
        )
    return data


if __name__ == "__main__":
    main(train)
