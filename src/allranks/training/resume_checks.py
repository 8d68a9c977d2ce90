"""Resuming from a checkpoint: where an engine looks for one, and what must be as it was.

`resume` says what of a job may change; here a checkpoint that was loaded is held against the job
that goes on from it, on every rank alike, before anything of it is taken up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.checkpoint.format import About
from allranks.checkpoint.newest import Loaded
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.job_file import redacted
from allranks.job.program import by_name
from allranks.job.resume import CHECKPOINTS, Base, changed, changed_fields, checkpoint_folders
from allranks.training.task_fields import TaskFields, plain_fields


@dataclass(frozen=True)
class ResumeChanges:
    """What is not as it was, name -> [was, is]: of the job and its task, and of what is around."""

    job: dict[str, list[Any]]
    facts: dict[str, list[Any]]


def sources_for(job: Job) -> list[Path]:
    """Where the checkpoint of a job may lie: its own run folder first, then what it resumes."""
    own_folder = Path(job.run_dir) / CHECKPOINTS
    return [own_folder, *(checkpoint_folders(Path(job.resume)) if job.resume else [])]


def about_of(
    task: TaskFields,
    job: Job,
    progress: dict[str, Any],
    facts: dict[str, Any],
    metrics: dict[str, float],
) -> About:
    """What a checkpoint says of the job that makes it."""
    of_job = {**job.to_data(), "task": redacted(plain_fields(task))}
    return About(of_job, progress, facts, metrics)


def changes_since(
    loaded: Loaded, task: TaskFields, job: Job, facts: dict[str, Any], deciding: Iterable[str]
) -> ResumeChanges:
    """What has changed since a checkpoint was made; raises `RequestError` for another job.

    `deciding` are the facts that decide which bits come out.
    """
    was = loaded.manifest.job
    base = Base(loaded.path, False, was, was.get("task", {}))
    fields = changed_fields(base, plain_fields(task))
    of_job = {**changed(base, job), **fields}
    return ResumeChanges(of_job, differing(loaded.manifest.facts, facts, deciding, job.bitwise))


def differing(
    was: dict[str, Any], now: dict[str, Any], deciding: Iterable[str], bitwise: bool
) -> dict[str, list[Any]]:
    """The facts that are not as they were, name -> [was, is]; raises where bits are promised.

    A module of the user's that is not imported yet may come later: it has not changed.
    """
    was, now = by_name(was), by_name(now)
    names = [name for name in was if name in now or not name.startswith("module ")]
    changes = {name: [was[name], now.get(name)] for name in names if was[name] != now.get(name)}
    name = next((name for name in deciding if name in changes), "")
    if bitwise and name:
        raise RequestError(
            asked="to resume with --bitwise",
            found=f"{name} is {changes[name][1]}; the checkpoint was made with {changes[name][0]}",
            why="the bits of a step follow from it",
            do="resume where it was, or start anew without --bitwise and --resume PATH",
        )
    return changes


def check_ends_later(job: Job, done: int, total: int | None) -> None:
    """Raise `RequestError` where a job asks for fewer steps than it goes on from."""
    if total is None or done <= total:
        return
    limit = f"--steps {job.steps}" if job.steps is not None else f"epochs that are {total} steps"
    raise RequestError(
        asked=f"{limit}, from {job.resume or job.run_dir}",
        found=f"its newest checkpoint, after step {done}",
        why="a training goes on, never back: the result would be that of other steps than asked",
        do=f"--steps {done} or more, or start at an earlier checkpoint in another folder: "
        "--resume RUN/checkpoints/step-…",
    )


def check_not_asked_for(job: Job) -> None:
    """No checkpoint is whole: raise `RequestError` if the job says to start from one."""
    if job.resume:
        raise RequestError(
            asked=f"--resume {job.resume}",
            found="no checkpoint in it whose digests hold",
            why="starting anew instead would pass over what was asked",
            do="see `allranks checkpoints verify` for what is wrong with each",
        )
