"""`allranks sweep PROGRAM --set lr=1e-3,3e-4 --slots 2`: a job for every combination of values."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.cli.display.progress import say
from allranks.cli.options import GroupedCommand, training_options
from allranks.cli.train import job_of
from allranks.errors import Interrupted, ProgramError, RequestError, Stopped, printable
from allranks.job.job import Job
from allranks.job.limits import devices_of
from allranks.launcher.start import look_at_program, new_run_dir
from allranks.strategies.choice import TRUTH
from allranks.tools.sweep.packing import (
    DONE,
    FAILED,
    INTERRUPTED,
    STOPPED,
    Outcome,
    PackedJob,
    Packing,
    Slot,
    Sweep,
    previous,
    share_out,
)
from allranks.tools.sweep.slots import Watcher, run_packed

SWEEP_OPTIONS = ("settings", "slots", "run_dir", "dry_run", "as_object")
NOT_SWEPT = ("set", "job", "resume", "inject", *SWEEP_OPTIONS, "json")
LONGEST_NAME = 150


@dataclass(frozen=True)
class Axis:
    """What is swept: an option of the command or, without one, a field of the task; its values."""

    name: str
    values: tuple[str, ...]
    option: click.Option | None

    def words(self, value: str) -> list[str]:
        """How one value is asked for on the command line."""
        if self.option is None:
            return [f"--set={self.name}={value}"]
        if not self.option.is_flag:
            return [f"{self.option.opts[0]}={value}"]
        if value.lower() not in TRUTH:
            raise _refused(f"--set {self.name}={value}", f"{self.name} takes true or false")
        return [self.option.opts[0]] if TRUTH[value.lower()] else []


@click.command(cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("program", required=False)
@click.option("--slots", type=click.IntRange(min=1), help="Jobs at once (default 1).")
@click.option("--run-dir", help="The folder of the sweep (default runs/PROGRAM-sweep-TIME).")
@training_options
@click.option("--dry-run", is_flag=True, help="Print exactly what would run; run nothing.")
@click.option("--json", "as_object", is_flag=True, help="Last line of stdout: one JSON object.")
@click.pass_context
def sweep(context: click.Context, /, dry_run: bool, as_object: bool, **_: Any) -> None:
    """Train PROGRAM once for every combination of the values in --set NAME=VALUE,VALUE.

    NAME is a field of the task or an option of `allranks train`. A comma in brackets cuts nothing.

    \b
    allranks sweep digits --set lr=1e-3,3e-4 --set width=16,32 --slots 2
    allranks sweep digits --set ranks=1,2 --set seed=1,2,3 --steps 20
    """
    packing = plan(context)
    look_at_program(job_of(job.words) for job in packing.jobs)
    if dry_run:
        _print_plan(packing, as_object)
        return
    with Sweep(packing) as running:
        reason = run_packed(running, Watcher(_tell_start, _tell_end))
        outcomes = list(running.outcomes.values())
        click.echo(table(outcomes), err=as_object)
        if as_object:
            click.echo(as_json(running.to_data()))
    _conclude(packing.folder, outcomes, reason)


# --- the plan -----------------------------------------------------------------------------------


def plan(context: click.Context) -> Packing:
    """The jobs that a command line asks for, each checked as far as it can be without its task."""
    axes = _axes(context)
    combinations = [
        dict(zip([axis.name for axis in axes], values, strict=True))
        for values in itertools.product(*(axis.values for axis in axes))
    ]
    base = words_of(context, axes)
    words = [
        (*base, *(word for axis in axes for word in axis.words(settings[axis.name])))
        for settings in combinations
    ]
    first = job_of(words[0])
    slots = _slots(context, first, len(combinations), axes)
    program = Path(first.program.partition(":")[0]).stem
    folder = Path(context.params["run_dir"] or new_run_dir(f"{program}-sweep")).absolute()
    before = previous(folder)
    known = before.threads if before else {}
    jobs = []
    for settings, own in zip(combinations, words, strict=True):
        name = name_of(settings)
        job = job_of([*own, *slots[-1].words, f"--run-dir={folder / name}"])
        threads = known.get(name) or _threads(job, len(slots))
        jobs.append(PackedJob(name, settings, own, threads))
    if len({job.name for job in jobs}) < len(jobs):
        raise _refused("--set", "one value stands there twice")
    return Packing(folder, tuple(jobs), slots)


def _axes(context: click.Context) -> list[Axis]:
    """What has several values, checked against the options, and against what else is given."""
    settings: tuple[str, ...] = context.params["settings"]
    axes = [_axis(context, text) for text in settings if _has_several(text)]
    if not axes:
        raise _refused("allranks sweep", "no --set with several values")
    names = [setting.partition("=")[0] for setting in settings]
    for axis in axes:
        if names.count(axis.name) > 1:
            again = "write all values after one name"
            raise _refused(f"--set {axis.name}", "two --set have this name", again)
    return axes


def _has_several(text: str) -> bool:
    return len(list(_split(text.partition("=")[2]))) > 1


def _axis(context: click.Context, text: str) -> Axis:
    """`lr=1e-3,3e-4`."""
    name, _, values = text.partition("=")
    listed = tuple(_split(values))
    if not name or not all(listed):
        raise _refused(f"--set {text}", "it is not NAME=VALUE,VALUE")
    options = {
        option.opts[0].removeprefix("--"): option
        for option in context.command.params
        if isinstance(option, click.Option)
    }
    option = options.get(name.replace("_", "-"))
    if name.replace("-", "_") in NOT_SWEPT:
        raise _refused(
            f"--set {text}", f"--{name} is not a value of a job", "sweep fields and options"
        )
    if option is not None and context.params[str(option.name)] is not None:
        raise _refused(f"--set {text}", f"{option.opts[0]} is given too", "say it in one place")
    return Axis(name, listed, option)


def _split(values: str) -> Iterator[str]:
    """Cut at commas that stand outside brackets: a strategy may have options."""
    depth, part = 0, ""
    for letter in values:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            yield part
            part = ""
        else:
            part += letter
    yield part


def words_of(context: click.Context, axes: Sequence[Axis]) -> list[str]:
    """What was given of each job on this command line, as words that say it again to `train`."""
    swept = {axis.name for axis in axes}
    settings: tuple[str, ...] = context.params["settings"]
    words = [f"--set={text}" for text in settings if text.partition("=")[0] not in swept]
    for parameter in context.command.params:
        value = context.params[str(parameter.name)]
        if parameter.name in SWEEP_OPTIONS or value is None:
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            words += [parameter.opts[0]] if value else []
        else:
            values = value if parameter.multiple else [value]
            words += [f"{parameter.opts[0]}={one}" for one in values]
    return words


def _slots(context: click.Context, job: Job, jobs: int, axes: Sequence[Axis]) -> tuple[Slot, ...]:
    """The room there is; cores and devices are shared out where there are enough."""
    count = min(context.params["slots"] or 1, jobs)
    cores = share_out(sorted(os.sched_getaffinity(0)), count)
    named = any(axis.name == "devices" for axis in axes)
    numbers = () if named else devices_of(job)
    if job.device != "cpu" and count > 1 and not (numbers or named):
        raise RequestError(
            asked=f"a sweep on --device {job.device} with --slots {count}",
            found="no --devices",
            why="the jobs of all slots would use the same devices, from number 0 on",
            do="name those to share out: --devices 0,1,2,3, or --slots 1",
        )
    devices = [
        (f"--devices={','.join(map(str, own))}",) if own else ()
        for own in share_out(numbers, count)
    ]
    return tuple(Slot(n, cores[n], devices[n]) for n in range(count))


def _threads(job: Job, slots: int) -> int:
    """Threads of each rank, decided once: they are part of what makes the bits."""
    if job.threads is not None:
        return job.threads
    return 1 if job.bitwise else max(1, len(os.sched_getaffinity(0)) // slots // job.ranks)


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


def _print_plan(packing: Packing, as_object: bool) -> None:
    """What would run."""
    if as_object:
        jobs = [
            {"name": j.name, "settings": j.settings, "threads": j.threads} for j in packing.jobs
        ]
        slots = [{"cores": slot.cores, "words": slot.words} for slot in packing.slots]
        click.echo(as_json({"sweep_dir": str(packing.folder), "slots": slots, "jobs": jobs}))
        return
    lines = [f"{len(packing.jobs)} jobs in {packing.folder}", *map(str, packing.slots), ""]
    lines += [f"{job.name}  threads per rank {job.threads}" for job in packing.jobs]
    click.echo("\n".join(printable(line) for line in lines))


def _tell_start(slot: Slot, outcome: Outcome) -> None:
    say(f"started {outcome.name} in {slot}")


def _tell_end(slot: Slot, outcome: Outcome) -> None:
    seconds = (outcome.ended or 0.0) - (outcome.started or 0.0)
    line = f"{outcome.state} {outcome.name} after {seconds:.1f} s"
    if outcome.summary is not None:
        values = [f"{name} {value:.4f}" for name, value in _measured(outcome).items()]
        line += f": {', '.join(values)}" if values else ""
    if outcome.report:
        line += f": {outcome.report.splitlines()[0]}"
    say(line)


def _measured(outcome: Outcome) -> dict[str, float]:
    """The metrics of a job that is done, and its loss."""
    if outcome.summary is None:
        return {}
    values: dict[str, Any] = dict(outcome.summary["eval"])
    if outcome.summary["train_loss"] is not None:
        values["train loss"] = outcome.summary["train_loss"]
    return {name: float(value) for name, value in values.items()}


def table(outcomes: Sequence[Outcome]) -> str:
    """The jobs in the order in which they were asked for: values, state, metrics, run folder."""
    metrics = list(dict.fromkeys(name for outcome in outcomes for name in _measured(outcome)))
    rows = [[*outcomes[0].settings, "state", *metrics, "run folder"]]
    for outcome in outcomes:
        measured = _measured(outcome)
        cells = [f"{measured[name]:.4f}" if name in measured else "" for name in metrics]
        place = os.path.relpath(outcome.run_dir)
        rows.append([*outcome.settings.values(), outcome.state, *cells, place])
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _conclude(folder: Path, outcomes: Sequence[Outcome], reason: str) -> None:
    """Raise how the sweep ended, unless all its jobs are done."""
    named = {
        state: [outcome.name for outcome in outcomes if outcome.state == state]
        for state in (DONE, FAILED, INTERRUPTED, STOPPED)
    }
    count = f"{len(named[DONE])} of {len(outcomes)} jobs are done"
    again = f"to resume, say the same with --run-dir {folder}"
    if len(named[DONE]) == len(outcomes):
        return
    if reason == "SIGINT" or named[INTERRUPTED]:
        raise Interrupted(f"interrupted ({reason or 'a job'}); {count}; {again}")
    if reason or not named[FAILED]:
        raise Stopped(f"stopped ({reason or 'a job'}); {count}; {again}")
    failed = ", ".join(named[FAILED])
    raise ProgramError(f"{len(named[FAILED])} of {len(outcomes)} jobs failed: {failed}; {again}")
