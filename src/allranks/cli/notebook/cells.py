"""A program file from a notebook: the class to train, and what it needs of the cells.

A cell that defines a needed function or class is taken whole, and may hold nothing but
definitions, imports and plain constants: nothing that it did is done again. Every other name
travels by its value as it is now (`values`). What is neither is refused by its name.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.cli.notebook.definitions import (
    Statement,
    function_of,
    made_at_once,
    parse_cell,
    where_it_stands,
)
from allranks.cli.notebook.imports import folders_of, imports_for, made_by_import
from allranks.cli.notebook.needs import find_needs, set_by
from allranks.cli.notebook.values import VALUES, NotAValue, Values, is_same
from allranks.errors import RequestError

ONLY_IN_NOTEBOOKS = ("get_ipython", "display")
OPENING = '"""{name}, as it stood in a notebook when it was launched. Written by allranks."""'
WRITEFILE_MAGIC = "%%writefile mytask.py"


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
    statements = [statement for cell in cells for statement in parse_cell(cell)]
    writer = _Writer(name, statements, namespace)
    writer.add(name, "launch")
    future = {
        ast.unparse(statement.node)
        for statement in statements
        if isinstance(statement.node, ast.ImportFrom) and statement.node.module == "__future__"
    }
    return Program(
        name,
        writer.values,
        sorted(future),
        folders_of([*writer.imports, *writer.imports_of_cells]),
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
        f"write the cells into a file ({WRITEFILE_MAGIC}) and launch that",
    )


@dataclass
class _Writer:
    """Collects what a program file consists of, each part before those that need it."""

    name: str
    statements: list[Statement]
    namespace: Mapping[str, Any]
    imports: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    imports_of_cells: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
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
        if imports := imports_for(name, value, [s.node for s in self.statements]):
            if folders_of(imports):
                self._check_unchanged(name, user)
            self.imports += [line for line in imports if line not in self.imports]
        elif isinstance(value, type) or function_of(value) is not None:
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
        statement = where_it_stands(name, value, self.statements)
        if statement is None:
            kind = type(value).__name__
            raise refused(self.name, user, f"{name!r} ({kind}), which no cell defines by itself")
        self._check_unchanged(name, user)
        self._add_cell(statement.cell.strip("\n"), name, user)

    def _add_cell(self, cell: str, name: str, user: str) -> None:
        """Add the whole cell that defines `name`, between what it needs at once and what later."""
        if cell in self.definitions:
            return
        if cell in self.unfinished:
            found = f"{name!r}, of a cell that needs {user!r} before"
            raise refused(self.name, user, found, f"define {name} and {user} in one cell")
        self.unfinished.append(cell)
        statements, needs = parse_cell(cell), find_needs(cell)
        own = {given for statement in statements for given in self._made_by(statement, name)}
        for needed in sorted(needs.now - own):
            self.add(needed, name)
        self.unfinished.remove(cell)
        self.definitions.append(cell)
        for statement in statements:
            self._check_made_alike(statement)
        for needed in sorted(needs.later - own):
            self.add(needed, name)

    def _made_by(self, statement: Statement, name: str) -> Iterator[str]:
        """The names that a statement of a whole cell gives; raises if the cell has to be cut.

        It has to be where a statement would do something again, or undo what was done since.
        """
        match statement.node:
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Import() | ast.ImportFrom() as node if made := made_by_import(node):
                self.imports_of_cells.append(ast.unparse(node))
                stays = {n: self.namespace.get(n) is value for n, value in made.items()}
            case (
                ast.Assign(targets=[ast.Name(id=constant)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=constant), value=ast.expr() as value)
            ) if _is_plain(value):
                now = self.namespace.get(constant)
                stays = {constant: is_same(ast.literal_eval(value), now)}
            case _ if statement.defined:
                self._check_unchanged(statement.defined, name)
                stays = {statement.defined: self._stands_in(statement.cell, statement.defined)}
            case _:
                found = f"its whole cell, which also runs: {statement.line}"
                raise refused(self.name, name, found, f"define {name} in a cell that only defines")
        for given, is_there in stays.items():
            if not is_there:
                found = f"its whole cell, and {given!r} is another by now than that cell makes"
                raise refused(self.name, name, found, f"put {given} into a cell of its own")
        yield from stays

    def _check_made_alike(self, statement: Statement) -> None:
        """Let a rank compare what a definition computes by a call with what it is here."""
        name = statement.defined
        made = made_at_once(name, self.namespace.get(name), statement.node) if name else ()
        checks = [
            f"check_made_alike({what!r}, {what}, {self._value(what, name, value)})"
            for what, value in made
        ]
        self.definitions += ["\n".join(checks)] if checks else []

    def _stands_in(self, cell: str, name: str) -> bool:
        """Whether what the notebook has as `name` is defined in this cell."""
        value = self.namespace.get(name)
        if not isinstance(value, type) and function_of(value) is None:
            return False
        statement = where_it_stands(name, value, self.statements)
        return statement is not None and statement.cell.strip("\n") == cell

    def _is_everywhere(self, name: str) -> bool:
        """Whether every file has this name by itself."""
        if name.startswith("__") and name.endswith("__"):
            return True
        is_ours = name in self.namespace or name in ONLY_IN_NOTEBOOKS
        return hasattr(builtins, name) and not is_ours

    def _check_unchanged(self, name: str, user: str) -> None:
        """Raise `RequestError` if a statement set something on it since it was defined."""
        defined = [i for i, s in enumerate(self.statements) if s.defined == name]
        for statement in self.statements[max(defined, default=-1) + 1 :]:
            if name in set_by(statement.node):
                found = f"{name!r}, which is changed by a statement: {statement.line}"
                raise refused(self.name, user, found)


def _is_plain(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError):
        return False
    return True


def _is_of_its_fields(value: Any) -> bool:
    """Whether an instance of a dataclass is what its fields make of it again."""
    kind = type(value)
    names = {f.name for f in dataclasses.fields(value) if f.init}
    return set(getattr(value, "__dict__", ())) == names and not hasattr(kind, "__post_init__")
