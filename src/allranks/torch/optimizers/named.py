"""Optimizers by name, where the job says one in place of the task's."""

from __future__ import annotations

import copy
from functools import partial

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from allranks.errors import RequestError
from allranks.job.deepspeed.recipe import OPTIMIZERS, read_recipe
from allranks.job.job import Job
from allranks.torch.task import Task
from allranks.training.schedules import factor_of


def with_recipe(task: Task, job: Job) -> Task:
    """The task with the optimizer and the schedule of the job, where that names them.

    Raises `RequestError` for a Keras task, and where the task plans its rate by the evaluations.
    """
    if not job.optimizer:
        return task
    asked = f"--optimizer {job.optimizer}"
    if task.as_written is not task:
        raise RequestError(
            asked=asked,
            found="a Keras task",
            why="its optimizer is one of Keras, which its model is compiled with",
            do="set it in the task, or write a torch task",
        )
    if job.schedule and task.overrides("plateau"):
        raise RequestError(
            asked=f"{asked} --schedule {job.schedule}",
            found="a task with plateau()",
            why="the rate would follow from two plans at once",
            do="leave one of them out",
        )
    task = copy.copy(task)
    object.__setattr__(task, "optimizer", partial(make_optimizer, job.optimizer))
    own = partial(factor_of, job.schedule, job.optimizer) if job.schedule else None
    if own is not None:
        object.__setattr__(task, "schedule", own)
    return task


def make_optimizer(text: str, model: nn.Module) -> Optimizer:
    """The optimizer that a text names, for all parameters of a model that are trained."""
    picked = read_recipe("--optimizer", text, OPTIMIZERS)
    values = dict(picked.options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if picked.name == "sgd":
        return SGD(parameters, **values)
    betas = values.pop("beta1"), values.pop("beta2")
    if picked.name == "adam":
        return Adam(parameters, betas=betas, **values)
    return AdamW(parameters, betas=betas, **values)
