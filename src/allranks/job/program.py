"""The program of a job: from the name that a user gives to the task class that it means."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.catalog import ENGINES, PROGRAMS
from allranks.errors import RequestError, nearest
from allranks.job.loaded import remember_program


def find_program(program: str, *bases: type) -> Any:
    """The task class that `program` names: built-in name, file.py, file.py:Class or module:Class.

    Importing a file runs it; it happens in a rank, never in the command line. Raises
    `RequestError` for a name that is unknown, a file that does not load, or a class that is none
    of `bases`.
    """
    where = PROGRAMS.get(program, program)
    place, _, wanted = where.rpartition(":")
    if not place or wanted.endswith(".py"):  # a colon in the name of a folder
        place, wanted = where, ""
    if place.endswith(".py") and not wanted:
        _check_is_no_script(Path(place), program)
    if place.endswith(".py"):
        module = _import_file(Path(place), program)
    elif wanted and all(part.isidentifier() for part in place.split(".")):
        module = _import_module(place, program)
    else:
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found="neither a built-in program nor a .py file nor module:Class",
            why="a program is a task: its class must be somewhere to import it from",
            do=nearest(program, PROGRAMS),
        )
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, bases) and value not in bases
    }
    own = {name: c for name, c in classes.items() if c.__module__ == module.__name__}
    if wanted:
        return _named_class(program, wanted, classes, module)
    if len(own) != 1:
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found=f"{len(own)} tasks in it ({', '.join(sorted(own)) or 'none'})",
            why="a program is one class derived from "
            + " or ".join(f"{base.__module__}.{base.__qualname__}" for base in bases),
            do=f"name one: {program}:{next(iter(sorted(own)))}"
            if own
            else _of_another_engine(module),
        )
    return next(iter(own.values()))


def _of_another_engine(module: ModuleType) -> str:
    """What to do about a file without a task of this engine: there may be one of another."""
    for engine in ENGINES.values():
        for name, value in sorted(vars(module).items()):
            bases = value.__mro__[1:] if isinstance(value, type) else ()
            if any(b.__module__ in engine.tasks and b.__qualname__ == "Task" for b in bases):
                asked = f"--engine {engine.name}"
                return f"{name} is a task of {engine.name}: {asked}, and its strategies"
    return "write a class derived from Task in it"


def _check_is_no_script(path: Path, program: str) -> None:
    """Raise for a loop of one's own, a file without any class: importing it would run it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # what is wrong with it is said when it is loaded
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {getattr(call, "id", getattr(call, "attr", "")) for call in calls}
    kinds = {type(node) for node in ast.walk(tree)}
    loops, makes_classes = kinds & {ast.For, ast.While}, names & {"type", "make_dataclass"}
    if loops and ast.ClassDef not in kinds and not makes_classes:
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found="a script without a class, so without a task",
            why="`train` trains a task; a loop of one's own is started on all ranks by `run`",
            do=f"allranks run --ranks 2 -- python {program}",
        )


def _named_class(program: str, wanted: str, classes: dict[str, type], module: ModuleType) -> type:
    if wanted not in classes:
        other = _of_another_engine(module)
        found = "that name is no task there" if hasattr(module, wanted) else "no such name there"
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found=found,
            why="the name after the colon is a task class of that file or module",
            do=nearest(wanted, classes) if classes else other,
        )
    return classes[wanted]


def _import_file(path: Path, program: str) -> ModuleType:
    if not path.is_file():
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found=f"no file {path} in {Path.cwd()}",
            why="the file with the task must be readable where the job starts",
            do="check the path; built-in programs are: " + ", ".join(PROGRAMS),
        )
    name = path.stem if path.stem.isidentifier() else "allranks_program"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    remember_program(path, path.read_bytes())
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _does_not_load(program, error, str(path)) from error
    return module


def _import_module(name: str, program: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _does_not_load(program, error, name) from error


def _does_not_load(program: str, error: BaseException, where: str) -> RequestError:
    if isinstance(error, RequestError):  # its own words say it
        return error
    line = ""
    if isinstance(error, SyntaxError):
        line = f" at line {error.lineno} of {error.filename}"
    else:
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename == str(Path(where).resolve()):
                line = f" at line {trace.tb_lineno} of {code.co_filename}"
            trace = trace.tb_next
    message = error.msg if isinstance(error, SyntaxError) else error
    return RequestError(
        asked=f"PROGRAM {program!r}",
        found=f"{type(error).__name__}: {message}{line}",
        why="importing it fails, so there is no task to train",
        do=f"mend it until `python {where}` starts"
        if where.endswith(".py")
        else f"mend it until `python -c 'import {where}'` works",
    )
