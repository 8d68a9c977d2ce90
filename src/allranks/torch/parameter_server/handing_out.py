"""Who works on what, in step or out of it. No clock, no thread, no wire.

In step the global batch of a step is cut into parts, each a chunk of the ledger. Who has brought
its part is handed one of the next step at once (`ahead`), for whose weights it waits at the
servers. A worker that is lost leaves its part to another one; to one that waits there, too, which
is called back, and returns what it has. With `spares` nobody is ahead: a worker that has nothing to
do is given a part that another one has, and the first to bring it counts. Out of step a chunk is a
whole batch. A worker's clock is how many it has brought; who is more than `staleness` ahead of the
slowest one waits for it (Ho et al. 2013). The slowest one never waits, so there is always one that
goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from allranks.strategies.cards.parameter_server import ANY
from allranks.training.work_queue import Chunk, Ledger


@dataclass
class HandingOut:
    """The work of a job of workers, over a `ledger` whose rounds are single steps."""

    ledger: Ledger
    in_step: bool
    spares: bool = False
    staleness: int = ANY
    clocks: dict[int, int] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    """In step: the chunks of this step that have come."""
    is_paused: bool = False
    ahead: bool = False
    """In step: whether parts of the next step are handed out before this one is over."""
    _is_behind: bool = False
    """Whether workers were called back: nobody is ahead until the step is over."""

    def joined(self, worker: int) -> None:
        """A worker is there, and has nothing: if it was there before, what it had is free again."""
        self.ledger.lost(worker)
        self.clocks[worker] = min(self.clocks.values(), default=0)

    def next_for(self, worker: int) -> Chunk | None:
        """What a worker has from now on; `None` while there is nothing for it."""
        if self.is_paused:
            return None
        if self.in_step:
            before = self.ledger.steps_done + 1 + (self.ahead and not self._is_behind)
            return self.ledger.next_for(worker, self.arrived, before=before, spare=self.spares)
        ahead = self.clocks[worker] - min(self.clocks.values())
        if self.staleness != ANY and ahead > self.staleness:
            return None
        return self.ledger.next_for(worker, spare=False)

    def came(self, worker: int, number: int) -> bool:
        """A worker has brought a chunk; whether it counts: another one may have been first."""
        ledger = self.ledger
        if not 0 <= number < ledger.chunks:
            raise ValueError(f"chunk {number}, which is none")
        if ledger.is_done(number) or number in self.arrived:
            return False
        if self.in_step:
            ledger.came(number)
            self.arrived.add(number)
        else:
            ledger.merged(number)
            self.clocks[worker] = self.clocks.get(worker, 0) + 1
        return True

    @property
    def is_complete(self) -> bool:
        """In step: whether all parts of the step have come."""
        return len(self.arrived) == self.ledger.parts

    def close_step(self) -> None:
        """In step: the step is over, whatever became of it; the next one is handed out."""
        for number in sorted(self.arrived):
            self.ledger.merged(number)
        self.arrived.clear()
        self._is_behind = False

    def calls_back(self) -> bool:
        """In step: whether those who are ahead are called back, for a part that nobody has."""
        ledger = self.ledger
        now = range(ledger.whole, min(ledger.whole + ledger.parts, ledger.chunks))
        is_free = any(n not in self.arrived and n not in ledger.owners for n in now)
        found = is_free and any(n >= now.stop for n in ledger.owners)
        self._is_behind = self._is_behind or found
        return found

    def returned(self, worker: int) -> None:
        """A worker that was called back has nothing any more."""
        self.ledger.lost(worker)

    @property
    def is_idle(self) -> bool:
        """Whether no worker has anything."""
        return not self.ledger.owners

    def lost(self, worker: int) -> list[Chunk]:
        """A worker is gone; returns what is free again because of it."""
        self.clocks.pop(worker, None)
        return self.ledger.lost(worker)

    def state(self) -> dict[str, Any]:
        return self.ledger.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.ledger.load_state(state)
