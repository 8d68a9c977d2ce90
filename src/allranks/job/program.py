"""The program of a job: from the name that a user gives to the task class that it means."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.util import source_from_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.catalog import ENGINES, PROGRAMS
from allranks.errors import RequestError, nearest

# --- loaded --------------------------------------------------------------------------------------
# Which files of the user's a program was loaded from, and what else it has read.
#
# A file may be edited while a job runs: what a checkpoint says of the program must be true of what
# was loaded. So a file is read when it is imported, and never again. Files of this package, of
# installed packages and of the standard library are not the user's: their versions stand elsewhere.
#
# A process that is there for a look alone can also say every file that it has asked for (`Reads`):
# data, settings, modules that a function imports. Its result holds while they are as they were.


INSTALLED = ("site-packages", "dist-packages")
PROGRAM, MODULES = "program_sha256", "modules_sha256"
MOST_READS = 10_000
DIGEST_UP_TO = 1 << 20  # of bytes: a file that is written anew with the same content is the same
QUOTED = re.compile(r"""(?<=["'])[A-Za-z_]\w*(?=["'])""")
_digests: dict[str, tuple[Path, str]] = {}  # name of a module -> its file, as it was imported
_programs: dict[str, str] = {}  # whole path of a file that is a program -> its digest
_looked_at: dict[str, int] = {}  # the last module at the last look -> how many there were


def remember_program(path: Path, content: bytes) -> None:
    """The file of a program is about to run, with this content."""
    _programs[str(path.resolve())] = hashlib.sha256(content).hexdigest()


def program_facts(program: str) -> dict[str, object]:
    """The digest of the file of a program, as loaded, and those of the user's modules by name.

    The first is `None` where the program is a module or a built-in one: then it is among the
    modules, or among the files of this package.
    """
    path = Path(program if program.endswith(".py") else program.rpartition(":")[0]).resolve()
    facts: dict[str, object] = {PROGRAM: _programs.get(str(path)) or file_sha256(program)}
    if modules := _modules_besides(path):
        facts[MODULES] = modules
    return facts


def file_sha256(program: str) -> str | None:
    """The digest of the file of a program as it is on disk now; `None` where it is no file."""
    path = Path(program if program.endswith(".py") else program.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def by_name(facts: dict[str, object]) -> dict[str, object]:
    """The same facts, with an entry for each module: `module helpers` -> its digest."""
    modules = facts.get(MODULES)
    separate = {name: value for name, value in facts.items() if name != MODULES}
    if isinstance(modules, dict):
        separate |= {f"module {name}": digest for name, digest in modules.items()}
    return separate


def remember_modules() -> None:
    """Take the digests of all modules so far. The fork server calls this before it forks.

    A rank that looked through thousands of modules would copy the memory in which they lie.
    """
    _take_digests()


def _modules_besides(program: Path) -> dict[str, str]:
    """Those that are imported by now; a digest is taken when a module is first seen here."""
    _take_digests()
    return {
        name: digest
        for name, (path, digest) in sorted(_digests.items())
        if name in sys.modules and path != program
    }


def _take_digests() -> None:
    modules = list(sys.modules.items())  # at once: another thread may import one meanwhile
    for name, module in _imported_since(modules):
        path = _file_of_a_user(module)
        if path is None or name == "__main__" or name in _digests:
            continue
        if path.is_file():
            _digests[name] = path, hashlib.sha256(path.read_bytes()).hexdigest()
    _looked_at.clear()
    _looked_at[modules[-1][0]] = len(modules)


def _imported_since(modules: list[tuple[str, ModuleType]]) -> list[tuple[str, ModuleType]]:
    """Those since the last look, here or in the fork server; at first, all of them."""
    for last, count in _looked_at.items():
        if count <= len(modules) and modules[count - 1][0] == last:
            return modules[count - 1 :]
    return modules


def _file_of_a_user(module: ModuleType) -> Path | None:
    """Paths are compared as texts first: a rank has thousands of modules, and few are a user's."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or _is_known(file):
        return None
    path = Path(file).resolve()
    return None if _is_known(str(path)) else path


def _is_known(file: str) -> bool:
    return file.startswith(_KNOWN) or any(f"{os.sep}{part}{os.sep}" in file for part in INSTALLED)


# --- what else it has read ------------------------------------------------------------------------

State = list[Any] | None  # bytes, time of the last change, digest if small; `None`: no such file


class Reads:
    """Every file and folder that this process asks for from now on, and its state at that moment.

    For a process that ends soon: Python's audit hooks stay for good. What the process writes itself
    does not count, nor do the folders of modules, nor what a library opens without Python.
    """

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._written: set[str] = set()
        sys.addaudithook(self._hear)

    def files(self) -> dict[str, State]:
        """By their whole paths, `MOST_READS` at most."""
        states = {path: s for path, s in self._states.items() if path not in self._written}
        for path, state in states.items():
            if state is not None and _state(path) == state:
                state.append(_digest(path, state[0]))
        return states

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._take(arguments[0], arguments[2])
        elif event == "os.rename":
            self._take(arguments[1], os.O_WRONLY)
        elif event in ("os.listdir", "os.scandir") and arguments[0] not in sys.path:
            self._take(arguments[0], os.O_RDONLY)

    def _take(self, path: Any, flags: int) -> None:
        try:
            whole = os.path.abspath(os.fsdecode(path))
        except (OSError, ValueError, TypeError):  # a descriptor; or who asks for it hears that
            return
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._written.add(whole)
        elif len(self._states) < MOST_READS and not whole.startswith((*_KNOWN, *SYSTEM)):
            whole = _source(whole)
            self._states.setdefault(whole, _state(whole))


def changed_reads(files: Mapping[str, State]) -> list[str]:
    """The files that have changed since they were read."""
    return [path for path, state in files.items() if not _is_as_then(path, state)]


def environment_of(files: Iterable[str]) -> str:
    """The digest of the variables whose names stand quoted in the user's files among `files`."""
    names: set[str] = set()
    for file in files:
        if file.endswith(".py") and not _is_known(file) and os.path.isfile(file):
            names |= set(QUOTED.findall(Path(file).read_text(errors="replace")))
    variables = {name: os.environ[name] for name in sorted(names - {"_"}) if name in os.environ}
    return hashlib.sha256(json.dumps(variables).encode()).hexdigest()


def _is_as_then(path: str, then: State) -> bool:
    now = _state(path)
    if then is None or now is None or now == then[:2]:
        return now == (then and then[:2])
    return bool(then[2:] and then[2] and then[2] == _digest(path, now[0]))


def _digest(path: str, size: int) -> str:
    """That of a small file which is no installed one; "" for others."""
    if size > DIGEST_UP_TO or _is_known(path):
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # a folder too
        return ""


def _state(path: str) -> State:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]


def _source(path: str) -> str:
    """The file that a compiled module was made of."""
    try:
        return source_from_cache(path) if path.endswith(".pyc") else path
    except ValueError:
        return path


SYSTEM = ("/proc/", "/sys/", "/dev/")
_FOLDERS = (
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib")),
)
_KNOWN = tuple(f"{path}{os.sep}" for folder in _FOLDERS for path in (folder, folder.resolve()))


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
    local = {name: c for name, c in classes.items() if c.__module__ == module.__name__}
    if wanted:
        return _named_class(program, wanted, classes, module)
    if len(local) != 1:
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found=f"{len(local)} tasks in it ({', '.join(sorted(local)) or 'none'})",
            why="a program is one class derived from "
            + " or ".join(f"{base.__module__}.{base.__qualname__}" for base in bases),
            do=f"name one: {program}:{_most_derived_from(local)}"
            if local
            else _of_another_engine(module),
        )
    return next(iter(local.values()))


def _most_derived_from(classes: dict[str, type]) -> str:
    """The name of the class that most of the others derive from; of several the first written."""
    return max(
        classes, key=lambda name: sum(issubclass(c, classes[name]) for c in classes.values())
    )


def _of_another_engine(module: ModuleType) -> str:
    """Advice for a file without a task of this engine: it may have one of another engine."""
    for engine in ENGINES.values():
        for name, value in sorted(vars(module).items()):
            bases = value.__mro__[1:] if isinstance(value, type) else ()
            if any(b.__module__ in engine.tasks and b.__qualname__ == "Task" for b in bases):
                asked = f"--engine {engine.name}"
                return f"{name} is a task of {engine.name}: {asked}, and its strategies"
    return "write a class derived from Task in it; `allranks new plain` writes one to start from"


def _check_is_no_script(path: Path, program: str) -> None:
    """Raise for a file that is a training loop and holds no task: importing it would run it."""
    if is_script(path):
        raise RequestError(
            asked=f"PROGRAM {program!r}",
            found="a script: no class in it is a task",
            why="`train` trains a task; a loop of one's own is started on all ranks by `run`",
            do=f"allranks run --ranks 2 -- python {program}, or first "
            f"allranks check --ranks 2 -- python {program}",
        )


def is_script(path: Path) -> bool:
    """Whether this file has a loop and, by its text, can hold no task; it is not imported.

    It makes no class, or imports nothing but Python's modules and packages in `FOREIGN`.
    """
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # what is wrong with it is said when it is loaded
    kinds = {type(node) for node in nodes}
    if not kinds & {ast.For, ast.While}:
        return False
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    names = {getattr(call, "id", getattr(call, "attr", "")) for call in calls}
    if ast.ClassDef not in kinds and not names & {"type", "make_dataclass"}:
        return True
    modules = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    modules += [
        "." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)
    ]
    return {name.partition(".")[0] for name in modules} <= FOREIGN | sys.stdlib_module_names


FOREIGN = frozenset(
    (
        *("torch", "torchvision", "torchaudio", "lightning", "pytorch_lightning", "accelerate"),
        *("transformers", "datasets", "deepspeed", "timm", "keras", "tensorflow", "jax", "flax"),
        *("numpy", "sklearn", "PIL"),
    )
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


DISTRIBUTIONS = {
    **{"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "yaml": "pyyaml"},
    **{"skimage": "scikit-image", "bs4": "beautifulsoup4", "dateutil": "python-dateutil"},
    **{"attr": "attrs", "dotenv": "python-dotenv", "git": "gitpython", "faiss": "faiss-cpu"},
    **{"hydra": "hydra-core", "umap": "umap-learn", "google": "protobuf", "fitz": "pymupdf"},
}
"""Modules whose distribution has another name."""


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
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if missing and not f"{where}.".startswith(f"{missing}."):
        package = missing.partition(".")[0]
        return RequestError(
            asked=f"PROGRAM {program!r}",
            found=f"no module {missing!r} in this Python{line}",
            why="the program imports it",
            do=f"pip install {DISTRIBUTIONS.get(package, package)}, or write its right name",
        )
    return RequestError(
        asked=f"PROGRAM {program!r}",
        found=f"{type(error).__name__}: {message}{line}",
        why="importing it fails, so there is no task to train",
        do=f"mend it until `python {where}` starts"
        if where.endswith(".py")
        else f"mend it until `python -c 'import {where}'` works",
    )
