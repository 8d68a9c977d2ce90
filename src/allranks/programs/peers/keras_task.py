"""A task of Keras, as the peer that trains with TensorFlow takes it.

python -m allranks.programs.peers.keras_task JOB.json       what of it no peer does, in words
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.programs.peers.given import asked_job, check_task, main
from allranks.training.keras_task import Task
from allranks.training.task_fields import task_of


class KerasTask:
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


if __name__ == "__main__":
    main(lambda: KerasTask(asked_job()))
