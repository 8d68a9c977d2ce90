"""Where facts go: one file of JSON lines per process; and which line of the user's code it was.

A recorder that fails says so as a fact, and the script goes on. A forked child (a worker of a
loader) writes nothing, unless it makes a process group of its own.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
HERE = os.path.dirname(os.path.abspath(__file__))
OWN = (HERE + os.sep, os.path.join(os.path.dirname(os.path.dirname(HERE)), "launcher") + os.sep)
USER, LIBRARY, BELOW = 0, 1, 2


class Facts:
    """The facts of this process, in `folder`; nothing is opened before the first."""

    def __init__(self, folder: str, torch_folder: str) -> None:
        self.folder = folder
        self._below = (*OWN, torch_folder + os.sep)
        self._kinds: dict[str, int] = {}
        self._file: TextIO | None = None
        self._silent = False
        self._failed: set[str] = set()
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._silent, self._file, self._lock = True, None, threading.RLock()

    def speak(self) -> None:
        """Write facts in a forked child as well: it takes part in a group."""
        self._silent = False

    def tell(self, fact: str, **values: Any) -> None:
        """Write one fact."""
        if self._silent:
            return
        line = json.dumps({"fact": fact, **values})
        with self._lock:
            if self._file is None:
                os.makedirs(self.folder, exist_ok=True)
                self._file = open(
                    os.path.join(self.folder, f"{os.getpid()}.jsonl"), "a", buffering=1
                )
            self._file.write(line + "\n")

    def guarded(self, function: Function) -> Function:
        """The same, but its errors are facts: what looks on never ends a script."""

        @functools.wraps(function)
        def safe(*args: Any, **kwargs: Any) -> Any:
            if self._silent:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:
                name = function.__qualname__
                if name not in self._failed:
                    self._failed.add(name)
                    with suppress(Exception):
                        self.tell("unwatched", what=name, why=repr(error)[:300])
                return None

        return safe  # type: ignore[return-value]

    def where(self) -> tuple[str, int] | None:
        """File and line of the nearest frame of the user's code; else of a library on torch."""
        frame = sys._getframe(1)
        library = None
        while frame is not None:
            name = frame.f_code.co_filename
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kinds[name] = self._kind_of(name)
            if kind == USER:
                return os.path.abspath(name), frame.f_lineno
            if kind == LIBRARY and library is None:
                library = name, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return library

    def _kind_of(self, name: str) -> int:
        path = os.path.abspath(name)
        if name.startswith("<") or path.startswith(self._below):
            return BELOW
        if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
            return LIBRARY
        is_standard = path.startswith((sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)))
        return BELOW if is_standard else USER


def wrap(holder: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `made(own)` in the place of `holder.name`, under its name and docstring."""
    own = getattr(holder, name)
    setattr(holder, name, functools.wraps(own)(made(own)))
