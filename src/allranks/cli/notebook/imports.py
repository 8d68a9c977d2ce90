"""How what a notebook imported is imported again: lines of Python, and the folders they need."""

from __future__ import annotations

import ast
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.cli.notebook.values import NotAValue, Values


def imports_for(name: str, value: Any, statements: Iterable[ast.stmt]) -> list[str]:
    """The lines that import what `name` stands for; [] if it cannot be imported by a name."""
    lines: dict[str, None] = {}
    for statement in statements:
        for alias in getattr(statement, "names", ()):
            if isinstance(statement, ast.Import):
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                if (alias.asname or whole) == name and sys.modules.get(whole) is value:
                    lines[_line(f"import {alias.name}", alias.name, alias.asname)] = None
            elif isinstance(statement, ast.ImportFrom) and not _is_data(value):
                module = sys.modules.get(statement.module or "")
                given = alias.asname or alias.name
                if given == name and getattr(module, alias.name, module) is value:
                    begin = f"from {statement.module} import {alias.name}"
                    lines = {_line(begin, alias.name, alias.asname): None}
    return list(lines) or _import_of(name, value)


def made_by_import(node: ast.Import | ast.ImportFrom) -> dict[str, Any]:
    """The names that an import gives, with what they stand for; none where it does not say them.

    None of `__future__` either, which may stand at the top of a file only.
    """
    made: dict[str, Any] = {}
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return made
    for alias in node.names:
        if isinstance(node, ast.Import):
            whole = alias.name if alias.asname else alias.name.partition(".")[0]
            made[alias.asname or whole] = sys.modules.get(whole)
        elif alias.name != "*":
            inner = sys.modules.get(f"{node.module}.{alias.name}")
            module = sys.modules.get(node.module or "")
            made[alias.asname or alias.name] = getattr(module, alias.name, inner)
    return made


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


def folders_of(imports: Iterable[str]) -> list[str]:
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
