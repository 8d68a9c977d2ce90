"""The fields of a task: set from text or TOML, checked against their annotations. Pure.

A task is a dataclass, and its fields are its hyper-parameters: `--set lr=3e-4` on the command
line, `[task]` in a job file. The same words, the same checks and the same errors for both.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from allranks.errors import RequestError, nearest
from allranks.strategies.choice import TRUTH


def with_settings(task_class: type, settings: dict[str, Any], asked: str) -> Any:
    """`task_class(**settings)` with every value checked and converted; raises `RequestError`."""
    hints = typing.get_type_hints(task_class)
    known = {f.name: f for f in dataclasses.fields(task_class) if f.init}
    values = {}
    for name, value in settings.items():
        if name not in known:
            raise RequestError(
                asked=f"--set {name}={value}",
                found=f"no field {name!r} in {task_class.__name__}",
                why="only the annotated fields of the task's dataclass can be set",
                do=nearest(name, known),
            )
        values[name] = read_value(name, value, hints[name])
    missing = [
        name
        for name, f in known.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise RequestError(
            asked=asked,
            found=f"no value for {', '.join(missing)}",
            why="these fields of the task have no default",
            do=" ".join(f"--set {name}=…" for name in missing),
        )
    return task_class(**values)


def read_value(name: str, value: Any, annotation: Any, asked: str = "") -> Any:
    """`value` (text from the command line, or already typed) as the annotation says.

    `none` is none wherever the annotation allows it, before it is text.
    """
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for member in sorted(members, key=lambda member: member is not type(None)):
        converted = _convert(value, member)
        if converted is not _NO:
            return converted
    wanted = " or ".join(getattr(m, "__name__", str(m)) for m in members)
    raise RequestError(
        asked=asked or f"--set {name}={value}",
        found=f"{value!r}",
        why=f"{name} takes {wanted}",
        do=f"give {name} a value of that type, or leave it at its default",
    )


_NO = object()


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _convert(value: Any, kind: Any) -> Any:
    """The value as `kind`, or `_NO`. Never lossy: 2.5 is no int, True is no float.

    A text that is not finite is no float either: nobody trains with `nan`. A file may have one,
    which a task has as its default.
    """
    if kind is type(None):
        return None if value is None or value == "none" else _NO
    if typing.get_origin(kind) is typing.Literal:
        return next((choice for choice in typing.get_args(kind) if str(choice) == str(value)), _NO)
    if kind is bool:
        return value if isinstance(value, bool) else TRUTH.get(str(value).lower(), _NO)
    if kind not in (int, float, str):
        return _NO
    if isinstance(value, str):
        try:
            read = kind(value)
        except ValueError:
            return _NO
        return _NO if kind is float and not math.isfinite(read) else read
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _NO
    if kind is not float:
        return value if kind is int and isinstance(value, int) else _NO
    try:
        real = float(value)
    except OverflowError:
        return _NO
    return real if real == value or value != value else _NO
