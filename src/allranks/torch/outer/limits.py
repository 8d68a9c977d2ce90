"""What a task and a job cannot have where learners train apart between two meetings."""

from __future__ import annotations

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.mesh import LEARNER
from allranks.torch.model.layers import normalising_layers
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task


def for_learners(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """The error for what needs all ranks in each step; `None` for any other job."""
    if LEARNER not in dict(strategy.mesh.axes):
        return None
    if task.ema is not None:  # of one learner, too: its own weights are not what is kept
        return _refused(
            job,
            "a moving average of the weights (ema)",
            "it would be that of one learner: the outer optimizer moves other weights",
        )
    if strategy.mesh.size(LEARNER) == 1:
        return None
    whole = task.batchnorm == "whole" and bool(normalising_layers(strategy.model))
    found = {
        'loss_over = "batch"': (
            task.loss_over == "batch",
            "the loss would need the outputs of all learners in every step",
        ),
        'batchnorm = "whole"': (
            whole,
            "the statistics would need the activations of all learners in every step",
        ),
        "--precision fp16": (
            job.precision == "fp16",
            "each learner would have a loss scale of its own, and a checkpoint holds one",
        ),
        "initialise()": (
            task.overrides("initialise"),
            "it is given the whole first batch, of which a learner has its part",
        ),
    }
    for what, (is_there, why) in found.items():
        if is_there:
            return _refused(job, what, why)
    return None


def _refused(job: Job, found: str, why: str) -> RequestError:
    return RequestError(
        asked=f"--strategy {job.strategy}", found=found, why=why, do="--strategy ddp"
    )


def check_stream(task: Task, strategy: Strategy) -> None:
    """Raise `RequestError` for a stream of which the rest of an epoch is to be dropped."""
    if task.last_batch == "drop" and strategy.mesh.size(LEARNER) > 1:
        raise RequestError(
            asked=f'--strategy {strategy.name} with last_batch = "drop"',
            found="a stream",
            why="no learner knows how many samples the others have left",
            do="--set last_batch=keep, or --strategy ddp",
        )
