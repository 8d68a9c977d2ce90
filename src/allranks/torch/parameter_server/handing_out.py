"""Assigns chunks to workers, in every mode. No clock, no thread, no communication.

Synchronous mode: the global batch of a step is cut into parts, each a chunk of the ledger. A worker
which has finished its part waits for one of the next step, or for that of a lost worker. With
`spares` it does not wait: it gets a part which another one has, and the first result counts.
Asynchronous modes: a chunk is a whole batch. A worker's clock counts its finished chunks; a worker
more than `staleness` ahead of the slowest waits (Ho et al. 2013). The slowest one never waits, so
there is always progress.
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

    def joined(self, worker: int) -> None:
        """A worker joins without a chunk: chunks it had before are free again."""
        self.ledger.lost(worker)
        self.clocks[worker] = min(self.clocks.values(), default=0)

    def next_for(self, worker: int) -> Chunk | None:
        """Assign a chunk to a worker; `None` if there is none for it now."""
        if self.is_paused:
            return None
        if self.in_step:
            before = self.ledger.steps_done + 1
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
