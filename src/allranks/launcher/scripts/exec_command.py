"""In the fork: become the command. What the fork server calls for each process of `allranks run`.

Nothing of the fork server is left in it but its place: signals act as they would in a shell, and
variables that were only meant for the server are as they were.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from contextlib import suppress
from typing import Any

from allranks.launcher.scripts.on_path import path_with_hooks

NOT_FOUND, NOT_RUNNABLE = 127, 126
VARIABLES_OF_AN_OUTER_JOB = (
    "ALLRANKS_STORE",
    "ALLRANKS_HEARTBEAT",
    "ALLRANKS_SEGMENT",
    "ALLRANKS_ATTEMPT",
    "ALLRANKS_RESTARTS",
)


def main(argument: dict[str, Any]) -> int:
    """Replace this process by `argument["command"]`; returns only if that cannot be done.

    The exit code is then that of a shell: 127 if there is no such program, 126 if it cannot run.
    """
    prepare(argument)
    command = list(argument["command"])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep it
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        why = error.strerror
        if is_missing and (first := interpreter_of(command[0])):
            why = f"it is there, but not the interpreter of its first line, {first!r}"
            why += "; it has Windows line ends: dos2unix FILE" if first.endswith("\r") else ""
        if error.errno == errno.ENOEXEC:
            why = "it is neither a program nor begins with a line like #!/bin/sh"
        print(f"allranks: {command[0]!r} cannot be started: {why}", file=sys.stderr)
        return NOT_FOUND if is_missing else NOT_RUNNABLE


def interpreter_of(program: str) -> str:
    """What the first line of a script names as its interpreter; "" for what is no such file."""
    path = shutil.which(program) or program
    with suppress(OSError), open(path, "rb") as file:
        line = file.readline(256).rstrip(b"\n")
        if line.startswith(b"#!"):
            return line[2:].strip(b" \t").decode(errors="replace")
    return ""


def prepare(argument: dict[str, Any]) -> None:
    """The environment of a process that was not started by us; and no core file of a hang.

    `restored` holds variables as they were before the fork server changed them (`None`: not
    there); `defaults` are set unless this node's environment says something else. With `hooks` its
    Python looks for those of `on_path`. In a step of Slurm `step` is what Slurm would say to this
    process, and of what a process manager says only `own`.
    """
    for name, value in argument["restored"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if "SLURM_PROCID" in os.environ:  # that of the agent, which is one task of a step
        for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_"))]:
            if name not in argument["own"]:
                del os.environ[name]
        os.environ.update(argument["step"])
    for name in VARIABLES_OF_AN_OUTER_JOB:  # of a job of ours around this one
        os.environ.pop(name, None)
    if argument["hooks"]:
        os.environ["PYTHONPATH"] = path_with_hooks(os.environ)
    for name, value in argument["defaults"].items():
        os.environ.setdefault(name, value)
    if argument["without_core"]:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
