"""How a task that is an object here becomes a PROGRAM: by the name of its class.

Ranks are new processes that import the class from where it is defined. A class of a notebook is
defined in no file, so a program is written for it (`by_value`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.catalog import PROGRAMS
from allranks.cli.display.live import shell
from allranks.cli.notebook.by_value import write_class
from allranks.errors import RequestError

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
