"""What goes wrong in a loop of one's own over a `Trainer`, and what there is to say then."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence, Set
from typing import Any

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.launcher.other_launchers import tasks_not_started
from allranks.launcher.world import Visible
from allranks.training.progress import Progress


def check_own_loop(job: Job, ranks: int) -> None:
    """Raise `RequestError` for what only `allranks train` and `launch` do with a job."""
    if job.ranks not in (1, ranks):
        raise RequestError(
            asked=f"Trainer(task, Job(ranks={job.ranks}))",
            found=f"{ranks} rank{'s' * (ranks > 1)} (WORLD_SIZE)",
            why="a Trainer is one rank: it joins those that were started, and starts none",
            do=f"torchrun --nproc-per-node {job.ranks} SCRIPT, or "
            f"allranks.launch(task, ranks={job.ranks})",
        )
    if job.devices:
        raise RequestError(
            asked=f"Trainer(task, Job(devices={job.devices!r}))",
            found="a loop of one's own",
            why="which devices a process sees is decided before it is started, by its launcher",
            do=f"{Visible.VARIABLE}={job.devices} python SCRIPT, or "
            f"allranks.launch(task, devices={job.devices!r})",
        )
    if job.log:
        raise RequestError(
            asked=f"Trainer(task, Job(log={job.log!r}))",
            found="a loop of one's own",
            why="these files are written by the loop of `allranks train` and allranks.launch",
            do="write what step(batch) returns, on the leader: trainer.world.is_leader",
        )


def tell_alone() -> None:
    """Warn of a process that trains alone in a job of Slurm which asked for several tasks."""
    if (tasks := tasks_not_started(os.environ)) > 1:
        warnings.warn(
            f"this process trains alone, and this job of Slurm asked for {tasks} tasks: "
            "`srun python SCRIPT` starts one process for each",
            stacklevel=3,
        )


def tell_ignored(job: Job, called: Set[str], done: Progress) -> None:
    """Warn of what a job asked for and a loop of one's own never did."""
    options: dict[str, dict[str, Any]] = {
        "evaluate_if_due": {
            "eval_every": job.eval_every,
            "early_stop": job.early_stop,
            "until": job.until,
        },
        "save_if_due": {"checkpoint_every": job.checkpoint_every},
    }
    for method, asked in options.items():
        ignored = [f"{name}={value!r}" for name, value in asked.items() if value]
        if ignored and method not in called and done.batch_index:
            warnings.warn(
                f"Job({', '.join(ignored)}) did nothing in this loop, which never called "
                f"trainer.{method}(…) after a step",
                stacklevel=3,
            )


def no_batch(given: Any) -> RequestError:
    """What to say to who trains with data of his own."""
    return RequestError(
        asked="step(batch)",
        found=f"a {type(given).__name__} for a batch",
        why="which samples a step uses, and which rank has which of them, is decided by the engine",
        do="for batch in trainer.batches(): trainer.step(batch); "
        "the data is what train_data() gives",
    )


def nothing_left(asked: Sequence[str], done: Progress) -> RequestError:
    """What to say to who asks again for what has been trained already."""
    return RequestError(
        asked=f"batches({', '.join(asked)})",
        found=f"a training that has made {done.batch_index} steps, and is in epoch {done.epoch}",
        why="epochs and steps count from the start of the job, so that one that was stopped ends "
        "where it would have",
        do="one loop over batches() for all of it, or batches(epochs=1), then batches(epochs=2), …",
    )
