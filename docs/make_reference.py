"""Writes docs/reference.md from the docstrings of what a user imports: `make docs`.

`tests/test_reference.py` fails where the page is stale, or something public has no docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allranks.cli.api import Trained, launch
from allranks.job.job import GROUPS, Job
from allranks.torch import MixtureOfExperts, Task, Trainer, cross_entropy
from allranks.torch.data.batches import Batch
from allranks.training import schedules
from allranks.training.callback import Callback
from allranks.training.keras_task import Task as KerasTask
from allranks.training.progress import Progress, StepResult
from allranks.training.task_fields import TaskFields

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# Reference

Made by `make docs` from the docstrings; do not edit.
[tasks](tasks.md) explains the same in the order in which one needs it.
"""
SCHEDULES = [
    *(schedules.constant, schedules.linear_warmup, schedules.cosine, schedules.polynomial),
    *(schedules.steps, schedules.linear_scaling, schedules.warmup_lr),
    *(schedules.product, schedules.then, schedules.Plateau),
]
PARTS: dict[str, list[Any]] = {
    "allranks.torch": [Task, Trainer, MixtureOfExperts, cross_entropy],
    "allranks.training.keras_task": [KerasTask],
    "allranks.training.task_fields": [TaskFields],
    "allranks.training.callback": [Callback],
    "allranks.training.progress": [StepResult, Progress],
    "allranks.torch.data.batches": [Batch],
    "allranks": [launch, Trained],
    "allranks.job.job": [Job],
    "allranks.training.schedules": SCHEDULES,
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for module, things in PARTS.items():
        parts.append(f"## From `{module}`\n")
        for thing in things:
            parts += _described(thing)
    return "\n".join(parts)


def _described(thing: Any) -> Iterator[str]:
    """A heading, what it says of itself, its fields, and its public methods."""
    yield f"### `{thing.__name__}`\n"
    yield _doc(thing, thing.__name__)
    if not inspect.isclass(thing):
        yield f"`{_signature(thing.__name__, thing)}`\n"
        return
    if thing is Job:
        for title, group in GROUPS.items():
            yield f"#### {title}\n"
            yield _doc(group, group.__name__)
            yield from _fields(group)
    elif dataclasses.is_dataclass(thing):
        yield from _fields(thing)
    elif "__init__" in vars(thing):
        yield f"`{_signature(thing.__name__, thing.__init__)}`\n"
    for name, member in list(vars(thing).items()):
        if name.startswith("_") or name in getattr(thing, "__annotations__", {}):
            continue
        inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(inner):
            is_property = isinstance(member, property)
            yield f"**`{name if is_property else _signature(name, inner)}`**\n"
            yield _doc(inner, f"{thing.__name__}.{name}")


def _fields(thing: Any) -> Iterator[str]:
    """The fields of a dataclass as a table."""
    yield "| field | default |\n|---|---|"
    for field in dataclasses.fields(thing):
        yield f"| `{field.name}: {_in_table(str(field.type))}` | {_default(field)} |"
    yield ""


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    returns = signature.replace(parameters=own).return_annotation
    arguments = ", ".join(_argument(p) for p in own)
    star = next((p.name for p in own if p.kind is p.KEYWORD_ONLY), None)
    if star is not None and not any(p.kind is p.VAR_POSITIONAL for p in own):
        arguments = ", ".join(("*, " if p.name == star else "") + _argument(p) for p in own)
    said = returns in (signature.empty, "None") or name[0].isupper()
    return f"{name}({arguments})" + ("" if said else f" -> {returns}")


def _argument(parameter: inspect.Parameter) -> str:
    """As it is written, without the address that the default of a function would show."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = f"{stars.get(parameter.kind, '')}{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    shown = "…" if inspect.isfunction(parameter.default) else repr(parameter.default)
    return f"{text} = {shown}"


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


def _default(field: Any) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory.__name__}()`"
    return "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"


def _doc(thing: Any, name: str) -> str:
    text = thing.__doc__
    if not text:
        raise ValueError(f"{name} has no docstring")
    return f"{inspect.cleandoc(text)}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
