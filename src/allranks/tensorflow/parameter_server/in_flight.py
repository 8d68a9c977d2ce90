"""Batches scheduled ahead of the one whose result is awaited; their number is bounded.

    upcoming --> schedule --> in flight (at most `most`) --> the oldest is yielded, and awaited

Results come in the order of the job, whatever the order of the work. If something must happen
between two batches with nothing in flight, the second one is held back until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
Result = TypeVar("Result")


@dataclass
class Ahead(Generic[T, Result]):
    """The items in flight, oldest first.

    `schedule(item)` starts the work on one. `holds_back(last, item)` says whether `item` must wait
    until nothing is in flight, if `last` was scheduled last; it is called repeatedly.
    """

    most: int
    schedule: Callable[[T], Result]
    holds_back: Callable[[T, T], bool]
    _under_way: deque[tuple[T, Result]] = field(default_factory=deque)

    def __len__(self) -> int:
        """The number of items in flight."""
        return len(self._under_way)

    def pop_oldest(self) -> tuple[T, Result]:
        """Remove and return the oldest item in flight, with its result."""
        return self._under_way.popleft()

    def through(self, upcoming: Iterator[T], is_over: Callable[[], bool]) -> Iterator[T]:
        """Each item in order, once it and those ahead are scheduled; call `pop_oldest` for each.

        When `is_over`, nothing more is scheduled.
        """
        waiting: list[T] = []
        while True:
            while len(self._under_way) < self.most and not is_over():
                waiting = waiting or [item for item in (next(upcoming, None),) if item is not None]
                if not waiting or (
                    self._under_way and self.holds_back(self._under_way[-1][0], waiting[0])
                ):
                    break
                item = waiting.pop()
                self._under_way.append((item, self.schedule(item)))
            if not self._under_way:
                return
            yield self._under_way[0][0]
