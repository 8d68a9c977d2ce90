"""Which engine trains a job: the one that was asked for, that its strategy needs, or its program.

    --engine NAME         said by the user
    the strategy          `ddp` is torch's, `mirrored` is TensorFlow's; `single` is in both
    the program           what its file imports: `allranks.tensorflow`, or else torch

A Keras task (`allranks.tensorflow.Task`) can be trained by either engine; one of torch by torch
alone. What each engine is stands in `catalog.ENGINES`. Nothing is imported to find out:
a file is only read.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from allranks.catalog import ENGINES, PROGRAMS, STRATEGIES, TORCH, Engine
from allranks.errors import RequestError, nearest
from allranks.strategies.resolve import card_of, engines_of


def choose_engine(name: str, strategy: str, program: str) -> str:
    """The engine of a job; `name` and `strategy` are "" if they are not given.

    Raises `RequestError` for one that is not known, and for one that has no such strategy.
    """
    if name and name not in ENGINES:
        raise RequestError(
            asked=f"--engine {name}",
            found=f"no engine {name!r}",
            why=f"an engine is the framework that does the arithmetic: {', '.join(ENGINES)}",
            do=nearest(name, ENGINES),
        )
    able = engines_of(strategy) if strategy else ()
    if name:
        if able and name not in able:
            raise _not_there(name, strategy)
        return name
    if len(able) == 1:
        return able[0]
    return engine_of_program(program)


def check_program(engine: str, program: str) -> None:
    """Raise `RequestError` for a built-in program that the engine cannot train: name its twin."""
    row, owner = ENGINES[engine], engine_of_program(program)
    if program not in PROGRAMS or owner in (engine, *row.guests):
        return
    twin = next((name for name in row.programs if name.startswith(f"{program}-")), "")
    raise RequestError(
        asked=f"to train {program} with the {engine} engine",
        found=f"{program!r}, a program of {owner}",
        why=f"{row.title} trains {row.models}: the programs with one are "
        + (" and ".join(row.programs) or "none"),
        do=f"allranks train {twin}" if twin else f"one of them, or --engine {owner}",
    )


def is_only_a_task(file: Path) -> bool:
    """Whether a script defines a task and does nothing else: run by itself it would just end."""
    tree = _parsed(file)
    names = {name for node in ast.walk(tree) for name in _imported(node)}
    tasks = {f"{module}.Task" for engine in ENGINES.values() for module in engine.tasks}
    texts = [n for n in tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    defines = all(isinstance(node, DEFINITIONS) or node in texts for node in tree.body)
    return (
        bool(names & tasks)
        and defines
        and any(isinstance(node, ast.ClassDef) for node in tree.body)
    )


DEFINITIONS = (
    *(ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.Assign, ast.AnnAssign),
)


def default_strategy(engine: str, ranks: int) -> str:
    """The strategy where nobody says one."""
    return ENGINES[engine].many if ranks > 1 else ENGINES[engine].alone


def trained_also_by(engine: str) -> tuple[str, ...]:
    """The other engines that train the tasks of this one."""
    return tuple(name for name, other in ENGINES.items() if engine in other.guests)


def check_installed(engine: str, program: str = "") -> None:
    """Raise `RequestError` unless what trains `program` is in this Python; imports nothing."""
    row = ENGINES[engine]
    needs = row.guests.get(engine_of_program(program), row.needs)
    missing = [name for name in needs.packages if find_spec(name) is None]
    if missing:
        others = "".join(f", or --engine {e} for {row.task}" for e in trained_also_by(engine))
        raise RequestError(
            asked=f"to train {program or row.task} with the {engine} engine",
            found=f"no package {' and '.join(missing)} in this Python",
            why="it is an extra: who trains with torch alone installs nothing of it",
            do=f"pip install 'allranks[{needs.name}]'{others}",
        )


def preload_for(program: str, engine: str = TORCH) -> tuple[str, ...]:
    """What the fork server imports before it forks, once for all ranks; never a user's file.

    These are modules of ours, Keras for a Keras task that trains with torch, and `MODULE:NAME` for
    what a file imports of `LARGE`.
    """
    row = ENGINES[engine]
    guest = row.guests.get(engine_of_program(program))
    modules = (row.preload, row.worker, *((guest.preload,) if guest else ()))
    if program in PROGRAMS:
        return (*modules, PROGRAMS[program].partition(":")[0])
    return (*modules, *_large_imports(program))


LARGE = ("transformers", "accelerate", "lightning", "sklearn")
"""Packages that take long to import, and were seen to start no thread and no device then."""
CHANGES_IMPORTS = re.compile(rb"environ|putenv|sys\.path")


def _large_imports(program: str) -> tuple[str, ...]:
    """What a file imports at its top of `LARGE`, unless it may mean, or set, something else."""
    path = _file_of(program)
    if path is None or CHANGES_IMPORTS.search(_text(path)):
        return ()
    ends, folders = ("", ".py"), (path.parent, Path())
    hidden = [p for p in LARGE for end in ends for d in folders if (d / f"{p}{end}").exists()]
    names = [name for node in _parsed(path).body for name in _imported(node)]
    large = [n for n in names if n.partition(".")[0] in {*LARGE} - {*hidden}]
    if any(name.startswith("transformers.") for name in large):
        large.append("transformers.modeling_utils")  # of every model, and loaded with the first
    places = (name.rpartition(".") for name in dict.fromkeys(large))
    return tuple(f"{module or name}:{name if module else '__name__'}" for module, _, name in places)


def _text(file: Path) -> bytes:
    """What is in a file; nothing if it cannot be read: what is wrong is said when it is loaded."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _parsed(file: Path) -> ast.Module:
    """The tree of a file; an empty one if it has none."""
    try:
        return ast.parse(_text(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _not_there(engine: str, strategy: str) -> RequestError:
    card = card_of(strategy)
    return RequestError(
        asked=f"--engine {engine} --strategy {strategy}",
        found=f"{card.name!r} is a strategy of {' and '.join(card.engines)}",
        why=f"the {engine} engine has {', '.join(STRATEGIES[engine])}",
        do=f"--engine {card.engines[0]}, or one of those strategies",
    )


def engine_of_program(program: str) -> str:
    """The engine of a program's task, as far as its name or the text of its file tells."""
    usual, *others = ENGINES.values()
    if program in PROGRAMS:
        return next((engine.name for engine in others if program in engine.programs), usual.name)
    path = _file_of(program)
    last = [module.rpartition(".")[2] for engine in others for module in engine.tasks]
    if path is None or not any(name.encode() in _text(path) for name in last):
        return usual.name  # without the name of such a module no need to parse the file
    names = [name for node in ast.walk(_parsed(path)) for name in _imported(node)]
    return next((engine.name for engine in others if _takes_a_task(names, engine)), usual.name)


def _takes_a_task(names: list[str], engine: Engine) -> bool:
    """Whether one of the imported names is in a module that holds the tasks of the engine."""
    return any(f"{name}.".startswith(f"{module}.") for name in names for module in engine.tasks)


def _file_of(program: str) -> Path | None:
    """The file of a program, if it can be told without importing anything."""
    place = program if program.endswith(".py") else program.rpartition(":")[0]
    if place.isidentifier():  # of a module in a package the package would have to be imported
        here = f"{place}.py"  # where ranks look first
        spec = None if Path(here).is_file() or place in sys.modules else find_spec(place)
        place = here if spec is None else spec.origin or ""
    path = Path(place)
    return path if path.suffix == ".py" and path.is_file() else None


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []
