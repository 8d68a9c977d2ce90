"""What of a task this engine does not do: refused by name, before anything is built."""

from __future__ import annotations

from allranks.errors import RequestError
from allranks.training.keras_task import Task


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
    if task.overrides("plateau"):
        raise RequestError(
            asked="plateau() of the task with the TensorFlow engine",
            found="a learning rate that follows the evaluations",
            why="this engine takes its rate from schedule(step) alone",
            do="--engine torch, or schedule(step)",
        )
