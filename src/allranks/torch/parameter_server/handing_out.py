"""Assigns chunks to workers, in every mode. No clock, no thread, no communication.

Synchronous mode: the global batch of a step is cut into parts, each a chunk of the ledger. A worker
which has finished its part gets one of the next step at once (`ahead`), and waits at the servers
for the weights. The part of a lost worker goes to another one; if all wait at the servers, one is
called back and returns its chunk. With `spares` no worker is ahead: an idle worker gets a part
which another one has, and the first result counts. Asynchronous modes: a chunk is a whole batch. A
worker's clock counts its finished chunks; a worker more than `staleness` ahead of the slowest waits
(Ho et al. 2013). The slowest one never waits, so there is always progress.
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
    """Synchronous mode: the chunks of this step that are finished."""
    is_paused: bool = False
    ahead: bool = False
    """Synchronous mode: whether to hand out parts of the next step before this one is over."""
    _is_behind: bool = False
    """Whether workers were called back: no worker is ahead until the step is over."""

    def joined(self, worker: int) -> None:
        """A worker joins without a chunk: chunks it had before are free again."""
        self.ledger.lost(worker)
        self.clocks[worker] = min(self.clocks.values(), default=0)

    def next_for(self, worker: int) -> Chunk | None:
        """Assign a chunk to a worker; `None` if there is none for it now."""
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
        """A worker has finished a chunk; `False` if another one was first."""
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
        """Synchronous mode: whether all parts of the step are finished."""
        return len(self.arrived) == self.ledger.parts

    def close_step(self) -> None:
        """Synchronous mode: the step is over, updated or not; hand out the next one."""
        for number in sorted(self.arrived):
            self.ledger.merged(number)
        self.arrived.clear()
        self._is_behind = False

    def calls_back(self) -> bool:
        """Synchronous mode: whether to call back workers that are ahead, for a free part."""
        ledger = self.ledger
        now = range(ledger.whole, min(ledger.whole + ledger.parts, ledger.chunks))
        is_free = any(n not in self.arrived and n not in ledger.owners for n in now)
        is_needed = is_free and any(n >= now.stop for n in ledger.owners)
        self._is_behind = self._is_behind or is_needed
        return is_needed

    def returned(self, worker: int) -> None:
        """A worker that was called back gives up its chunk."""
        self.ledger.lost(worker)

    @property
    def is_idle(self) -> bool:
        """Whether no worker has a chunk."""
        return not self.ledger.owners

    def lost(self, worker: int) -> list[Chunk]:
        """A worker is gone; returns the chunks which that frees."""
        self.clocks.pop(worker, None)
        return self.ledger.lost(worker)

    def state(self) -> dict[str, Any]:
        return self.ledger.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.ledger.load_state(state)
