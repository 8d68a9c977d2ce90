"""`allranks.launch` and `allranks.check`: a training from a script or a notebook, as an object.

They do what the verbs of those names do, in the same words, and raise where the command line
would leave.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.catalog import PROGRAMS, load
from allranks.cli.by_value import write_class
from allranks.cli.display.live import NotebookDisplay, has_outputs, shell
from allranks.cli.display.progress import ProgressDisplay, in_sentences, lost_in, progress_here
from allranks.errors import Interrupted, PlaceError, RequestError, nearest
from allranks.job.config import Resolved, resolve
from allranks.job.job import NOT_SETTABLE, Job, read_value
from allranks.launcher.describe import first_check
from allranks.launcher.processes.leftovers import belongs_to_a_job
from allranks.launcher.start import JobWatcher, Result, run_job
from allranks.launcher.supervisor import Signals
from allranks.tools.check.against_single import of_first_steps, options_left_out
from allranks.tools.check.check import checked_in_scratch
from allranks.tools.check.verdict import Verdict

RUNS = "runs"
SOURCE = "launch()"


@dataclass(frozen=True, repr=False)
class Trained(Result):
    """A job that ended well: `run_dir`, `summary`, and the weights at its end."""

    def weights(self) -> dict[str, Any]:
        """The weights by name, read from where they were kept: what `model.load_state_dict` takes.

        Raises `PlaceError` if the disk was full and they could be kept nowhere.
        """
        name = "weights.safetensors"
        if name in self.summary.get("not_kept", ()):
            raise PlaceError(lost_in(self.summary))
        elsewhere = self.summary.get("kept_elsewhere", {}).get(name)
        path = self.run_dir / name if elsewhere is None else Path(elsewhere["path"])
        weights: dict[str, Any] = load("allranks.torch.model.reals:read_tensors")(path)
        return weights

    def __repr__(self) -> str:
        return in_sentences(self.summary)


def launch(task: Any, *, settings: Mapping[str, Any] | None = None, **job: Any) -> Trained:
    """Train `task` on the ranks of this machine; returns when it is done.

    `task` is a class derived from `Task`, an instance of one (the fields that were set are those of
    the job), or a PROGRAM as on the command line; `settings` are further fields. The keywords are
    the options of `allranks train` (`ranks=4, strategy="ddp", epochs=3, eval_every=2, run_dir=…`),
    and what they leave out is as there. Ranks are new processes, which import the class from its
    file; one that a notebook defines is carried to them by value, with what it uses.

    Raises `RequestError`, `ProgramError` (with the report of the first fault), `PlaceError`, or
    `Stopped` and `Interrupted` as `run_job` does. Ctrl-C, or the stop button of a notebook, lets
    the ranks commit a checkpoint and leave, and raises `KeyboardInterrupt`; a second one does not
    wait for that. In another thread than the main one no signal can be heard. No process is left
    in any case.
    """
    _check_that_this_is_no_rank(task)
    settings, job = _with_epochs(settings or {}, job)
    flags = _flags_of(task, job)
    folder = Path(flags["run_dir"]).parent if flags.get("run_dir") else Path(RUNS)
    program, fields = prepare_program(task, folder)
    resolved = _with_fields(resolve(program, flags), {**fields, **settings})
    progress = _progress()
    with Signals() as signals:
        try:
            watcher = JobWatcher(progress.started, progress.tick)
            result = run_job(resolved, None, watcher, signals, first_check=first_check)
        except Interrupted as error:
            if signals.reason == "SIGINT":
                raise KeyboardInterrupt(str(error)) from None
            raise
        finally:
            with suppress(OSError):  # nobody reads any more
                progress.close()
    return Trained(result.run_dir, result.summary)


def check(
    task: Any,
    *,
    settings: Mapping[str, Any] | None = None,
    deep: bool = False,
    keep_runs: str | os.PathLike[str] | None = None,
    **job: Any,
) -> Verdict:
    """Train `task` in one process and on many, and compare every step; returns the verdict.

    `task`, `settings` and the keywords are those of `allranks.launch`; what they leave out is as in
    `allranks check`: the strategy that its engine has for many ranks, float64 on 2 and 3 ranks and
    then `precision`, 20 steps. If `deep`, 100, and the operator that differs first is named.
    `keep_runs` is a folder for the runs and their traces. `verdict.equal` says whether there was no
    difference, `print(verdict)` what was found, `verdict.to_data()` the same as data.

    Raises what `allranks.launch` raises.
    """
    _check_that_this_is_no_rank(task)
    flags = _flags_of(task, job, "check")
    ranks_given, bounded = "ranks" in flags or "nodes" in flags, "steps" not in flags
    program, fields = prepare_program(task, Path(RUNS))
    options = options_left_out(program, flags, deep=deep)
    few = options.pop("steps", None)
    resolved = of_first_steps(resolve(program, flags | options), few)
    resolved = _with_fields(resolved, {**fields, **(settings or {})})
    folder = None if keep_runs is None else os.fspath(keep_runs)
    return checked_in_scratch(resolved, folder, explicit=ranks_given, bounded=bounded, deep=deep)


def _check_that_this_is_no_rank(task: Any) -> None:
    if belongs_to_a_job():
        raise RequestError(
            asked=f"to launch {task if isinstance(task, str) else _class_of(task).__name__}",
            found="this process belongs to a job already",
            why="ranks import the file of the task, and would launch it again and again",
            do='call launch below `if __name__ == "__main__":`',
        )


def _class_of(task: Any) -> type:
    return task if isinstance(task, type) else type(task)


def _with_epochs(
    settings: Mapping[str, Any], job: dict[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """`epochs` as `train` takes it: a field of the task, in the place of steps."""
    if "epochs" not in job:
        return settings, job
    epochs = job.pop("epochs")
    if job.get("steps") is not None:
        raise RequestError(
            asked=f"launch(…, epochs={epochs!r}, steps={job['steps']!r})",
            found="two things about one end",
            why="a job ends after so many steps, or after so many passes over its data",
            do="give one of them",
        )
    return {**settings, "epochs": epochs}, {**job, "steps": None}


def _flags_of(task: Any, job: dict[str, Any], call: str = "launch") -> dict[str, Any]:
    """The options by their names, each of its type; raises `RequestError`."""
    hints = typing.get_type_hints(Job)
    known = [name for name in hints if name not in (*NOT_SETTABLE, "program")]
    flags = {}
    for name, value in job.items():
        words = f"{call}(…, {name}={value!r})"
        if name not in known:
            is_field = name in getattr(task, "__dataclass_fields__", ())
            raise RequestError(
                asked=words,
                found=f"no option {name!r}",
                why=f"the keywords of {call} are the options of a job; the fields of a task are "
                "set in its instance, or by settings",
                do=f"launch({_class_of(task).__name__}({name}={value!r}), …), or "
                f"settings={{{name!r}: {value!r}}}"
                if is_field
                else nearest(name, [*known, "settings", "epochs"]),
            )
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if hints[name] is str and type(value) in (int, float):  # eval_every=2, as --eval-every 2
            value = str(value)
        flags[name] = read_value(name, value, hints[name], words)
    return flags


def _with_fields(resolved: Resolved, fields: dict[str, Any]) -> Resolved:
    """The job with these fields of its task, and the sources named as they are here."""
    job = dataclasses.replace(resolved.job, task={**resolved.job.task, **fields})
    named = {f"task.{name}": SOURCE for name in fields}
    sources = {n: SOURCE if s == "command line" else s for n, s in resolved.sources.items()}
    return dataclasses.replace(resolved, job=job, sources={**sources, **named})


def _progress() -> ProgressDisplay:
    return NotebookDisplay() if has_outputs() else progress_here()


# --- program -------------------------------------------------------------------------------------
# How a task that is an object here becomes a PROGRAM: by the name of its class.
#
# Ranks are new processes that import the class from where it is defined. A class of a notebook is
# defined in no file, so a program is written for it (`by_value`).


FOLDER = "programs"


def prepare_program(task: Any, folder: Path) -> tuple[str, dict[str, Any]]:
    """The PROGRAM that `task` is (a name, a class or an instance), and the fields that were set.

    A class of a notebook is written into `folder`/programs. Raises `RequestError`.
    """
    if isinstance(task, str | os.PathLike):
        return os.fspath(task), {}
    task_class = task if isinstance(task, type) else type(task)
    if not dataclasses.is_dataclass(task_class):
        raise RequestError(
            asked=f"to launch {task!r}",
            found=f"a {task_class.__name__}" if task is not task_class else "a class of its own",
            why="a task is a class derived from allranks.torch.Task, an instance of one, or a "
            "PROGRAM as on the command line",
            do='give one of these: launch(MyTask), launch(MyTask(lr=1e-3)), launch("digits")',
        )
    fields = {} if task is task_class else fields_of(task)
    return place_of(task_class, folder), fields


def fields_of(task: Any) -> dict[str, Any]:
    """The fields of an instance that are not at their defaults; raises `RequestError`.

    A rank makes the instance again of them, so whatever else it has become is refused.
    """
    name = type(task).__name__
    plain = type(task)() if _has_defaults(task) else None
    fields = {}
    for field in dataclasses.fields(task):
        value = getattr(task, field.name)
        if not field.init or (plain is not None and _same(value, getattr(plain, field.name))):
            continue
        if value is not None and type(value) not in (bool, int, float, str):
            raise RequestError(
                asked=f"to launch {name} with {field.name} = {value!r}",
                found=f"a {type(value).__name__}",
                why="the fields of a task are recorded with the job: whole and real numbers, "
                "truth values, texts, or none",
                do=f"give {field.name} such a value, and make the {type(value).__name__} of it in "
                "a method of the task",
            )
        fields[field.name] = value
    _check_that_it_can_be_made_again(task, type(task)(**fields))
    return fields


def _has_defaults(task: Any) -> bool:
    missing = dataclasses.MISSING
    return all(
        field.default is not missing or field.default_factory is not missing
        for field in dataclasses.fields(task)
        if field.init
    )


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and (value == other or (value != value and other != other))


def _check_that_it_can_be_made_again(task: Any, again: Any) -> None:
    name = type(task).__name__
    cached = {n for n in vars(task) if isinstance(getattr(type(task), n, None), cached_property)}
    added = {n for n in vars(task).keys() - vars(again).keys() - cached if not n.startswith("_")}
    differ = {
        field.name
        for field in dataclasses.fields(task)
        if field.init and not _same(getattr(task, field.name), getattr(again, field.name))
    }
    for attribute in sorted(added | differ):
        raise RequestError(
            asked=f"to launch this {name}",
            found=f"{attribute} = {getattr(task, attribute)!r}, "
            + ("which is no field" if attribute in added else "which its __post_init__ changes"),
            why="every rank makes the task again of its fields, and would get another one",
            do=f"make {attribute} a field with an annotation"
            if attribute in added
            else f"leave {attribute} as it is given, and work on it in a method",
        )


def place_of(task_class: type, folder: Path) -> str:
    """Where ranks import a class from: a built-in name, file.py:Class or module:Class."""
    name, module = task_class.__qualname__, sys.modules.get(task_class.__module__)
    if getattr(module, name, None) is not task_class or module is None:
        raise RequestError(
            asked=f"to launch {name}",
            found=f"{task_class.__module__}.{name} is not this class",
            why="ranks import a class by its name: it stands at the top of a module or a notebook, "
            "and is the last one of that name",
            do="move it to the top; if its cell was run again, make the instance again too",
        )
    where = f"{module.__name__}:{name}"
    builtin = next((program for program, place in PROGRAMS.items() if place == where), None)
    if builtin is not None:
        return builtin
    if module.__name__ == "__main__":
        return _place_in_main(task_class, module, folder)
    file = getattr(module, "__file__", None)
    if file is None or "." in module.__name__ or hasattr(module, "__path__"):
        return where
    return f"{_short(Path(file))}:{name}"


def _place_in_main(task_class: type, main: ModuleType, folder: Path) -> str:
    """Where a class of `__main__` is: a notebook's gets a file, a script has one."""
    name, ipython = task_class.__name__, shell()
    if ipython is not None and ipython.user_ns is vars(main):
        return f"{_short(write_class(task_class, vars(main), folder / FOLDER))}:{name}"
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m package.module
        return f"{spec.name}:{name}"
    if file is None or not file.endswith(".py"):
        raise RequestError(
            asked=f"to launch {name}",
            found="it is defined in no .py file",
            why="ranks are new processes, which import the class",
            do="write it into a file, or into a notebook",
        )
    return f"{_short(Path(file))}:{name}"


def _short(path: Path) -> str:
    """The path as one would write it: from here if it is below, else from the root."""
    whole, here = path.resolve(), Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)
