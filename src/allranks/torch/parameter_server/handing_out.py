"""Who works on what, in step or out of it. No clock, no thread, no wire.

In step the global batch of a step is cut into parts, each a chunk of the ledger; those of the next
step are handed out when all have come. A worker that is lost leaves its part to another one; with
`spares` a worker that has nothing to do is given a part that another one has, and the first to
bring it counts. Out of step a chunk is a whole batch. A worker's clock is how many it has brought;
who is more than `staleness` ahead of the slowest one waits for it (Ho et al. 2013). The slowest one
never waits, so there is always one that goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from allranks.strategies.cards.parameter_server import ANY
from allranks.training.dispatch.ledger import Chunk, Ledger


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

    def joined(self, worker: int) -> None:
        """A worker is there, and has nothing: if it was there before, what it had is free again."""
        self.ledger.lost(worker)
        self.clocks[worker] = min(self.clocks.values(), default=0)

    def next_for(self, worker: int) -> Chunk | None:
        """What a worker has from now on; `None` while there is nothing for it."""
        if self.is_paused:
            return None
        if self.in_step:
            now = self.ledger.steps_done
            return self.ledger.next_for(worker, self.arrived, before=now + 1, spare=self.spares)
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

    @property
    def is_idle(self) -> bool:
        """Whether no worker has anything."""
        return not self.ledger.held

    def lost(self, worker: int) -> list[Chunk]:
        """A worker is gone; returns what is free again because of it."""
        self.clocks.pop(worker, None)
        return self.ledger.lost(worker)

    def state(self) -> dict[str, Any]:
        return self.ledger.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.ledger.load_state(state)
