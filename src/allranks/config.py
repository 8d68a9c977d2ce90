"""Where the values of a job come from: command line > job file > default, and nothing else.

`resolve` makes the job and remembers the source of every value; `write_toml` and `read_job_file`
are the two directions of `job.toml`, so the job of any run folder can be run again with `--job`.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.cards import resolved_strategy
from allranks.errors import RequestError, nearest
from allranks.fields import read_value
from allranks.job import DEVICES, PLACES, PRECISIONS, Job

SCHEMA = 1
NOT_SETTABLE = ("task", "trace", "replay")


@dataclass(frozen=True)
class Resolved:
    """A job, and for every value of it where it came from."""

    job: Job
    sources: dict[str, str]


def resolve(
    program: str,
    flags: dict[str, Any],
    task_settings: tuple[str, ...] = (),
    job_file: str | None = None,
) -> Resolved:
    """The job that these words describe, checked as far as it can be without its program.

    `flags` holds only what was really given; raises `RequestError` for what cannot be.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    task: dict[str, Any] = {}
    if job_file is not None:
        values, task = read_job_file(job_file)
        sources = dict.fromkeys(values, f"file {job_file}")
        sources |= {f"task.{name}": f"file {job_file}" for name in task}
    if program:
        flags = {"program": program, **flags}
    for name, value in flags.items():
        values[name], sources[name] = value, "command line"
    for setting in task_settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise RequestError(
                asked=f"--set {setting}",
                found="no '=' in it",
                why="--set gives a field of the task a value",
                do=f"--set {setting}=VALUE",
            )
        task[name], sources[f"task.{name}"] = text, "command line"
    for text in (*values.values(), *task, *task.values()):
        if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RequestError(
                asked=ascii(text),
                found="bytes that are not UTF-8",
                why="the job is recorded as text, and could not be read again",
                do="give it a name in UTF-8",
            )
    job = Job(**values, task=task)
    if not job.strategy:
        job = dataclasses.replace(job, strategy="ddp" if job.ranks > 1 else "single")
    for field in dataclasses.fields(Job):
        if field.name not in NOT_SETTABLE:
            sources.setdefault(field.name, "default")
    return Resolved(_checked(job), sources)


def _checked(job: Job) -> Job:
    """The job, if its values can be; the strategy with its options resolved."""
    if not job.program:
        raise RequestError(
            asked="allranks train",
            found="no PROGRAM, and no job file that names one",
            why="there is nothing to train",
            do="name a task: allranks train digits",
        )
    for name in ("ranks", "nodes", "micro_batch", "steps", "threads"):
        value = getattr(job, name)
        if value is not None and value < 1:
            raise _out_of_range(name, value, "at least 1")
    for name in ("seed", "loader_workers"):
        if not 0 <= getattr(job, name) < 2**63:
            raise _out_of_range(name, getattr(job, name), "0 or more")
    for name, known in (("precision", PRECISIONS), ("device", DEVICES), ("place", PLACES)):
        if getattr(job, name) not in known:
            raise RequestError(
                asked=f"--{name} {getattr(job, name)}",
                found=f"no {name} of that name in this version",
                why=f"{name} is one of {', '.join(known)}",
                do=nearest(getattr(job, name), known),
            )
    if job.nodes > 1:
        raise RequestError(
            asked=f"--nodes {job.nodes}",
            found="--place local, which is one node",
            why="this version starts the ranks of one machine only",
            do="--nodes 1",
        )
    if job.bitwise and job.threads not in (None, 1):
        raise RequestError(
            asked=f"--bitwise --threads {job.threads}",
            found=f"{job.threads} threads in each rank",
            why="the order of sums inside a kernel follows its threads",
            do="leave --threads out: --bitwise runs one thread per rank",
        )
    choice = resolved_strategy(job.strategy, ranks=job.ranks, bitwise=job.bitwise)
    return dataclasses.replace(job, strategy=str(choice))


def _out_of_range(name: str, value: int, wanted: str) -> RequestError:
    flag = "--" + name.replace("_", "-")
    return RequestError(
        asked=f"{flag} {value}",
        found=str(value),
        why=f"{flag} must be {wanted}",
        do=f"give {flag} a number that is {wanted}, or leave it out",
    )


def threads_per_rank(job: Job) -> int:
    """Intra-op threads of each rank: as asked, 1 under `bitwise`, else the cores shared out."""
    if job.threads is not None:
        return job.threads
    return 1 if job.bitwise else max(1, len(os.sched_getaffinity(0)) // job.ranks)


def read_job_file(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a job file, and those of its `[task]` table; raises `RequestError`."""
    try:
        data = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RequestError(
            asked=f"--job {path}",
            found=str(error),
            why="a job file is TOML text, as `job.toml` in a run folder",
            do="check the path and the line",
        ) from None
    schema = data.pop("schema", SCHEMA)
    data.pop("source", None)
    task = data.pop("task", {})
    if schema != SCHEMA or not isinstance(task, dict):
        raise RequestError(
            asked=f"--job {path}",
            found=f"schema {schema}",
            why=f"this version reads schema {SCHEMA}, with the task's fields in a table [task]",
            do="start from the job.toml of a run folder",
        )
    hints = {f.name: f.type for f in dataclasses.fields(Job)}
    kinds = {"str": str, "int": int, "bool": bool, "int | None": int | None}
    known = {name: kinds[str(kind)] for name, kind in hints.items() if name not in NOT_SETTABLE}
    for name, value in data.items():
        if name not in known:
            raise RequestError(
                asked=f"{name} = {value!r} in {path}",
                found=f"no value {name!r} in a job",
                why="a misspelt line must not be passed over",
                do=nearest(name, known),
            )
        data[name] = read_value(name, value, known[name], f"{name} = {value!r} in {path}")
    data.pop("run_dir", None)
    return data, task


def write_toml(values: dict[str, Any]) -> str:
    """A mapping of plain values and of tables of them as TOML; `None` is left out."""
    plain = {name: value for name, value in values.items() if not isinstance(value, dict)}
    lines = [f"{_key(n)} = {_toml(v)}" for n, v in plain.items() if v is not None]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(n)} = {_toml(v)}" for n, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text) + '"'
