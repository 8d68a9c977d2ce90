"""A class of a notebook, carried to its ranks by value: a short program, and a pickle beside it.

cloudpickle takes with the class what its functions use of the notebook, as it is at the launch:
functions, classes, tensors, changes that were made since. What a module defines is imported by its
name, in the folders where the notebook looks for modules. The writing side is `write_class`;
`load_class` is called by the program, on every rank.

Equal content gives equal bytes, in any process: a job names its program, and is resumed only with
that. The program holds the digest of the pickle, because a pickle runs code when it is read.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import linecache
import os
import pickle
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import _HAS_DEFAULT_FACTORY, KW_ONLY, MISSING  # type: ignore[attr-defined]
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, NoneType
from typing import Any

import cloudpickle

from allranks.catalog import ENGINES
from allranks.checkpoint.files import write_whole
from allranks.errors import RequestError
from allranks.job.job import HIDDEN, redacted

PYTHON = ".".join(map(str, sys.version_info[:2]))
NAMESPACE, UNTRACKED = "namespace", "untracked"
SINGLETONS = {
    "MISSING": MISSING,
    "KW_ONLY": KW_ONLY,
    "HAS_DEFAULT_FACTORY": _HAS_DEFAULT_FACTORY,
}
"""Dataclasses compare with these by identity, so a copy is not good enough."""
TRACKED = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
SORTABLE = (str, bytes, bool, int, float, NoneType)
MOST_NAMED = 1000  # items of one collection: of longer ones a refusal names the collection
WRITEFILE_MAGIC = "%%writefile mytask.py"
PROGRAM = '''\
"""{name}, as it was in a notebook when it was launched. Written by allranks."""

import sys

sys.path[:] = dict.fromkeys([*{folders!r}, *sys.path])  # as in the notebook

import {engine}

from allranks.cli.by_value import load_class

{name} = load_class(globals(), {file!r}, {digest!r}, {python!r})
'''


def write_class(task_class: type, namespace: Mapping[str, Any], folder: Path) -> Path:
    """Write the program that has `task_class` of a notebook; raises `RequestError` before that.

    `namespace` is the notebook's. The names of the files say what is in them, so that a file which
    a run folder refers to is never written over.
    """
    name = task_class.__name__
    content = _pickled(task_class, namespace)
    digest = hashlib.sha256(content).hexdigest()
    stem = f"{name}-{digest[:8]}"
    bases = (kind.__module__ for kind in task_class.__mro__)
    tasks = {module for engine in ENGINES.values() for module in engine.tasks}
    text = PROGRAM.format(
        name=name,
        folders=[os.path.abspath(folder) for folder in sys.path if os.path.exists(folder or ".")],
        engine=next((module for module in bases if module in tasks), "allranks"),
        file=f"{stem}.pickle",
        digest=digest,
        python=PYTHON,
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {folder / f"{stem}.pickle": content, folder / f"{stem}.py": text.encode()}
    _check_that_nobody_else_writes(folder, *files)
    for path, data in files.items():
        write_whole(path, data, mode=0o600)
    return path


def _check_that_nobody_else_writes(*paths: Path) -> None:
    """Refuse a folder, or a file in it, that another user owns or may write."""
    for path in paths:
        with suppress(FileNotFoundError):  # it is about to be written, or to be read
            status = path.stat()
            others = status.st_uid != os.geteuid()
            if others or status.st_mode & 0o022:
                raise RequestError(
                    asked=f"to use {path}, for a class of a notebook",
                    found="it belongs to another user" if others else "other users may write it",
                    why="a pickle runs code when it is read, so nobody else may put one there",
                    do="launch the class from a notebook of yours, with a run_dir elsewhere"
                    if others
                    else f"chmod go-w {shlex.quote(str(path))}",
                )


def _pickled(task_class: type, namespace: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    pickler = _Pickler(content, task_class.__name__, namespace)
    annotated = {
        name: namespace[name]
        for kind in task_class.__mro__
        for annotation in inspect.get_annotations(kind).values()
        if isinstance(annotation, str)
        for node in ast.walk(ast.parse(annotation, mode="eval"))
        if isinstance(node, ast.Name) and (name := node.id) in namespace
    }
    try:
        # The pickler fills the last two while it writes the class; they are written after it.
        pickler.dump((task_class, annotated, pickler.definitions, pickler.sources))
    except RequestError:
        raise
    except Exception as error:  # a class may raise anything when it is pickled
        raise pickler.refusal(pickler.last, f"{type(error).__name__}: {error}") from error
    return content.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # of a package without types
    """Pickles a class of a notebook; raises `RequestError` for what no other process can have."""

    def __init__(self, file: io.BytesIO, name: str, namespace: Mapping[str, Any]) -> None:
        super().__init__(file)
        self.name, self.namespace = name, namespace
        self.last: Any = None
        self.definitions: list[tuple[type | FunctionType, str]] = []
        self.sources: dict[str, dict[int, str]] = {}
        self._defined: set[int] = set()
        self._cells = {"<string>": "<string>"}  # by file; that one is a dataclass's own
        self._sets: dict[int, tuple[int, Any]] = {}  # with the set, so that its id stays its own
        self._paths: dict[int, str] = {}

    def reducer_override(self, value: Any) -> Any:
        """As cloudpickle does, but for the storage of a tensor: torch writes its address too."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.TypedStorage):
            data = torch.empty(0, dtype=torch.uint8).set_(value._untyped_storage)
            return storage_of, (value.dtype, data.numpy().tobytes())
        return super().reducer_override(value)

    def persistent_id(self, value: Any) -> Any:
        """Called for every object before it is pickled: the key of what `_Unpickler` makes."""
        self.last = value
        if type(value) is str and value in TRACKED:
            return UNTRACKED  # a random id, by which cloudpickle knows a class or a TypeVar again
        if type(value) in (set, frozenset) and all(type(item) in SORTABLE for item in value):
            number, _ = self._sets.setdefault(id(value), (len(self._sets), value))
            return number, type(value), tuple(sorted(value, key=repr))
        if value is self.globals_ref.get(id(self.namespace), self):
            return NAMESPACE
        if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
            raise self.refusal(value, f"an open file, {getattr(value, 'name', value)!r}")
        if (device := _device_of(value)) is not None:
            raise self.refusal(value, f"a tensor on {device}", "bring it to the CPU: .cpu()")
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            code = getattr(value, "__code__", None)
            file = "" if code is None else code.co_filename
            # The name of a cell is random, or has the id of the process or a count in it.
            cell = file and self._cells.setdefault(file, f"cell-{len(self._cells)}.py")
            if id(value) not in self._defined:
                self._defined.add(id(value))
                self.definitions.append((value, cell))
            if isinstance(value, FunctionType):
                self._add_source(value, cell)
        self._name_parts(value)
        return next((key for key, known in SINGLETONS.items() if value is known), None)

    def _add_source(self, function: FunctionType, cell: str) -> None:
        """Keep the lines of a function, so that the report of a fault can quote them."""
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError, SyntaxError):
            return
        self.sources.setdefault(cell, {}).update(enumerate(lines, max(first, 1)))

    def _name_parts(self, value: Any) -> None:
        """Remember by which names the parts of `value` are reached; refuse secrets among them."""
        for path, word, part in _parts_of(value, self._paths.get(id(value), "")):
            self._paths.setdefault(id(part), path)
            if type(part) is str and redacted({word: part})[word] == HIDDEN:
                do = "read it in a method of the task: os.environ[…]"
                raise self.refusal(part, "a text that looks like a secret", do)

    def refusal(self, value: Any, found: str, do: str = "") -> RequestError:
        """What cannot be carried, by the name under which the notebook has it."""
        name = self._paths.get(id(value), "")
        return RequestError(
            asked=f"to launch {self.name} from a notebook",
            found=f"{self.name} uses {name!r}: {found}" if name else found,
            why="ranks are new processes: they get a copy of what a class uses, and of files, "
            "locks, devices and connections there is none",
            do=f"{do or f'open or make it in a method of {self.name} (model, train_data, …)'}; or "
            f"write the cells into a file ({WRITEFILE_MAGIC}) and launch that",
        )


def _parts_of(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """The parts of an object: how to write each, its own word in that, and what it is."""
    if type(value) is dict and type(used := value.get("__globals__")) is dict:
        # the state of a function, as cloudpickle takes it
        yield from ((name, name, part) for name, part in used.items())
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                yield name, name, cell.cell_contents
    elif isinstance(value, type):
        for name, part in vars(value).items() if value.__module__ == "__main__" else ():
            if not name.startswith("__"):
                yield f"{value.__name__}.{name}", name, part
    elif type(value) is dict and path:
        yield from ((f"{path}[{key!r}]", str(key), part) for key, part in value.items())
    elif type(value) in (list, tuple) and path and len(value) <= MOST_NAMED:
        yield from ((f"{path}[{i}]", "", part) for i, part in enumerate(value))
    elif path and not isinstance(value, ModuleType):
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{path}.{name}", name, part) for name, part in attributes.items())


def _device_of(value: Any) -> Any:
    """The device of a tensor of torch that is not in the memory of the host."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    return None if value.device.type in ("cpu", "meta") else value.device


# --- on a rank ----------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote; the functions get `namespace` as their globals."""

    def __init__(self, content: bytes, namespace: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._known = {NAMESPACE: namespace, UNTRACKED: None, **SINGLETONS}

    def persistent_load(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._known[key]
        number, kind, items = key
        return self._known.setdefault(number, kind(items))


def storage_of(dtype: Any, content: bytes) -> Any:
    """The storage of a tensor of torch, which has been imported with `dtype`."""
    torch: Any = sys.modules["torch"]
    storage = torch.UntypedStorage(len(content))
    if content:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(data)
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def load_class(namespace: dict[str, Any], file: str, digest: str, python: str) -> type:
    """The class in `file`, beside the program that has this namespace.

    What the class uses is in the namespace then, as if the program had defined it.
    """
    if python != PYTHON:
        raise RequestError(
            asked=f"to train what a notebook of Python {python} defined",
            found=f"Python {PYTHON} on this rank",
            why="functions are carried as compiled code, which another Python cannot run",
            do=f"start it with Python {python}, or launch it again from a notebook of this one",
        )
    path = Path(namespace["__file__"]).with_name(file)
    _check_that_nobody_else_writes(path.parent, Path(namespace["__file__"]), path)
    content = path.read_bytes()
    if (now := hashlib.sha256(content).hexdigest()) != digest:
        raise RequestError(
            asked=f"to train the class of a notebook that is in {path}",
            found=f"a content of SHA-256 {now}; the program beside it was written with {digest}",
            why="a pickle runs code when it is read, so no other one is",
            do="put the file back as it was, or launch the class again from the notebook",
        )
    of_program = dict(namespace)
    task_class, annotated, definitions, sources = _Unpickler(content, namespace).load()
    for value, cell in definitions:
        value.__module__ = of_program["__name__"]
        if isinstance(value, FunctionType):
            value.__code__ = _code_in(cell, value.__code__)
        elif value.__name__ == value.__qualname__:
            namespace.setdefault(value.__name__, value)
    namespace.update({**annotated, **of_program})
    for cell, lines in sources.items():
        text = [lines.get(number, "\n") for number in range(1, max(lines) + 1)]
        linecache.cache[cell] = (len(text), None, text, cell)
    kind_of_task: type = task_class
    return kind_of_task


def _code_in(cell: str, code: CodeType) -> CodeType:
    """Code that names its cell in a traceback; cloudpickle leaves such names out."""
    inner = [_code_in(cell, c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return code.replace(co_filename=cell, co_consts=tuple(inner))
