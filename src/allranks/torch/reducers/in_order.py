"""The order in which buckets leave: one for all ranks, each as soon as backward has finished it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allranks.errors import RequestError


class InOrder:
    """Calls `leave(bucket)` for the buckets 0, 1, 2, … of one backward pass, never out of turn.

    `bucket_of` says in which bucket each parameter lies. The last `held_back` buckets leave with
    `finish` only.
    """

    def __init__(
        self, bucket_of: Sequence[int], leave: Callable[[int], None], *, held_back: int = 0
    ) -> None:
        self._bucket_of, self._leave = bucket_of, leave
        self._buckets = max(bucket_of, default=-1) + 1
        self._members = [0] * self._buckets
        for bucket in bucket_of:
            self._members[bucket] += 1
        self._may_leave = self._buckets - held_back
        self._pending: list[int] = []
        self._finished: set[int] = set()
        self._is_open = False
        self._left = 0

    def begin(self) -> None:
        """Nothing has left, and nothing may until it is `released`."""
        self._is_open, self._left = False, 0

    def release(self) -> None:
        """A bucket may leave once the next backward pass has finished it."""
        self._is_open, self._pending = True, list(self._members)
        self._finished.clear()

    def finished(self, position: int) -> None:
        """Backward has finished the gradient of a parameter (called during backward)."""
        if not self._is_open:
            return
        if position in self._finished:
            raise RequestError(
                asked="one backward pass",
                found="it finished the gradient of a parameter twice",
                why="its bucket may have left after the first time",
                do="use checkpoint(…, use_reentrant=False)",
            )
        self._finished.add(position)
        self._pending[self._bucket_of[position]] -= 1
        while self._left < self._may_leave and self._pending[self._left] == 0:
            self._let_leave()

    def finish(self) -> None:
        """Let the rest leave."""
        while self._left < self._buckets:
            self._let_leave()
        self._is_open = False

    def _let_leave(self) -> None:
        self._leave(self._left)
        self._left += 1
