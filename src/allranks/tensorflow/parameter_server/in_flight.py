"""Batches that are handed out ahead of the one whose result is waited for; how many is bounded.

    upcoming --> hand out --> under way (at most `most`) --> the oldest is yielded, and waited for

Results are taken in the order of the job, whatever order the work is done in. Where something is to
be done between two batches with nothing under way, the second one is held back until then.
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
    """What is under way, oldest first.

    `schedule(item)` begins the work on one. `holds_back(last, item)` says whether `item` has to
    wait until nothing is under way, where `last` was handed out last; it is asked again and again.
    """

    most: int
    schedule: Callable[[T], Result]
    holds_back: Callable[[T, T], bool]
    _under_way: deque[tuple[T, Result]] = field(default_factory=deque)

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._under_way)

    def take(self) -> tuple[T, Result]:
        """The oldest, which is not under way for us any more: its result is waited for now."""
        return self._under_way.popleft()

    def through(self, upcoming: Iterator[T], is_over: Callable[[], bool]) -> Iterator[T]:
        """Each item in order, once it and the next ones are handed out; `take` it before the next.

        When `is_over`, nothing more is handed out.
        """
        held: list[T] = []
        while True:
            while len(self._under_way) < self.most and not is_over():
                held = held or [item for item in (next(upcoming, None),) if item is not None]
                if not held or (
                    self._under_way and self.holds_back(self._under_way[-1][0], held[0])
                ):
                    break
                item = held.pop()
                self._under_way.append((item, self.schedule(item)))
            if not self._under_way:
                return
            yield self._under_way[0][0]
