"""Futures of collectives: one thread of the process completes all of them.

Torch's DDP and `work.get_future().then(…)` expect a callback when a collective is over, without a
wait. One thread waits for them, as long as there are futures. While it waits, the library drives
all collectives of the process. There is never a thread per wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

LOOK_S = 0.02  # the longest delay of a future which is done while the thread waits for another
LINGER_S = 2.0  # the next training step has futures again, and a thread takes time to start
NAME = "allranks-shared-memory-futures"
at_rest: list[Callable[[], None]] = []  # called when the thread has no reference to an op


class Awaited(Protocol):
    """A work. `drive` waits for it and returns whether it is over, with or without an error."""

    def drive(self, seconds: float) -> bool: ...


class _Completer:
    """The futures whose work is not over, and the thread that completes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[Awaited, Any]] = []
        self._thread: threading.Thread | None = None
        self._stays = True

    def add(self, work: Awaited, future: Any) -> None:
        with self._changed:
            self._waiting.append((work, future))
            self._stays = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
                self._thread.start()
            self._changed.notify()

    def end_soon(self) -> None:
        """The thread ends once no future waits, instead of lingering."""
        with self._changed:
            self._stays = False
            self._changed.notify()

    def _run(self) -> None:
        while True:
            for call in at_rest:
                call()
            with self._changed:
                while not self._waiting:
                    if not self._stays or not self._changed.wait(LINGER_S):
                        if self._waiting:
                            break
                        self._thread = None
                        return
                waiting = list(self._waiting)
            waiting[0][0].drive(LOOK_S)
            over = [pair for pair in waiting if pair[0].drive(0)]
            with self._changed:
                self._waiting = [pair for pair in self._waiting if pair not in over]
            for _, future in over:
                future.set_result(None)


def future_of(work: Awaited, outputs: Callable[[], object]) -> Any:
    """A future of what `outputs` returns or raises once `work` is over."""
    over: Any = torch.futures.Future()
    future = over.then(lambda _: outputs())  # its exception reaches C++, too
    if work.drive(0):
        over.set_result(None)
    else:
        _completer.add(work, over)
    return future


def end_soon() -> None:
    """The last group is gone: the thread need not linger for another future."""
    _completer.end_soon()


def _forget() -> None:
    global _completer
    _completer = _Completer()  # in a child of a fork there is no thread


_completer = _Completer()
os.register_at_fork(after_in_child=_forget)
