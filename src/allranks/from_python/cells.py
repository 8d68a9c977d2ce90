"""A program file out of a notebook: the class that is to be trained, and what it needs of the cells.

Kept are imports, definitions of functions and classes, and constants: a plain value as it is now,
else the one assignment that made it. All other statements are left out, so a name that was changed
in several steps, or stands for an object that only the notebook has, is refused by its name.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import math
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.errors import RequestError
from allranks.from_python.needs import changed_by, needs_of
from allranks.job_file import HIDDEN, redacted

LONGEST_CONSTANT = 10_000  # characters
ONLY_IN_NOTEBOOKS = ("get_ipython", "display")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
OPENING = '"""{name}, as it stood in a notebook when it was launched. Written by allranks."""'


@dataclass(frozen=True)
class Statement:
    """A statement at the top of a cell."""

    cell: str
    node: ast.stmt

    @property
    def text(self) -> str:
        """As it was written, with its decorators."""
        if not isinstance(self.node, Definition):
            return ast.get_source_segment(self.cell, self.node) or ast.unparse(self.node)
        first = min(node.lineno for node in (self.node, *self.node.decorator_list))
        return "\n".join(self.cell.split("\n")[first - 1 : self.node.end_lineno])


def program_text(name: str, cells: Sequence[str], namespace: Mapping[str, Any]) -> str:
    """The text of a file that defines `name` as the notebook has it now; raises `RequestError`.

    `cells` are those that were run, in that order, as Python; `namespace` is what they made.
    """
    statements = [statement for cell in cells for statement in _statements(cell)]
    writer = _Writer(name, statements, namespace)
    writer.add(name, "launch")
    return writer.text()


def _statements(cell: str) -> list[Statement]:
    try:
        return [Statement(cell, node) for node in ast.parse(cell).body]
    except (SyntaxError, ValueError):  # it was never run either
        return []


@dataclass
class _Writer:
    """Collects what a program file consists of, each part before those that need it."""

    name: str
    statements: list[Statement]
    namespace: Mapping[str, Any]
    imports: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, name: str, user: str) -> None:
        """Add what `name` stands for, and all that it needs; `user` is who needs it."""
        if name in self.seen or self._is_everywhere(name):
            return
        self.seen.add(name)
        if name not in self.namespace:
            raise self._refused(user, f"the name {name!r}, which nothing in the notebook defines")
        value = self.namespace[name]
        made_by = [s for s in self.statements if name in changed_by(s.node)]
        if _is_plain(value):
            self.constants.append(f"{name} = {self._written(name, value)}")
        elif imports := _imports_for(name, value, made_by):
            self.imports += [line for line in imports if line not in self.imports]
        else:
            self._define(name, user, self._statement(name, made_by, user))

    def _define(self, name: str, user: str, statement: Statement) -> None:
        text, needs = statement.text, needs_of(statement.text)
        is_definition = isinstance(statement.node, Definition)
        now = needs.now if is_definition else needs.now | needs.later
        if name in now:
            raise self._changed(name, user, statement)
        for needed in sorted(now):
            self.add(needed, name)
        if text not in self.definitions:
            self.definitions.append(text)
        for needed in sorted(needs.later):
            self.add(needed, name)

    def _is_everywhere(self, name: str) -> bool:
        """Whether every file has this name by itself."""
        if name.startswith("__") and name.endswith("__"):
            return True
        is_ours = name in self.namespace or name in ONLY_IN_NOTEBOOKS
        return hasattr(builtins, name) and not is_ours

    def _statement(self, name: str, made_by: list[Statement], user: str) -> Statement:
        """The statement that made what `name` stands for."""
        last = made_by[-1] if made_by else None
        if last is None or isinstance(last.node, Definition):
            value = self.namespace[name]
            for statement in (*_where_it_stands(value), *reversed(made_by)):
                if isinstance(statement.node, Definition) and statement.node.name == name:
                    return statement
        elif _is_assignment(last.node):
            return last
        if last is None:
            kind = type(self.namespace[name]).__name__
            raise self._refused(user, f"{name!r} ({kind}), which no cell makes by a statement")
        raise self._changed(name, user, last)

    def _changed(self, name: str, user: str, by: Statement) -> RequestError:
        line = by.text.partition("\n")[0]
        return self._refused(user, f"{name!r}, which is changed by a statement: {line}")

    def _written(self, name: str, value: Any) -> str:
        text = repr(value)
        if redacted({name: value})[name] == HIDDEN:
            raise self._refused(
                self.name,
                f"{name!r}, which looks like a secret",
                f"read it in a method of {self.name}: os.environ[…]",
            )
        if len(text) > LONGEST_CONSTANT:
            raise self._refused(
                self.name,
                f"{name!r}, a constant of {len(text)} characters",
                f"read it from a file, in a method of {self.name}",
            )
        return text

    def _refused(self, user: str, found: str, do: str = "") -> RequestError:
        return RequestError(
            asked=f"to launch {self.name} from a notebook",
            found=f"{user} needs {found}",
            why="ranks are new processes: they get the imports, definitions and constants of the "
            "notebook as a file, and nothing of its memory",
            do=do
            or f"make it inside {self.name} (in model, train_data, …) or in a function, or "
            "assign it once",
        )

    def text(self) -> str:
        """The whole file."""
        from_future = {
            s.text
            for s in self.statements
            if isinstance(s.node, ast.ImportFrom) and s.node.module == "__future__"
        }
        order = [statement.text for statement in self.statements]
        order += self.imports  # those that no cell wrote come last
        imports = sorted(set(self.imports) - from_future, key=order.index)
        folders = [
            f"sys.path.insert(0, {folder!r})  # as in the notebook"
            for folder in _folders_of(imports)
        ]
        parts = [OPENING.format(name=self.name), "\n".join(sorted(from_future))]
        parts += ["\n".join(["import sys", "", *folders]) if folders else ""]
        parts += ["\n".join(imports), "\n".join(self.constants)]
        head = "\n\n".join(part for part in parts if part)
        return "\n\n\n".join([head, *self.definitions]) + "\n"


def _where_it_stands(value: Any) -> Iterator[Statement]:
    """The statements of the cell, or file, that holds the code of a function or of a class's methods.

    A cell that failed halfway stands in the history too, and may have defined nothing.
    """
    for function in vars(value).values() if isinstance(value, type) else (value,):
        code = getattr(inspect.unwrap(function), "__code__", None)
        text = "".join(linecache.getlines(code.co_filename)) if code is not None else ""
        if text:
            yield from reversed(_statements(text))
            return


def _is_assignment(node: ast.stmt) -> bool:
    """`a = …` and `a, b = …`, not `a.b = …`."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [p for t in targets for p in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]
    return node.value is not None and all(isinstance(part, ast.Name) for part in parts)


def _is_plain(value: Any) -> bool:
    """Whether `repr` of it is the value again."""
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value)) and value != set()
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return value is None or type(value) in (bool, int, str, bytes)


def _imports_for(name: str, value: Any, made_by: Sequence[Statement]) -> list[str]:
    """The statements that import `name`, if that is where it came from last; all `import a.…`."""
    last = made_by[-1].node if made_by else None
    if last is not None and (isinstance(last, Definition) or _is_assignment(last)):
        return []
    if isinstance(last, ast.ImportFrom):
        return [made_by[-1].text]
    return [s.text for s in made_by if isinstance(s.node, ast.Import)] or _import_of(name, value)


def _import_of(name: str, value: Any) -> list[str]:
    """How to import what came by `from … import *`, or by a magic; [] if it cannot be imported."""
    if isinstance(value, ModuleType):
        return [f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")]
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(own, str) or module == "__main__":
        return []
    if getattr(sys.modules.get(module), own, None) is not value:
        return []
    return [f"from {module} import {own}" + (f" as {name}" if name != own else "")]


def _folders_of(imports: Iterable[str]) -> list[str]:
    """The folders of imported modules that a new interpreter would not look into."""
    found: dict[str, None] = {}
    for line in imports:
        for node in ast.walk(ast.parse(line)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in (sys.modules.get(name.partition(".")[0]) for name in names):
                file = getattr(module, "__file__", None)
                if file is not None:
                    folder = Path(file).resolve().parent
                    found[str(folder.parent if hasattr(module, "__path__") else folder)] = None
    here = _real(sys.path) - _looked_into()
    return [folder for folder in found if folder in here]


def _looked_into() -> set[str]:
    """Where every interpreter of this environment looks, editable installations among it."""
    places = {*site.getsitepackages(), site.getusersitepackages()}
    links = [link for place in places for link in Path(place).glob("*.pth")]
    linked = [line for link in links for line in link.read_text(errors="replace").splitlines()]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [*sysconfig.get_paths().values(), sysconfig.get_config_var("DESTSHARED") or ""]
    return _real([*places, *own, *linked, *filter(None, given)])


def _real(places: Iterable[str]) -> set[str]:
    return {os.path.realpath(place) for place in places}
