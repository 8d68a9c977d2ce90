"""What can be named: tables from a name to `module:Class`, and the one place that imports by name.

Adding a strategy is a file, a card and a line here. The command line loads its verbs through here
too, so that asking for help imports nothing but what help needs.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.errors import RequestError, nearest
from allranks.loaded import remember_program

VERBS = {
    "train": ("allranks.cli.train:train", "Train a task, on this machine or on several nodes."),
    "run": ("allranks.cli.run:run", "Run any script of any framework, unchanged."),
    "submit": ("allranks.cli.submit:submit", "The same as a job of Slurm."),
    "cluster": ("allranks.cli.cluster:cluster", "The sites that submit knows."),
    "check": ("allranks.cli.check:check", "Is the result the same as in one process?"),
    "doctor": ("allranks.cli.doctor:doctor", "Would a run work here, and what is in its way?"),
    "strategies": ("allranks.cli.strategies:strategies", "What each strategy promises."),
    "runs": ("allranks.cli.runs:runs", "The run folders there are."),
    "show": ("allranks.cli.runs:show", "One run: its result, or its first fault."),
    "checkpoints": ("allranks.cli.checkpoints:checkpoints", "The checkpoints of a run."),
}

ENGINES = {"torch": "allranks.on_torch.worker", "tensorflow": "allranks.on_tf.worker"}

TASKS = {"torch": "allranks.on_torch.task", "tensorflow": "allranks.on_tf.task"}
"""Where the base class of the tasks of each engine stands."""

WARM = {"torch": "allranks.on_torch.warm", "tensorflow": "allranks.on_tf.warm"}
"""What a fork server of each engine imports besides."""

WARM_FOR_KERAS = "allranks.on_torch.warm_keras"
KERAS_PROGRAMS = ("digits-keras", "mnist-keras")
"""Programs that either engine trains; before the torch engine imports one, Keras is told of it."""

STRATEGIES = {
    "single": "allranks.on_torch.strategies.single:Single",
    "dp": "allranks.on_torch.strategies.dp:DP",
    "ddp-plain": "allranks.on_torch.strategies.ddp_plain:DDPPlain",
    "ddp": "allranks.on_torch.strategies.ddp:DDP",
    "independent": "allranks.on_torch.strategies.independent:Independent",
}

TENSORFLOW_STRATEGIES = {
    "single": "allranks.on_tf.strategies.one_process:Single",
    "mirrored": "allranks.on_tf.strategies.one_process:Mirrored",
    "central-storage": "allranks.on_tf.strategies.one_process:CentralStorage",
    "multi-worker-mirrored": "allranks.on_tf.strategies.multi_worker:MultiWorkerMirrored",
    "parameter-server": "allranks.on_tf.strategies.parameter_server:ParameterServer",
    "tpu": "allranks.on_tf.strategies.one_process:TPU",
}

REDUCERS = {
    "mean": "allranks.on_torch.reducers.mean:Mean",
    "tree": "allranks.on_torch.reducers.tree:Tree",
    "fp16": "allranks.on_torch.reducers.half:FP16",
    "bf16": "allranks.on_torch.reducers.half:BF16",
}

PLANNER = "allranks.on_torch.checkpoint.dcp"

PROGRAMS = {
    "cifar10": "allranks.programs.cifar10:Cifar10",
    "digits": "allranks.programs.digits:Digits",
    "digits-keras": "allranks.programs.digits_keras:DigitsKeras",
    "fashion": "allranks.programs.mnist:Fashion",
    "imagenet": "allranks.programs.imagenet:ImageNet",
    "mnist": "allranks.programs.mnist:Mnist",
    "mnist-keras": "allranks.programs.mnist_keras:MnistKeras",
    "synthetic": "allranks.programs.synthetic:Synthetic",
    "text": "allranks.programs.text:Text",
}


def load(path: str) -> Any:
    """The object that `module:name` names. The name is ours: a failure to import is a bug."""
    module, _, name = path.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported


def preload_for(program: str, engine: str = "torch") -> tuple[str, ...]:
    """Modules that the fork server may import before it forks: ours, never a user's file."""
    modules: tuple[str, ...] = (WARM[engine], ENGINES[engine])
    if program in KERAS_PROGRAMS and engine == "torch":
        modules = (*modules, WARM_FOR_KERAS)
    return (*modules, PROGRAMS[program].partition(":")[0]) if program in PROGRAMS else modules


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
    for engine, place in TASKS.items():
        for name, value in sorted(vars(module).items()):
            bases = value.__mro__[1:] if isinstance(value, type) else ()
            if any((base.__module__, base.__qualname__) == (place, "Task") for base in bases):
                return f"{name} is a task of {engine}: --engine {engine}, and its strategies"
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
