"""Where the values of a job come from: command line > job file > resumed run > default.

`resolve` makes the job, checked as far as it can be, and remembers the source of every value.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.catalog import PLACES, TORCH, load
from allranks.errors import RequestError
from allranks.job.deepspeed.sections import read_deepspeed
from allranks.job.engines import check_program, choose_engine, default_strategy
from allranks.job.job import AUTO, HIDDEN, NOT_SETTABLE, Job, read_given, read_job_file
from allranks.job.limits import checked
from allranks.job.place import place_spec
from allranks.job.resume import Base, changed, find_base
from allranks.strategies.auto import DialRequest, check_dial, parse_dial
from allranks.strategies.choice import is_auto


@dataclass(frozen=True)
class Resolved:
    """A job, and for every value of it where it came from.

    Where `dial` is set it chooses the strategy before the ranks start; until then the job has the
    usual one.
    """

    job: Job
    sources: dict[str, str]
    base: Base | None = None
    dial: DialRequest | None = None


def resolve(
    program: str,
    flags: dict[str, Any],
    task_settings: tuple[str, ...] = (),
    job_file: str | None = None,
) -> Resolved:
    """The job that these words describe, checked as far as it can be without its program.

    `flags` holds only what was really given; raises `RequestError` for what cannot be.
    """
    _check_names(flags)
    flags, base = _find_base(flags)
    ranks = flags.get("ranks") or flags.get("nodes")
    values, task, sources = _inherited(base, job_file, ranks)
    if program:
        flags = {"program": program, **flags}
    for name, value in flags.items():
        values[name], sources[name] = value, "command line"
    _try_micro_batches(values, sources, base)
    task |= _settings(task_settings)
    sources |= {f"task.{name}": "command line" for name in _settings(task_settings)}
    _forget_the_place(values, sources)
    _keep_the_choice(values, sources, base)
    _forget_the_check(values, sources)
    _check_texts(values, task, sources)
    if values.get("nodes", 1) > 1:
        values.setdefault("ranks", values["nodes"])  # one on each, where nobody says more
    job = Job(**values, task=task)
    engine = choose_engine(values.get("engine", ""), job.strategy, job.program)
    check_program(engine, job.program)
    job = dataclasses.replace(job, engine=engine)
    dial = _dial(job)
    if dial is not None or _outgrown(job, sources):
        job = dataclasses.replace(job, strategy=default_strategy(engine, job.ranks))
    _forget_defaults(sources, base, job_file)
    for field in dataclasses.fields(Job):
        if field.name not in NOT_SETTABLE:
            sources.setdefault(field.name, "default")
    job = checked(job)
    if base is not None:
        changed(base, job)
    return Resolved(job, sources, base, dial)


def _settings(texts: tuple[str, ...]) -> dict[str, Any]:
    """The fields of the task that --set gives, with their texts; raises `RequestError`."""
    texts_by_name: dict[str, Any] = {}
    for setting in texts:
        name, equals, text = setting.partition("=")
        if not equals:
            raise RequestError(
                asked=f"--set {setting}",
                found="no '=' in it",
                why="--set gives a field of the task a value",
                do=f"--set {setting}=VALUE",
            )
        texts_by_name[name] = text
    return texts_by_name


def _inherited(
    base: Base | None, job_file: str | None, ranks: int | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The values of the resumed run and of the job file over them, of the task too.

    `ranks` are those of the command line, if it says any.
    """
    values: dict[str, Any] = {}
    task: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = [] if base is None else [(base.values, base.task, f"run {base.path}")]
    if job_file is not None and not job_file.endswith(".json"):
        layers.append((*read_job_file(job_file), f"file {job_file}"))
    for more, more_task, where in layers:
        values, task = {**values, **more}, {**task, **more_task}
        sources |= dict.fromkeys([*more, *(f"task.{name}" for name in more_task)], where)
    if job_file is not None and job_file.endswith(".json"):
        configuration = read_deepspeed(job_file, ranks or values.get("ranks", 1))
        values, task = {**values, **configuration.values}, {**task, **configuration.task}
        sources |= configuration.sources
    return values, task, sources


def _forget_the_place(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Drop the nodes of the resumed run: they may belong to another job by now."""
    if not sources.get("place", "").startswith("run "):
        return
    if load(PLACES[place_spec(values["place"]).name]).lends_nodes:
        for name in ("place", "nodes"):
            if sources.get(name, "").startswith("run "):
                del values[name], sources[name]


def _keep_the_choice(values: dict[str, Any], sources: dict[str, str], base: Base | None) -> None:
    """Keep the strategy of a resumed run, which the dial chose: its state depends on it."""
    if base is not None and is_auto(values.get("strategy", "")) and "strategy" in base.values:
        values["strategy"], sources["strategy"] = base.values["strategy"], f"run {base.path}"


def _try_micro_batches(values: dict[str, Any], sources: dict[str, str], base: Base | None) -> None:
    """`auto` begins with the micro-batch that a resumed run has found by trial."""
    value = values.get("micro_batch")
    if isinstance(value, str) and not (value.isascii() and value.isdecimal()) and value != AUTO:
        raise RequestError(
            asked=f"--micro-batch {value}",
            found="neither a number of samples nor auto",
            why="it bounds the samples that go through the model at once, on one rank",
            do="--micro-batch 16, or --micro-batch auto, which halves it when memory runs out",
        )
    if value is None or sources["micro_batch"].startswith("run "):
        return
    before = {} if base is None or not base.values.get("micro_batch_trial") else base.values
    values["micro_batch"] = before.get("micro_batch") if value == AUTO else int(value)
    if value == AUTO or sources.get("micro_batch_trial") != sources["micro_batch"]:
        values["micro_batch_trial"] = value == AUTO
        sources["micro_batch_trial"] = sources["micro_batch"]


def _forget_the_check(values: dict[str, Any], sources: dict[str, str]) -> None:
    """A resumed run that takes another strategy makes its first check, whatever was said before."""
    of = {name: sources.get(name, "").startswith("run ") for name in ("first_check", "strategy")}
    if of["first_check"] and not of["strategy"]:
        del values["first_check"], sources["first_check"]


def _forget_defaults(sources: dict[str, str], base: Base | None, job_file: str | None) -> None:
    """Treat values that were defaults in the resumed run, or in the job file, as defaults."""
    if base is not None:
        for name in base.defaults:
            if sources.get(name, "").startswith("run "):
                del sources[name]
    elif job_file is not None and not job_file.endswith(".json"):
        explicit = read_given(job_file)
        of_file = {name for name, source in sources.items() if source == f"file {job_file}"}
        for name in of_file - explicit if explicit else ():
            del sources[name]


def _dial(job: Job) -> DialRequest | None:
    """What is asked of the dial, where it is to choose the strategy; raises `RequestError`."""
    if not is_auto(job.strategy):
        return None
    request = parse_dial(job.strategy)
    check_dial(request, ranks=job.ranks, bitwise=job.bitwise, many_on_torch=job.engine == TORCH)
    return request


def _check_texts(values: dict[str, Any], task: dict[str, Any], sources: dict[str, str]) -> None:
    """Raise for texts that cannot be recorded, and for secrets that were not."""
    for name, value in task.items():
        if value == HIDDEN:
            raise RequestError(
                asked=f"{name} of the task",
                found=f"{HIDDEN} in {sources[f'task.{name}']}",
                why="secrets are not written into run folders",
                do=f"give it again: --set {name}=…",
            )
    _check_names(values)
    for text in (*values.values(), *task, *task.values()):
        if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RequestError(
                asked=ascii(text),
                found="bytes that are not UTF-8",
                why="the job is recorded as text, and could not be read again",
                do="give it a name in UTF-8",
            )


def _check_names(values: dict[str, Any]) -> None:
    """Raise for names that no file can have."""
    for name in ("program", "run_dir", "resume"):
        if "\0" in str(values.get(name, "")):
            raise RequestError(
                asked=f"{name} = {values[name]!r}",
                found="a NUL in it",
                why="no file and no folder can have such a name",
                do="give it another name",
            )


def _find_base(flags: dict[str, Any]) -> tuple[dict[str, Any], Base | None]:
    """The flags without `auto` and `never`, and the run that they ask to go on from."""
    resume = str(flags.get("resume", "auto"))
    flags = {name: value for name, value in flags.items() if name != "resume"}
    if resume == "never":
        return flags, None
    resumes = resume == "auto"
    if resumes:
        path = Path(flags["run_dir"]) if flags.get("run_dir") else None
        if path is None or not os.path.isfile(path / "job.toml"):
            return flags, None
    else:
        path = Path(resume)
        flags["resume"] = os.path.abspath(path)
    return flags, find_base(path, resumes)


def _outgrown(job: Job, sources: dict[str, str]) -> bool:
    """Whether there is none, or an inherited one of one process where the job has many ranks."""
    if not job.strategy:
        return True
    inherited = sources.get("strategy", "").startswith("run ")
    return inherited and job.ranks > 1 and not job.strategy_spec.card.many_ranks


def threads_per_rank(job: Job, sharing: int) -> int:
    """Intra-op threads of each rank: as asked, 1 under `bitwise`, else the cores shared out.

    `sharing` ranks run on one machine.
    """
    if job.threads is not None:
        return job.threads
    return 1 if job.bitwise else max(1, len(os.sched_getaffinity(0)) // sharing)
