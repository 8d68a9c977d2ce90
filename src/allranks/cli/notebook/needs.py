"""What a piece of Python needs and sets of the names around it. Pure, from its text."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

RUN_AT_ONCE = ("listcomp", "setcomp", "dictcomp", "genexpr")


@dataclass(frozen=True)
class Needs:
    """Global names: what a statement needs when it runs, and what it defines needs when called."""

    now: frozenset[str]
    later: frozenset[str]


def find_needs(statement: str) -> Needs:
    """What one statement at the top of a file needs."""
    now: set[str] = set()
    later: set[str] = set()

    def visit(table: symtable.SymbolTable, names: set[str]) -> None:
        at_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() if at_top else symbol.is_global():
                names.add(symbol.get_name())
        for inner in table.get_children():
            is_function = isinstance(inner, symtable.Function)
            waits = is_function and inner.get_name() not in RUN_AT_ONCE
            visit(inner, later if waits else names)

    visit(symtable.symtable(statement, "<cell>", "exec"), now)
    return Needs(frozenset(now), frozenset(later - now))


def set_by(node: ast.AST) -> Iterator[str]:
    """The names around it whose attributes or items a statement sets or deletes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield from _owner(node)
    for child in ast.iter_child_nodes(node):
        yield from set_by(child)


def _owner(node: ast.expr) -> Iterator[str]:
    """`a` of `a.b[c].d`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
