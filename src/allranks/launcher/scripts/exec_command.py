"""In the fork: become the command. What the fork server calls for each process of `allranks run`.

Nothing of the fork server is left in it but its place: signals act as they would in a shell, and
variables that were only meant for the server are as they were.
"""

from __future__ import annotations

import atexit
import builtins
import errno
import importlib
import os
import resource
import runpy
import shutil
import signal
import sys
import threading
import types
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


# --- a warm script -------------------------------------------------------------------------------
# With `--warm`: run a Python script as if this process had been started for it.
#
# The fork server has imported the framework already. The script finds `__main__`, `sys.argv`,
# `sys.path[0]` and `__file__` as under `python script.py`. At its end its threads are joined, and
# its `atexit` functions are called.


def run_script(argument: dict[str, Any]) -> int:
    """Run `argument["script"]`, a file or a module, with `argument["words"]`; its exit code."""
    prepare(argument)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python does when it starts
    _set_threads()
    for target, value in argument["before"].items():
        module, _, name = target.partition(":")
        getattr(importlib.import_module(module), name)(value)
    script, is_module = argument["script"], argument["is_module"]
    if not is_module and not os.path.exists(script):
        print(f"{sys.executable}: can't open file {script!r}", file=sys.stderr)
        return NOT_FOUND
    sys.argv = [script, *argument["words"]]
    sys.path[0:0] = [os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))]
    code = _run(script, is_module)
    for holder, function in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        getattr(holder, function, lambda: None)()  # waits for threads, as Python does at its end
    return code


def _run(script: str, is_module: bool) -> int:
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif os.path.isfile(script):
            _run_file(script)
        else:  # a folder or an archive with a __main__.py
            runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is not None and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
            return 1
        return leaving.code or 0
    except BaseException as error:
        sys.excepthook(type(error), *_without_our_frames(error))
        return 1
    return 0


def _run_file(script: str) -> None:
    """Run the file as `__main__`, with its absolute path as `__file__` and these arguments."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    with open(script, "rb") as file:
        code = compile(file.read(), module.__file__, "exec")
    exec(code, module.__dict__)


def _without_our_frames(error: BaseException) -> tuple[BaseException, types.TracebackType | None]:
    """The exception with a traceback that begins in the script, as under `python script.py`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _LAUNCHER_FILES:
        trace = trace.tb_next
    return error.with_traceback(trace), trace


_LAUNCHER_FILES = (__file__, "<frozen runpy>", runpy.__file__)


def _set_threads() -> None:
    """Apply OMP_NUM_THREADS again: torch read it when the fork server imported torch."""
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))
