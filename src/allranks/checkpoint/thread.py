"""The thread that writes a checkpoint while training goes on; nothing that it raises is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Aside:
    """Does one thing at a time beside the training."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, act: Callable[[], None]) -> None:
        """Begin `act` in a thread. The one before it is over: `wait` has returned."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._guarded, args=(act,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when it is over; raises what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._error = error
