"""The signals that the supervisor obeys: noted while a job runs, never raised in mid-message."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self


class Signals:
    """Between entering and leaving, these signals are noted for the supervisor to ask about.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 (what schedulers send before the time is over) ask to stop;
    SIGINT a second time insists. SIGUSR2 asks for a checkpoint. Only the main thread of a process
    can take signals; elsewhere nothing is changed.
    """

    STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    reason = ""
    insists = False
    _saves = 0

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (*self.STOP, signal.SIGUSR2):
                before = signal.getsignal(number)
                if before is None:
                    continue  # it is not Python's, which could not give it back
                if number == signal.SIGHUP and before == signal.SIG_IGN:
                    continue  # nohup: the job is to outlive its terminal
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGUSR2:
            self._saves += 1
            return
        self.insists |= number == signal.SIGINT and self.reason != ""
        self.reason = self.reason or signal.Signals(number).name

    def take_saves(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        is_new, self._saves = self._saves > 0, 0
        return is_new

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
