"""The training of a Keras task under MultiWorkerMirroredStrategy, as TensorFlow's guide has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from peer_job import Notes, check_task, shares

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.training.keras_task import Task
from allranks.training.task_fields import task_of


class PeerTask:
    """The task of a job, and the arrays of its samples."""

    def __init__(self, job: Job) -> None:
        self.task = task_of(job, Task)
        check_task(self.task)
        self.arrays = _arrays(self.task)


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


def train(job: Job, folder: Path, peer: str) -> None:
    """From the first step to the last."""
    tf.config.threading.set_intra_op_parallelism_threads(job.threads or 1)
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    given = PeerTask(job)
    task = given.task
    keras.utils.set_random_seed(job.seed % 2**32)
    with strategy.scope():
        model, optimizer = task.model(), task.optimizer()
        optimizer.build(model.trainable_variables)
    _steps(strategy, given, model, optimizer, job, folder)


def _steps(
    strategy: Any, given: PeerTask, model: Any, optimizer: Any, job: Job, folder: Path
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

    @tf.function(reduce_retracing=True)
    def step(batch: Any, of_all: Any) -> Any:
        losses = strategy.run(replica, args=(batch, of_all))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    for share in shares(len(arrays[0]), task, job, rank, ranks):
        batch = tuple(tf.constant(array[share.numbers]) for array in arrays)
        loss = step(batch, tf.constant(float(share.of_all)))
        notes.step(float(loss), share.of_all)
    notes.close()
