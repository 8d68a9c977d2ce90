"""The options that several verbs share: the same words everywhere, and one way to a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from allranks.config import Resolved, resolve

SHARED: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--ranks",), {"type": int, "help": "World size over all nodes."}),
    (("--nodes",), {"type": int, "help": "Nodes to use (default 1)."}),
    (("--place",), {"help": "Where ranks run: local."}),
    (("--device",), {"help": "cpu or cuda."}),
    (("--precision",), {"help": "fp32 or fp64."}),
    (("--bitwise",), {"is_flag": True, "default": None, "help": "Equal bits on any ranks."}),
    (("--micro-batch",), {"type": int, "help": "Samples through the model at once."}),
    (("--loader-workers",), {"type": int, "help": "Processes that read data, per rank."}),
    (("--threads",), {"type": int, "help": "Threads of each rank."}),
    (("--seed",), {"type": int, "help": "Seed of everything random (default 0)."}),
    (("--steps",), {"type": int, "help": "Optimizer steps of the job, instead of epochs."}),
    (("--set", "settings"), {"multiple": True, "help": "Set a field of the task: field=value."}),
    (("--job", "job_file"), {"help": "Take the job from a TOML file; flags go first."}),
)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options to a command."""
    for names, keywords in reversed(SHARED):
        command = click.option(*names, **keywords)(command)
    return command


def resolved_from(program: str | None, flags: dict[str, Any]) -> Resolved:
    """The job that a command line describes; takes `settings` and `job_file` out of `flags`."""
    settings, job_file = flags.pop("settings"), flags.pop("job_file")
    epochs = flags.pop("epochs", None)
    if epochs is not None and flags["steps"] is not None:
        raise click.UsageError("--steps and --epochs say two things about one end: give one")
    if epochs is not None:
        settings = (*settings, f"epochs={epochs}")
    given = {name: value for name, value in flags.items() if value is not None}
    return resolve(program or "", given, settings, job_file)
