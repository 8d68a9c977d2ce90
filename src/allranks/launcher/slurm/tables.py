"""TOML tables into frozen dataclasses: every key is known, and of its type. Pure."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from allranks.errors import RequestError, nearest


def build(kind: Any, data: dict[str, Any], where: str) -> Any:
    """A `kind` from a table; raises `RequestError` for a key that it does not have or lacks."""
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            raise unreadable(where, f"{key} = {value!r}", nearest(key, hints))
        if isinstance(value, list):
            data = {**data, key: tuple(value)}
        if not _is_a(data[key], hints[key]):
            raise unreadable(where, f"{key} = {value!r}", f"it is a {_name_of(hints[key])}")
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in data
    ]
    if missing:
        raise unreadable(where, f"no {', '.join(missing)}", "it cannot be done without")
    return kind(**data)


def tables(data: Any, name: str, file: str) -> list[tuple[str, dict[str, Any]]]:
    """The tables `[name.…]` of a file."""
    if not isinstance(data, dict) or not all(isinstance(row, dict) for row in data.values()):
        raise unreadable(file, f"{name} = {data!r}", f"{name} are tables, [{name}.NAME]")
    return list(data.items())


def _is_a(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return any(_is_a(value, part) for part in typing.get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    if origin is dict:
        of = typing.get_args(hint)[1]
        return isinstance(value, dict) and all(_is_a(part, of) for part in value.values())
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _name_of(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return _name_of(typing.get_args(hint)[0])
    names = {str: "text in quotes", int: "whole number", bool: "word: true or false"}
    names |= {dict: "table", tuple: "list of texts"}
    return names.get(origin or hint, "value")


def unreadable(where: str, found: str, why: str) -> RequestError:
    """What is wrong with a file of a site, and where."""
    return RequestError(
        asked=f"the site in {where}",
        found=found,
        why=why,
        do="correct that line; `allranks cluster show template` explains them all",
    )
