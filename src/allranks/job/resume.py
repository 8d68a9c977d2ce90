"""Resuming: from where a job starts when there is something to start from, and what may change.

    --run-dir RUN       RUN is there already: the same job resumes, in the same folder
    --resume PATH       a new run folder; starts from the newest good checkpoint of the run PATH, or
                        from that very checkpoint
    --resume never      start anew, and refuse a folder that is there

What is not said again stays as it was. What may be said anew without harm to the result (ranks,
place, micro-batch, how it is protected, how long it trains) is in `CHANGEABLE`; fields of the task
may be changed with --set, and are recorded; the rest is the job itself, and is refused.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.checkpoint.folder import FOLDER, committed, step_of
from allranks.checkpoint.format import BadCheckpoint, read_manifest
from allranks.errors import RequestError
from allranks.job.job import (
    FOR_CHECK,
    Job,
    Looking,
    Safety,
    Where,
    job_values,
    names_in,
    read_given,
    read_job_file,
    redacted,
)
from allranks.strategies.card import APART
from allranks.strategies.cards.data_parallel import is_late
from allranks.strategies.resolve import card_of, strategy_spec

CHECKPOINTS = FOLDER
CHANGEABLE = (
    *("steps", "micro_batch", "micro_batch_trial", "steps_per_call", "loader_workers", "prefetch"),
    *("eval_every", "early_stop", "until", "patience"),
    *names_in(Where),
    *names_in(Safety),
    *names_in(Looking),
)
HARMLESS = frozenset(CHANGEABLE) - {"steps"}
"""What changes no step of a training; rates may follow the number of steps."""
POSITION_FIELDS = ("batch_size", "shards", "last_batch")
NOT_INHERITED = ("inject", "profile", "run_dir", *FOR_CHECK)


@dataclass(frozen=True)
class Base:
    """The run that a job resumes from: its values, and the path of its checkpoints.

    `resumes` means in the same run folder; otherwise a new one branches off. `defaults` names the
    values that were not given there, those of the task as `task.lr`.
    """

    path: Path
    resumes: bool
    values: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    defaults: frozenset[str] = frozenset()


def checkpoint_folders(path: Path) -> list[Path]:
    """The folders of checkpoints for a job that starts from `path`."""
    return [path / CHECKPOINTS] if os.path.isdir(path / CHECKPOINTS) else [path]


def how_to_resume(run: Path) -> str:
    """The newest checkpoint, and the command that resumes from it; "" without one."""
    checkpoints = committed(run / CHECKPOINTS)
    if not checkpoints:
        return ""
    return f"its last checkpoint is that of step {step_of(checkpoints[0])}; {resume_command(run)}"


def resume_command(run: Path) -> str:
    """The command that resumes a run."""
    return f"resume with: allranks train --run-dir {shlex.quote(str(run))}"


def find_base(path: Path, resumes: bool) -> Base:
    """The base of a job: the run `path`, or that very checkpoint; raises `RequestError`.

    The `job.toml` of a run has its last values; a checkpoint has those of the job that saved it.
    """
    if resumes or os.path.isdir(path / CHECKPOINTS):
        job_file = path / "job.toml"
        if not resumes and not any(committed(source) for source in checkpoint_folders(path)):
            raise _nothing(path, "no checkpoint that was committed")
        if os.path.isfile(job_file):
            values, task = read_job_file(str(job_file))
            return Base(path, resumes, _inherited(values), task, _defaults(path, values, task))
    if not os.path.isdir(path):
        raise _nothing(path, "no such folder")
    checkpoint = next(iter(committed(checkpoint_folders(path)[0])), path)
    try:
        job = read_manifest(checkpoint).job
    except BadCheckpoint as error:
        raise _nothing(path, str(error)) from None
    values, task = job_values(_inherited(job), str(checkpoint))
    run = path.parent.parent if path.parent.name == CHECKPOINTS else path
    return Base(path, resumes, values, task, _defaults(run, values, task))


def _defaults(run: Path, values: dict[str, Any], task: dict[str, Any]) -> frozenset[str]:
    """The names of the values that were not given to the run, from its `job.toml` if it exists.

    Without it, they are values equal to a job's defaults; fields of a task are unknown.
    """
    defaults = {name for name, value in values.items() if value == getattr(Job(), name)}
    with suppress(RequestError):
        explicit = read_given(str(run / "job.toml"))
        there, of_task = read_job_file(str(run / "job.toml"))
        both = {**there, **{f"task.{name}": value for name, value in of_task.items()}}
        now = {**values, **{f"task.{name}": value for name, value in task.items()}}
        alike = {name for name, value in now.items() if name in both and value == both[name]}
        defaults = alike - explicit if explicit else defaults
    return frozenset(defaults)


def _inherited(job: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in job.items() if n not in NOT_INHERITED and v is not None}


def _nothing(path: Path, found: str) -> RequestError:
    return RequestError(
        asked=f"--resume {path}",
        found=found,
        why="neither a run folder with a checkpoint nor a checkpoint is there",
        do="name a run folder (see `allranks runs`), or one of its checkpoints/step-…",
    )


def changed(base: Base, job: Job) -> dict[str, list[Any]]:
    """What has changed, name -> [was, is]; raises `RequestError` where that is another job."""
    changes: dict[str, list[Any]] = {}
    for name, now in job.to_data().items():
        was = base.values.get(name, getattr(Job(), name))
        if name in ("task", "resume", *NOT_INHERITED) or was == now:
            continue
        if name == "program" and was == "":
            continue  # a loop of one's own saved it: it knows no program
        if name == "program" and Path(str(was)).resolve() == Path(str(now)).resolve():
            continue
        if name not in CHANGEABLE or (name == "device" and job.bitwise):
            flag = "PROGRAM" if name == "program" else "--" + name.replace("_", "-")
            raise _refused(base, f"{flag} {now}", f"{name} = {was} in its job", flag)
        changes[name] = [was, now]
    _check_strategies(base, job)
    return changes


def changed_fields(base: Base, fields: dict[str, Any]) -> dict[str, list[Any]]:
    """The fields of the task that are not as they were; raises for those that place the data."""
    changes = {}
    for name, now in redacted(fields).items():
        was = base.task.get(name, now)
        was = None if was == "none" and now is None else was
        if was == now or (was != was and now != now):
            continue
        if name in POSITION_FIELDS:
            raise _refused(
                base, f"--set {name}={now}", f"{name} = {was} in its job", f"--set {name}"
            )
        changes[f"task.{name}"] = [was, now]
    return changes


def _check_strategies(base: Base, job: Job) -> None:
    was, now = card_of(base.values.get("strategy", job.strategy)), job.strategy_spec.card
    if was.state != now.state:
        raise RequestError(
            asked=f"--strategy {job.strategy}, from {base.path}",
            found=f"a checkpoint of {was.name!r}: {was.state}",
            why=f"{now.name!r} keeps another state: {now.state}",
            do=f"resume with --strategy {was.name}",
        )
    text = base.values.get("strategy", job.strategy)
    before = strategy_spec(text, base.values.get("ranks", 1))
    late = [is_late(spec.options) and spec.options["late"] for spec in (before, job.strategy_spec)]
    if late[0] != late[1]:
        raise RequestError(
            asked=f"--strategy {job.strategy}, from {base.path}",
            found=f"a checkpoint of {before}",
            why="with late=1 it holds a gradient that is not applied yet, else it has none; and "
            "what a step applies follows from the step",
            do=f"resume with --strategy {before}",
        )
    if now.state == APART and job.ranks != base.values.get("ranks", 1):
        raise _refused(
            base,
            f"--ranks {job.ranks} with {now.name}",
            f"{base.values.get('ranks', 1)} ranks that trained apart",
            "--ranks",
        )


def _refused(base: Base, asked: str, found: str, flag: str) -> RequestError:
    return RequestError(
        asked=f"{asked}, from {base.path}",
        found=found,
        why="its data order, random numbers and weights follow from that value",
        do=f"leave {flag} out, or start anew in another folder with --resume never",
    )
