"""`allranks sweep PROGRAM --set lr=1e-3,3e-4 --slots 2`: a job for every combination of values."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.cli.display.progress import say
from allranks.cli.options import COMMON, Verb, option_groups, training_options
from allranks.cli.train import resolved_words
from allranks.errors import Interrupted, ProgramError, RequestError, Stopped, printable
from allranks.job.config import threads_per_rank
from allranks.job.job import Job, Numerics, Training, names_in, read_job_file, redacted
from allranks.job.limits import devices_of
from allranks.job.program import PROGRAM, file_sha256
from allranks.job.run_folder import rank_events_path, read_rows
from allranks.launcher.start import fields_of, look_at_program, new_run_dir
from allranks.strategies.choice import TRUTH, split_outside_brackets
from allranks.tools.sweep import (
    DONE,
    FAILED,
    INTERRUPTED,
    Slot,
    SweepJob,
    locked_folder,
    result_of,
    run_jobs,
    share_out,
)

SWEEP_OPTIONS = ("slots", "run_dir", "dry_run", "as_object")
NOT_SWEPT = ("set", "job", "resume", "inject", "json", *SWEEP_OPTIONS)
DECIDES = (*names_in(Training), *names_in(Numerics), "strategy", "ranks", "device", "threads")
"""The values of a job that decide its result."""
FIELDS = "sweep fields and options"
LONGEST_NAME = 150


@dataclass(frozen=True)
class Axis:
    """What is swept: an option of the command or, without one, a field of the task; its values."""

    name: str
    values: tuple[str, ...]
    option: click.Option | None

    def words(self, value: str) -> list[str]:
        """The words of `allranks train` for one value."""
        if self.option is None:
            return [f"--set={self.name}={value}"]
        if not self.option.is_flag:
            return [f"{self.option.opts[0]}={value}"]
        if value.lower() not in TRUTH:
            raise _refused(f"--set {self.name}={value}", f"{self.name} takes true or false")
        return [self.option.opts[0]] if TRUTH[value.lower()] else []


@dataclass(frozen=True)
class SweepPlan:
    """All jobs, in the order in which they start, their slots, and the folder of their runs."""

    folder: Path
    jobs: tuple[SweepJob, ...]
    slots: tuple[Slot, ...]


@click.command(cls=Verb, groups=option_groups(), common=COMMON)
@click.argument("program", required=False)
@click.option("--slots", type=click.IntRange(min=1), help="Jobs at once (default 1).")
@click.option("--run-dir", help="Folder of all runs (default runs/PROGRAM-sweep-TIME).")
@training_options
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; run nothing.")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
@click.pass_context
def sweep(context: click.Context, /, dry_run: bool, as_object: bool, **_: Any) -> None:
    """Train PROGRAM once for each combination of --set NAME=VALUE,VALUE.

    \b
    allranks sweep digits --set lr=1e-3,3e-4 --set width=16,32 --slots 2
    allranks sweep digits --set ranks=1,2 --set seed=1,2,3 --steps 20

    NAME is a field of the task or an option of `allranks train`.
    """
    planned = plan(context)
    folder, jobs, slots = str(planned.folder), planned.jobs, planned.slots
    look_at_program(resolved_words(job.words).job for job in jobs)
    if dry_run:
        reopen(jobs)
        _print_plan(planned, as_object)
        return
    with locked_folder(planned.folder, [job.name for job in jobs]):
        reopen(jobs)
        reason = run_jobs(jobs, slots, say)
        click.echo(table(jobs), err=as_object)
        if as_object:
            data = [job.to_data() for job in jobs]
            click.echo(as_json({"sweep_dir": folder, "slots": len(slots), "jobs": data}))
    _conclude(folder, jobs, reason)


# --- the plan -----------------------------------------------------------------------------------


def plan(context: click.Context) -> SweepPlan:
    """The jobs that a command line describes, each checked as far as it can be without its task.

    No run folder is read: another sweep may write there until the folder is locked.
    """
    axes = _axes(context)
    constant = _constant_words(context, {axis.name for axis in axes})
    products = list(itertools.product(*(axis.values for axis in axes)))
    words = [
        [*constant, *(word for axis, v in zip(axes, values, strict=True) for word in axis.words(v))]
        for values in products
    ]
    first = resolved_words(words[0]).job
    slots = _slots(context, first, len(products), axes)
    program = Path(first.program.partition(":")[0]).stem
    folder = Path(context.params["run_dir"] or new_run_dir(f"{program}-sweep")).absolute()
    jobs = []
    for values, job_words in zip(products, words, strict=True):
        settings = {axis.name: value for axis, value in zip(axes, values, strict=True)}
        name, job = name_of(settings), resolved_words([*job_words, *slots[-1].words]).job
        threads = threads_per_rank(job, len(slots) * job.ranks)
        jobs.append(SweepJob(name, settings, threads, str(folder / name), tuple(job_words)))
    if len({job.name for job in jobs}) < len(jobs):
        raise _refused("--set", "one value stands there twice")
    return SweepPlan(folder, tuple(jobs), slots)


def _axes(context: click.Context) -> list[Axis]:
    """What has several values, checked against the options, and against the other settings."""
    settings = [text.partition("=")[::2] for text in context.params["settings"]]
    names = [name for name, _ in settings]
    options = {o.opts[0]: o for o in context.command.params if isinstance(o, click.Option)}
    axes = []
    for name, text in settings:
        values, flag = _values(text), f"--{name.replace('_', '-')}"
        if len(values) < 2:
            continue
        option = options.get(flag)
        for is_wrong, problem, do in (
            (not name or not all(values), "it is not NAME=VALUE,VALUE", ""),
            (name.replace("-", "_") in NOT_SWEPT, f"--{name} is not a value of a job", FIELDS),
            (names.count(name) > 1, "two --set have this name", "write all values after one name"),
            (_is_given(context, option), f"{flag} is given too", "say it in one place"),
        ):
            if is_wrong:
                raise _refused(f"--set {name}={text}", problem, do)
        axes.append(Axis(name, tuple(values), option))
    if not axes:
        raise _refused("allranks sweep", "no --set with several values")
    return axes


def _values(text: str) -> list[str]:
    """The values of one setting: a strategy in brackets may have commas of its own."""
    try:
        return split_outside_brackets(text)
    except ValueError:
        return [text]


def _is_given(context: click.Context, option: click.Option | None) -> bool:
    return option is not None and context.params[str(option.name)] is not None


def _constant_words(context: click.Context, swept: set[str]) -> list[str]:
    """The words of `allranks train` for everything that is the same in all jobs."""
    words = []
    for parameter in context.command.params:
        value, flag = context.params[str(parameter.name)], parameter.opts[0]
        if parameter.name in SWEEP_OPTIONS or value is None or value is False:
            continue
        if not isinstance(parameter, click.Option):
            words.append(str(value))
        elif parameter.is_flag:
            words.append(flag)
        elif parameter.name == "settings":
            words += [f"{flag}={text}" for text in value if text.partition("=")[0] not in swept]
        else:
            words += [f"{flag}={text}" for text in (value if parameter.multiple else [value])]
    return words


def _slots(context: click.Context, job: Job, jobs: int, axes: Sequence[Axis]) -> tuple[Slot, ...]:
    """The room there is; cores and devices are shared out where there are enough."""
    count = min(context.params["slots"] or 1, jobs)
    cores = share_out(sorted(os.sched_getaffinity(0)), count)
    are_swept = any(axis.name == "devices" for axis in axes)
    numbers = () if are_swept else devices_of(job)
    if job.device != "cpu" and count > 1 and not (numbers or are_swept):
        raise RequestError(
            asked=f"a sweep on --device {job.device} with --slots {count}",
            found="no --devices",
            why="the jobs of all slots would use the same devices, from number 0 on",
            do="name those to share out: --devices 0,1,2,3, or --slots 1",
        )
    devices = [
        (f"--devices={','.join(map(str, share))}",) if share else ()
        for share in share_out(numbers, count)
    ]
    return tuple(Slot(n, cores[n], devices[n]) for n in range(count))


# --- what is there already ----------------------------------------------------------------------


def reopen(jobs: Sequence[SweepJob]) -> None:
    """Read from the run folders which jobs are done; raises `RequestError` if one was another job.

    Threads are part of what makes the bits: they are decided once, and recorded in its `job.toml`.
    """
    started = [job for job in jobs if (Path(job.run_dir) / "job.toml").is_file()]
    planned = [resolved_words(job.words) for job in started]
    fields = fields_of([now.job for now in planned])
    for job, now, task in zip(started, planned, fields, strict=True):
        values, recorded = read_job_file(f"{job.run_dir}/job.toml")
        before = Job(**values)
        strategy = before.strategy if now.dial else now.job.strategy  # the dial has chosen already
        again = replace(now.job, strategy=strategy, threads=now.job.threads or before.threads)
        digest = file_sha256(again.program)
        rows = [*read_rows(rank_events_path(Path(job.run_dir), 0))]
        loaded = [row["machine"].get(PROGRAM) for row in rows if "machine" in row] or [digest]
        was, is_now = _deciding(before, recorded, loaded[-1]), _deciding(again, task, digest)
        if differing := [name for name in {**was, **is_now} if was.get(name) != is_now.get(name)]:
            name = differing[0]
            raise RequestError(
                asked=f"--run-dir {Path(job.run_dir).parent}",
                found=f"{job.name} was started with {name} = {was.get(name)}, not "
                f"{is_now.get(name)}",
                why="a sweep skips what is done and resumes what is not: as it was started",
                do=f"say the same words as before, name a new folder, or remove {job.run_dir}",
            )
        job.threads, job.summary = before.threads or job.threads, result_of(Path(job.run_dir))
        job.state = DONE if job.summary else job.state


def _deciding(job: Job, task: dict[str, Any], digest: str | None) -> dict[str, Any]:
    """All that decides the result of a job, by its name, as `job.toml` can carry it."""
    values = {name: getattr(job, name) for name in DECIDES if name != "task"}
    values |= {"program": Path(job.program).resolve(), PROGRAM: digest}
    values |= {f"task.{name}": value for name, value in redacted(task).items()}
    return {
        name: str(value).lower() if value is None or value != value else value
        for name, value in values.items()
    }


def name_of(settings: dict[str, str]) -> str:
    """The name of a run folder: `lr=0.001,width=16`."""
    whole = ",".join(f"{name}={_canonical(value)}" for name, value in settings.items())
    safe = "".join(c if c.isalnum() or c in "-_.,=+" else "-" for c in whole)
    if safe == whole and len(safe.encode()) <= LONGEST_NAME:
        return safe
    cut = safe.encode()[:LONGEST_NAME].decode(errors="ignore")
    return f"{cut}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _canonical(value: str) -> str:
    """A number in one way of writing it."""
    for kind in (int, float):
        with suppress(ValueError):
            return repr(kind(value))
    return value


def _refused(asked: str, found: str, do: str = "") -> RequestError:
    return RequestError(
        asked=asked,
        found=found,
        why="a sweep is one job for every combination of values",
        do=do or "write it like allranks sweep digits --set lr=1e-3,3e-4 --set width=16,32",
    )


# --- what a person sees -------------------------------------------------------------------------


def _print_plan(planned: SweepPlan, as_object: bool) -> None:
    if as_object:
        names = ("name", "settings", "threads")
        jobs = [{name: getattr(job, name) for name in names} for job in planned.jobs]
        slots = [{"cores": slot.cores, "words": slot.words} for slot in planned.slots]
        click.echo(as_json({"sweep_dir": str(planned.folder), "slots": slots, "jobs": jobs}))
        return
    lines = [f"{len(planned.jobs)} jobs in {planned.folder}", *map(str, planned.slots), ""]
    lines += [f"{job.name}  threads per rank {job.threads}" for job in planned.jobs]
    click.echo("\n".join(printable(line) for line in lines))


def table(jobs: Sequence[SweepJob]) -> str:
    """The jobs in the order of the command line: values, state, metrics, run folder."""
    metrics = list(dict.fromkeys(name for job in jobs for name in job.metrics))
    rows = [[*jobs[0].settings, "state", *metrics, "run folder"]]
    for job in jobs:
        cells = [f"{job.metrics[name]:.4f}" if name in job.metrics else "" for name in metrics]
        rows.append([*job.settings.values(), job.state, *cells, os.path.relpath(job.run_dir)])
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _conclude(folder: str, jobs: Sequence[SweepJob], reason: str) -> None:
    """Raise how the sweep ended, unless all its jobs are done."""
    states = [job.state for job in jobs]
    done, failed = states.count(DONE), [job.name for job in jobs if job.state == FAILED]
    again = f"to resume, say the same with --run-dir {folder}"
    stopped = f"({reason or 'a job'}); {done} of {len(jobs)} jobs are done; {again}"
    if done == len(jobs):
        return
    if reason == "SIGINT" or INTERRUPTED in states:
        raise Interrupted(f"interrupted {stopped}")
    if reason or not failed:
        raise Stopped(f"stopped {stopped}")
    raise ProgramError(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}; {again}")
