"""In the fork, with `--warm`: run a Python script as if this process had been started for it.

The fork server has imported the framework already. The script finds `__main__`, `sys.argv`,
`sys.path[0]` and `__file__` as under `python script.py`. At its end its threads are joined, and
its `atexit` functions are called.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import os
import runpy
import signal
import sys
import threading
import types
from typing import Any

from allranks.launcher.scripts.exec_command import NOT_FOUND, prepare


def main(argument: dict[str, Any]) -> int:
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
    getattr(
        threading, "_shutdown", lambda: None
    )()  # waits for threads, as Python does when it ends
    getattr(atexit, "_run_exitfuncs", lambda: None)()
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
