"""Which engine trains a job: the one that was asked for, that its strategy needs, or its program.

    --engine NAME         said by the user
    the strategy          `ddp` is torch's, `mirrored` is TensorFlow's; `single` is in both
    the program           what its file imports: `allranks.tensorflow`, or else torch

A Keras task (`allranks.tensorflow.Task`) can be trained by either engine; one of torch by torch alone.
Nothing is imported to find out: a file is only read.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

from allranks.catalog import ENGINES, KERAS_PROGRAMS, PROGRAMS, TASKS
from allranks.errors import RequestError, nearest
from allranks.strategies.resolve import card_of, engines_of
from allranks.strategies.torch_cards import CARDS

TORCH, TENSORFLOW = "torch", "tensorflow"
KERAS_TASKS = "allranks.tensorflow", TASKS["tensorflow"]  # where users import it, where it is
NEEDS = {"tensorflow": ("tensorflow", "keras")}
DEFAULTS = {TORCH: ("single", "ddp"), TENSORFLOW: ("single", "multi-worker-mirrored")}


def engine_of(asked: str, strategy: str, program: str) -> str:
    """The engine of a job; `asked` and `strategy` are "" where nobody said one.

    Raises `RequestError` for one that is not known, and for one that has no such strategy.
    """
    if asked and asked not in ENGINES:
        raise RequestError(
            asked=f"--engine {asked}",
            found=f"no engine {asked!r}",
            why=f"an engine is the framework that does the arithmetic: {', '.join(ENGINES)}",
            do=nearest(asked, ENGINES),
        )
    able = engines_of(strategy) if strategy else ()
    if asked:
        if able and asked not in able:
            raise _not_there(asked, strategy)
        return asked
    if len(able) == 1:
        return able[0]
    return TENSORFLOW if _is_keras(program) else TORCH


def check_program(engine: str, program: str) -> None:
    """Raise `RequestError` for a built-in program that TensorFlow cannot train: name its twin."""
    if engine != TENSORFLOW or program not in PROGRAMS or program in KERAS_PROGRAMS:
        return
    twin = f"{program}-keras"
    theirs = " and ".join(KERAS_PROGRAMS)
    raise RequestError(
        asked=f"to train {program} with the {TENSORFLOW} engine",
        found=f"{program!r}, a program of torch",
        why=f"TensorFlow trains Keras models: the programs with one are {theirs}",
        do=f"allranks train {twin}" if twin in KERAS_PROGRAMS else "one of them, or --engine torch",
    )


def is_only_a_task(file: Path) -> bool:
    """Whether a script defines a task and does nothing else: run by itself it would just end."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = {name for node in ast.walk(tree) for name in _imported(node)}
    of_a_task = any(
        name in (f"{place}.Task", "allranks.torch.Task", "allranks.tensorflow.Task")
        for place in TASKS.values()
        for name in names
    )
    texts = [n for n in tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    defines = all(isinstance(node, ONLY_DEFINES) or node in texts for node in tree.body)
    return of_a_task and defines and any(isinstance(node, ast.ClassDef) for node in tree.body)


ONLY_DEFINES = (
    *(ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.Assign, ast.AnnAssign),
)


def default_strategy(engine: str, ranks: int) -> str:
    """The strategy where nobody says one."""
    alone, many = DEFAULTS[engine]
    return many if ranks > 1 else alone


def check_installed(engine: str, program: str = "") -> None:
    """Raise `RequestError` unless what trains `program` is in this Python; imports nothing."""
    extra: str = engine
    packages: tuple[str, ...] = NEEDS.get(engine, ())
    if engine == TORCH and _is_keras(program):
        extra, packages = "keras", ("keras",)
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        other = ", or --engine torch for a Keras task" if engine == TENSORFLOW else ""
        raise RequestError(
            asked=f"to train {program or 'a Keras task'} with the {engine} engine",
            found=f"no package {' and '.join(missing)} in this Python",
            why="it is an extra: who trains with torch alone installs nothing of it",
            do=f"pip install 'allranks[{extra}]'{other}",
        )


def _not_there(engine: str, strategy: str) -> RequestError:
    card = card_of(strategy)
    own = [name for name, other in CARDS.items() if engine in other.engines]
    return RequestError(
        asked=f"--engine {engine} --strategy {strategy}",
        found=f"{card.name!r} is a strategy of {' and '.join(card.engines)}",
        why=f"the {engine} engine has {', '.join(own)}",
        do=f"--engine {card.engines[0]}, or one of those strategies",
    )


def _is_keras(program: str) -> bool:
    """Whether a program is a Keras task, as far as its name or the text of its file tells."""
    if program in PROGRAMS:
        return program in KERAS_PROGRAMS
    path = _file_of(program)
    if path is None:
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # what is wrong with it is said when it is loaded
    return any(_is_of_keras(name) for node in ast.walk(tree) for name in _imported(node))


def _file_of(program: str) -> Path | None:
    """The file of a program, if it can be told without importing anything."""
    place = program if program.endswith(".py") else program.rpartition(":")[0]
    if place.isidentifier():  # of a module in a package the package would have to be imported
        here = f"{place}.py"  # where ranks look first
        spec = None if Path(here).is_file() or place in sys.modules else find_spec(place)
        place = here if spec is None else spec.origin or ""
    path = Path(place)
    return path if path.suffix == ".py" and path.is_file() else None


def _is_of_keras(name: str) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in KERAS_TASKS)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []
