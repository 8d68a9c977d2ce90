"""Where a notebook defines a function or a class: the whole cell that it stands in."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Statement:
    """A statement at the top of a cell."""

    cell: str
    node: ast.stmt

    @property
    def line(self) -> str:
        """Its first line, as it was written."""
        return (ast.get_source_segment(self.cell, self.node) or "").partition("\n")[0]

    @property
    def first_line(self) -> int:
        decorators = self.node.decorator_list if isinstance(self.node, Definition) else []
        return min([self.node.lineno, *(decorator.lineno for decorator in decorators)])

    @property
    def defined(self) -> str:
        """The name that it defines, or gives to a lambda; "" if it does neither."""
        match self.node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return self.node.name
            case ast.Assign(targets=[ast.Name(id=given)], value=ast.Lambda()):
                return given
        return ""


def parse_cell(cell: str) -> list[Statement]:
    """The statements at the top of a cell; none of one that is no Python, as it was never run."""
    try:
        return [Statement(cell, node) for node in ast.parse(cell).body]
    except (SyntaxError, ValueError):
        return []


def where_it_stands(name: str, value: Any, history: Sequence[Statement]) -> Statement | None:
    """The statement that defined a function or class: where its code is, not where its name was.

    A cell that failed halfway stands in the history too, and may have defined nothing.
    """
    is_class = isinstance(value, type)
    for inner in vars(value).values() if is_class else (value,):
        function = function_of(inner)
        code = None if function is None else function.__code__
        text = "" if code is None else "".join(linecache.getlines(code.co_filename))
        for statement in reversed(parse_cell(text)):
            assert code is not None
            last = statement.node.end_lineno or 0
            if statement.defined == name and statement.first_line <= code.co_firstlineno <= last:
                return statement
    if not is_class:
        return None
    return next((s for s in reversed(history) if s.defined == name), None)


def function_of(value: Any) -> FunctionType | None:
    """The function behind `value`, which a decorator may have wrapped."""
    try:
        inner = inspect.unwrap(value) if callable(value) else None
    except ValueError:  # wrapped in itself
        return None
    return inner if isinstance(inner, FunctionType) else None


def made_at_once(name: str, value: Any, node: ast.stmt) -> Iterator[tuple[str, Any]]:
    """What a definition would compute again: (how to name it, its value)."""
    if isinstance(node, ast.ClassDef):
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                inner = vars(value).get(statement.name)
                if isinstance(inner, FunctionType):
                    yield from made_at_once(f"{name}.{statement.name}", inner, statement)
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and _calls(statement.value):
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                targets = targets or [statement.target]  # type: ignore[union-attr]
                for target in targets:
                    made = vars(value).get(getattr(target, "id", ""))
                    if not (made is None or hasattr(made, "__get__") or isinstance(made, value)):
                        yield f"{name}.{target.id}", made  # type: ignore[attr-defined]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = function_of(value)
        if function is not None and any(map(_calls, node.args.defaults)):
            yield f"{name}.__defaults__", function.__defaults__
        if function is not None and any(map(_calls, node.args.kw_defaults)):
            yield f"{name}.__kwdefaults__", function.__kwdefaults__


def _calls(expression: ast.expr | None) -> bool:
    return expression is not None and any(isinstance(n, ast.Call) for n in ast.walk(expression))
