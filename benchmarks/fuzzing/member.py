"""A warm rank: it stays, and is a member of one training after another, each with its own groups.

Started by `team.py` in the fork server. What it does of a job is what the worker of the command
does, through the same public calls: the trainer, what it resumes from, the loop, the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

import torch
from drawn_task import Drawn
from torch import Tensor

from allranks.errors import AllranksError, RequestError
from allranks.job.job import Job, with_settings
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.checkpoint.state import saved_names
from allranks.torch.model.weights import weights_sha256
from allranks.torch.random.keyed_rng import seed_generators
from allranks.training.rank_program import fit

TRAINED, REFUSED, BROKEN = "trained", "refused", "broken"
AVERAGE = "average of "


@dataclass(frozen=True)
class Answer:
    """What became of a training on this rank; `tensors` are the leader's alone."""

    what: str
    why: str = ""
    tensors: dict[str, Any] | None = None
    loss: float = 0.0
    sha256: str = ""


def main(argument: dict[str, Any]) -> None:
    """Answer with the end of each job that comes, until nobody asks any more."""
    torch.set_num_threads(1)
    with Client(argument["address"]) as line:
        line.send(argument["rank"])
        while True:
            try:
                job, world = line.recv()
            except EOFError:
                return
            line.send(answer(job, world))


def answer(job: Job, world: World) -> Answer:
    """Train as one rank of a job."""
    try:
        return _trained(job, world)
    except RequestError as error:
        return Answer(REFUSED, error.why)
    except Exception as error:
        why = str(error).partition("\n")[0]
        kind = "" if isinstance(error, AllranksError) else f"{type(error).__name__}: "
        return Answer(BROKEN, kind + why)


def _trained(job: Job, world: World) -> Answer:
    seed_generators(job.seed)
    task = with_settings(Drawn, job.task, "a task that is drawn")
    with Trainer(task, job, world=world, report=lambda event, **values: None) as trainer:
        trainer.rehearse()
        if job.run_dir:
            trainer.resume()
        fit(trainer)
        tensors, average = _numbers(trainer), trainer.strategy.step.average
        if average is not None:
            with average.in_place():
                tensors |= {f"{AVERAGE}{name}": t for name, t in _numbers(trainer).items()}
        digest = weights_sha256(trainer.weights())
        loss = trainer.progress.mean_loss
        return Answer(TRAINED, "", tensors if world.is_leader else None, loss or 0.0, digest)


def _numbers(trainer: Trainer) -> dict[str, Any]:
    """By every name that a tensor has in the files of weights: two, if it is tied."""
    names = saved_names(trainer.strategy.model)
    found = {own: _wide(tensor).numpy().copy() for own, tensor in trainer.weights()}
    return {name: tensor for own, tensor in found.items() for name in names.get(own, (own,))}


def _wide(tensor: Tensor) -> Tensor:
    """NumPy has no bfloat16."""
    return tensor.detach().cpu().to(torch.float64 if tensor.is_floating_point() else tensor.dtype)
