"""A program file out of a notebook: the class that is to be trained, and what it needs of the cells.

Functions, classes and imports are taken from where they are written. Every other name that they
use travels by its value as it is now (`values`): what made it is not run again, as it may have
drawn, read or changed something. What is neither is refused by its name.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from allranks.cli.notebook.needs import needs_of, set_by
from allranks.cli.notebook.values import VALUES, NotAValue, Values
from allranks.errors import RequestError

ONLY_IN_NOTEBOOKS = ("get_ipython", "display")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
OPENING = '"""{name}, as it stood in a notebook when it was launched. Written by allranks."""'
TO_A_FILE = "%%writefile mytask.py"


@dataclass(frozen=True)
class Statement:
    """A statement at the top of a cell."""

    cell: str
    node: ast.stmt

    @property
    def first_line(self) -> int:
        decorators = self.node.decorator_list if isinstance(self.node, Definition) else []
        return min([self.node.lineno, *(decorator.lineno for decorator in decorators)])

    @property
    def text(self) -> str:
        """As it was written, with its decorators."""
        if not isinstance(self.node, Definition):
            return ast.get_source_segment(self.cell, self.node) or ast.unparse(self.node)
        return "\n".join(self.cell.split("\n")[self.first_line - 1 : self.node.end_lineno])

    def defines(self, name: str) -> bool:
        """Whether it is a definition of `name`, or gives the name to a lambda."""
        match self.node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return self.node.name == name
            case ast.Assign(targets=[ast.Name(id=given)], value=ast.Lambda()):
                return given == name
        return False


@dataclass
class Program:
    """A program file that defines a class as a notebook has it now, and what stands beside it."""

    name: str
    values: Values
    future: list[str]
    folders: list[str]
    imports: list[str]
    constants: list[str]
    definitions: list[str]

    def text(self, files: Sequence[str]) -> str:
        """The whole file; `files` are those that `values` were written to."""
        ours = ["from allranks.catalog import load as _load"]
        ours += ["from allranks.cli.notebook.values import check_made_alike, read_values"]
        folders = [f"sys.path.insert(0, {f!r})  # as in the notebook" for f in self.folders]
        body = "\n".join([*self.constants, *self.definitions])
        read = [f"{VALUES} = read_values(__file__, {list(files)!r})"] if files else []
        parts = [
            OPENING.format(name=self.name),
            "\n".join(self.future),
            "\n".join(["import sys", "", *folders]) if folders else "",
            "\n".join(self.imports),
            "\n".join(line for line in ours if any(n in body for n in _given(line)) or files),
            "\n".join([*read, *self.constants]),
        ]
        head = "\n\n".join(part for part in parts if part)
        return "\n\n\n".join([head, *self.definitions]) + "\n"


def _given(line: str) -> list[str]:
    """The names that one `from … import …` gives."""
    (node,) = ast.parse(line).body
    assert isinstance(node, ast.ImportFrom)
    return [alias.asname or alias.name for alias in node.names]


def program_for(name: str, cells: Sequence[str], namespace: Mapping[str, Any]) -> Program:
    """The file that defines `name` as the notebook has it now; raises `RequestError`.

    `cells` are those that were run, in that order, as Python; `namespace` is what they made.
    """
    statements = [statement for cell in cells for statement in _statements(cell)]
    writer = _Writer(name, statements, namespace)
    writer.add(name, "launch")
    future = {
        s.text
        for s in statements
        if isinstance(s.node, ast.ImportFrom) and s.node.module == "__future__"
    }
    return Program(
        name,
        writer.values,
        sorted(future),
        _folders_of(writer.imports),
        writer.imports,
        writer.constants,
        writer.definitions,
    )


def refused(name: str, user: str, found: str, do: str = "") -> RequestError:
    """What cannot come from a notebook, and what to do: in four parts."""
    return RequestError(
        asked=f"to launch {name} from a notebook",
        found=f"{user} needs {found}",
        why="ranks are new processes: they get functions, classes and imports as they are written, "
        "and numbers, texts, tensors and arrays by their value; nothing is pickled or run again",
        do=f"{do or f'make it in a method of {name} (model, train_data, …) or in a function'}; or "
        f"write the cells into a file ({TO_A_FILE}) and launch that",
    )


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
    values: Values = field(default_factory=Values)

    def add(self, name: str, user: str) -> None:
        """Add what `name` stands for, and all that it needs; `user` is who needs it."""
        if name in self.seen or self._is_everywhere(name):
            return
        self.seen.add(name)
        if name not in self.namespace:
            found = f"the name {name!r}, which nothing in the notebook defines"
            raise refused(self.name, user, found)
        value = self.namespace[name]
        if imports := _imports_for(name, value, self.statements):
            if _folders_of(imports):
                self._check_unchanged(name, user)
            self.imports += [line for line in imports if line not in self.imports]
        elif isinstance(value, type) or _function_of(value) is not None:
            self._add_definition(name, user, value)
        elif dataclasses.is_dataclass(value) and _is_of_its_fields(value):
            self._add_instance(name, value)
        else:
            self.constants.append(f"{name} = {self._value(name, user, value)}")

    def _value(self, name: str, user: str, value: Any) -> str:
        try:
            return self.values.text(name, value)
        except NotAValue as error:
            raise refused(self.name, user, error.what, error.do) from None

    def _add_instance(self, name: str, value: Any) -> None:
        """An instance of a dataclass of the notebook or of a module, of its fields."""
        kind = type(value)
        self.add(kind.__name__, name)
        if self.namespace.get(kind.__name__) is not kind:
            raise refused(self.name, name, f"{kind.__name__}, which is another class by now")
        given = [
            f"{f.name}={self._value(f'{name}.{f.name}', name, getattr(value, f.name))}"
            for f in dataclasses.fields(value)
        ]
        self.definitions.append(f"{name} = {kind.__name__}({', '.join(given)})")

    def _add_definition(self, name: str, user: str, value: Any) -> None:
        own = getattr(value, "__name__", name)
        if own != name and self.namespace.get(own) is value:  # another name for it
            self.add(own, name)
            self.definitions.append(f"{name} = {own}")
            return
        statement = _where_it_stands(name, value, self.statements)
        if statement is None:
            kind = type(value).__name__
            raise refused(self.name, user, f"{name!r} ({kind}), which no cell defines by itself")
        self._check_unchanged(name, user)
        needs = needs_of(statement.text)
        for needed in sorted(needs.now - {name}):
            self.add(needed, name)
        if statement.text not in self.definitions:
            self.definitions.append(statement.text)
        checks = [
            f"check_made_alike({what!r}, {what}, {self._value(what, name, made)})"
            for what, made in _made_at_once(name, value, statement.node)
        ]
        self.definitions += ["\n".join(checks)] if checks else []
        for needed in sorted(needs.later):
            self.add(needed, name)

    def _is_everywhere(self, name: str) -> bool:
        """Whether every file has this name by itself."""
        if name.startswith("__") and name.endswith("__"):
            return True
        is_ours = name in self.namespace or name in ONLY_IN_NOTEBOOKS
        return hasattr(builtins, name) and not is_ours

    def _check_unchanged(self, name: str, user: str) -> None:
        """Raise `RequestError` if a statement set something on it since it was defined."""
        defined = [i for i, s in enumerate(self.statements) if s.defines(name)]
        for statement in self.statements[max(defined, default=-1) + 1 :]:
            if name in set_by(statement.node):
                line = statement.text.partition("\n")[0]
                raise refused(self.name, user, f"{name!r}, which is changed by a statement: {line}")


def _function_of(value: Any) -> FunctionType | None:
    """The function behind `value`, which a decorator may have wrapped."""
    try:
        inner = inspect.unwrap(value) if callable(value) else None
    except ValueError:  # wrapped in itself
        return None
    return inner if isinstance(inner, FunctionType) else None


def _is_of_its_fields(value: Any) -> bool:
    """Whether an instance of a dataclass is what its fields make of it again."""
    kind = type(value)
    names = {f.name for f in dataclasses.fields(value) if f.init}
    return set(getattr(value, "__dict__", ())) == names and not hasattr(kind, "__post_init__")


def _where_it_stands(name: str, value: Any, history: Sequence[Statement]) -> Statement | None:
    """The statement that defined a function or class: where its code is, not where its name was.

    A cell that failed halfway stands in the history too, and may have defined nothing.
    """
    is_class = isinstance(value, type)
    for inner in vars(value).values() if is_class else (value,):
        function = _function_of(inner)
        code = None if function is None else function.__code__
        text = "" if code is None else "".join(linecache.getlines(code.co_filename))
        for statement in reversed(_statements(text)):
            assert code is not None
            last = statement.node.end_lineno or 0
            if statement.defines(name) and statement.first_line <= code.co_firstlineno <= last:
                return statement
    if not is_class:
        return None
    return next((s for s in reversed(history) if s.defines(name)), None)


def _made_at_once(name: str, value: Any, node: ast.stmt) -> Iterator[tuple[str, Any]]:
    """What a definition computed by a call, and would compute again: (how to name it, its value)."""
    if isinstance(node, ast.ClassDef):
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                inner = vars(value).get(statement.name)
                if isinstance(inner, FunctionType):
                    yield from _made_at_once(f"{name}.{statement.name}", inner, statement)
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and _calls(statement.value):
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                targets = targets or [statement.target]  # type: ignore[union-attr]
                for target in targets:
                    made = vars(value).get(getattr(target, "id", ""))
                    if not (made is None or hasattr(made, "__get__") or isinstance(made, value)):
                        yield f"{name}.{target.id}", made  # type: ignore[attr-defined]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = _function_of(value)
        if function is not None and any(map(_calls, node.args.defaults)):
            yield f"{name}.__defaults__", function.__defaults__
        if function is not None and any(map(_calls, node.args.kw_defaults)):
            yield f"{name}.__kwdefaults__", function.__kwdefaults__


def _calls(expression: ast.expr | None) -> bool:
    return expression is not None and any(isinstance(n, ast.Call) for n in ast.walk(expression))


def _imports_for(name: str, value: Any, history: Iterable[Statement]) -> list[str]:
    """The lines that import what `name` stands for; [] if it cannot be imported by a name."""
    lines: dict[str, None] = {}
    for statement in history:
        for alias in getattr(statement.node, "names", ()):
            if isinstance(statement.node, ast.Import):
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                if (alias.asname or whole) == name and sys.modules.get(whole) is value:
                    lines[_line(f"import {alias.name}", alias.name, alias.asname)] = None
            elif isinstance(statement.node, ast.ImportFrom) and not _is_data(value):
                module = sys.modules.get(statement.node.module or "")
                given = alias.asname or alias.name
                if given == name and getattr(module, alias.name, module) is value:
                    begin = f"from {statement.node.module} import {alias.name}"
                    lines = {_line(begin, alias.name, alias.asname): None}
    return list(lines) or _import_of(name, value)


def _line(begin: str, name: str, asname: str | None) -> str:
    return begin + (f" as {asname}" if asname not in (None, name) else "")


def _is_data(value: Any) -> bool:
    """Whether `value` may travel by itself: then it does, though a module has it too."""
    try:
        Values().text("", value)
    except NotAValue:
        return False
    return True


def _import_of(name: str, value: Any) -> list[str]:
    """How to import what came by `from … import *`, or by a magic; [] if it cannot be imported."""
    if isinstance(value, ModuleType):
        if sys.modules.get(value.__name__) is not value:
            return []
        return [_line(f"import {value.__name__}", value.__name__, name)]
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(own, str) or module == "__main__":
        return []
    if getattr(sys.modules.get(module), own, None) is not value:
        return []
    return [_line(f"from {module} import {own}", own, name)]


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
