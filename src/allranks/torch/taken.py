"""What a training has taken of its process: groups, threads, swapped layers, switches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType


class Taken:
    """Gives back at the end, the last taken first; all of it, whatever one of them raises."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._has_failed = False

    def undone_by(self, undo: Callable[[], None]) -> None:
        """Something was changed that `undo` puts back."""
        self._stack.callback(undo)

    def left_by(self, leave: Callable[..., None]) -> None:
        """Something is shared with other ranks: `leave(failed=…)` says whether to wait for them."""

        def at_the_end(
            kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
        ) -> None:
            leave(failed=self._has_failed or error is not None)

        self._stack.push(at_the_end)

    def give_back(self, *, failed: bool) -> None:
        """Undo and leave; a second call has nothing left to do."""
        self._has_failed = failed
        self._stack.close()
