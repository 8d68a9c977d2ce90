"""The scheduler's server: parameter servers register their address, workers request work.

    sender   message                                    answer
    server   hello: index, digest, port                 {}, and "over" at the end
    worker   hello: index, digest                       era, servers: [[address, port], …]
    worker   ask, or brought: chunk, …; body: tally     work and `settings`; body: statistics
             sent: {kind: bytes so far}
    worker   under_way                                  work

`work` is a chunk ("first", "part", …) or "over". It is "settle" if there is no chunk for a worker
which has a push `under_way` to the servers: the worker waits for that push, reports it and asks
again. Otherwise the answer waits until there is work. The training thread gets the reports (`step`,
`results`), and `PeerLost` for a lost server.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allranks.errors import PeerLost
from allranks.launcher.messages import Answering, Connection
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.strategies.cards.parameter_server import ANY, SERVER
from allranks.torch.parameter_server.links import Address
from allranks.torch.parameter_server.server import OVER
from allranks.training.work_queue import Chunk, Ledger


@dataclass
class WorkQueue:
    """Assigns chunks to workers, over a `ledger` whose rounds are single steps.

    It has no clock and no thread, and does not communicate.

    Synchronous mode: the global batch of a step is cut into parts, each a chunk of the ledger. A
    worker which has finished its part waits for one of the next step, or for that of a lost worker.
    With `spares` it does not wait: it gets a part which another one has, and the first result
    counts.

    Asynchronous modes: a chunk is a whole batch. A worker's clock counts its finished chunks. A
    worker more than `staleness` ahead of the slowest waits (Ho et al. 2013). The slowest one never
    waits, so there is always progress.
    """

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


LARGEST_TALLY = 1 << 26
SETTLE = "settle"
Report = Callable[..., None]


@dataclass(frozen=True)
class Done:
    """A worker's report of a finished chunk, and the tallies of its steps."""

    report: dict[str, Any]
    tallies: bytes


@dataclass(frozen=True)
class ChunkResult:
    """The report and the tally of a chunk that a worker has finished."""

    worker: int
    chunk: Chunk
    report: dict[str, Any]
    tally: Tensor

    def steps(self) -> list[ChunkResult]:
        """Asynchronous modes: one result for each step of the chunk."""
        chunk, tallies = self.chunk, self.tally.view(self.chunk.steps, -1)
        steps = [Chunk(chunk.number, chunk.part, chunk.first + n, 1) for n in range(chunk.steps)]
        return [
            ChunkResult(self.worker, step, report, tally)
            for step, report, tally in zip(steps, self.report["steps"], tallies, strict=True)
        ]


class Service(Answering):
    """The servers and workers of one job. Calls `report` when a worker joins or is lost."""

    def __init__(
        self,
        queue: WorkQueue,
        servers: int,
        digest: str,
        listener: socket.socket,
        secret: str,
        tally_type: torch.dtype,
        report: Report,
    ) -> None:
        super().__init__(listener, secret, LARGEST_TALLY)
        self.queue, self._digest, self._report = queue, digest, report
        self.servers, self._tally_type = servers, tally_type
        self.addresses: dict[int, Address] = {}
        self.era = -1
        """Set once the servers have their weights; from then on workers may join."""
        self.settings: dict[str, Any] = {}
        """Sent to workers with their work."""
        self.statistics = b""
        """The body of that message: running statistics of BatchNorm."""
        self.is_over = False
        self._results: list[ChunkResult] = []
        self._peers: dict[int, Connection] = {}
        self._kinds: dict[int, str] = {}
        self._is_lost = ""
        self._moved: dict[int, dict[str, Any]] = {}

    # --- for the thread that trains -------------------------------------------------------

    def wait_for_servers(self, timeout_s: float) -> list[Address] | None:
        """The addresses of all servers; `None` if some have not registered within `timeout_s`."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.addresses) == self.servers, timeout_s)
            if len(self.addresses) < self.servers:
                return None
            return [self.addresses[number] for number in range(self.servers)]

    def welcome(self, era: int) -> None:
        """The servers have the weights of this `era`."""
        with self.changed:
            self.era = era
            self.changed.notify_all()

    def step(self) -> list[ChunkResult]:
        """Synchronous mode: the results of all parts, in order; waits for them."""
        with self.changed:
            self._wait(lambda: self.queue.is_complete)
            results, self._results = self._results, []
        return sorted(results, key=lambda result: result.chunk.part)

    def publish(self, settings: dict[str, Any], statistics: bytes) -> None:
        """Send this with all work from now on."""
        with self.changed:
            self.settings, self.statistics = settings, statistics

    def close_step(self) -> None:
        """Synchronous mode: close this step and hand out the next one."""
        with self.changed:
            self.queue.close_step()
            self.changed.notify_all()

    def results(self, timeout_s: float) -> list[ChunkResult]:
        """Asynchronous modes: the results since the last call; waits up to `timeout_s` for one."""
        with self.changed:
            if not self._results and not self.queue.ledger.is_over:
                self._wait(lambda: bool(self._results), timeout_s)
            results, self._results = self._results, []
            return results

    def pause(self) -> None:
        """Hand out nothing more, until `go_on`."""
        with self.changed:
            self.queue.is_paused = True

    def go_on(self) -> None:
        with self.changed:
            self.queue.is_paused = False
            self.changed.notify_all()

    def wait_until_settled(self, timeout_s: float) -> bool:
        """Whether no worker has a chunk any more and `results` has returned all results."""
        with self.changed:
            self._wait(lambda: self.queue.is_idle or bool(self._results), timeout_s)
            return self.queue.is_idle and not self._results

    def finish(self) -> None:
        """There is no more work: answer "over" to all workers and servers."""
        with self.changed:
            if self.is_over:
                return
            self.is_over = True
            self.changed.notify_all()
            servers = [self._peers[peer] for peer, kind in self._kinds.items() if kind == SERVER]
        for connection in servers:
            with suppress(Disconnected):
                connection.send({"work": OVER})

    def sent_by_workers(self) -> dict[int, dict[str, Any]]:
        """The byte counts which each worker last reported."""
        with self.changed:
            return dict(self._moved)

    def _wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for a condition; raises `PeerLost` if a server is lost."""
        self.changed.wait_for(lambda: until() or bool(self._is_lost), timeout_s)
        if self._is_lost:
            raise PeerLost(self._is_lost)

    # --- peers ----------------------------------------------------------------------------

    def admit(self, connection: Connection, hello: Message) -> int:
        kind, index = str(hello["role"]), int(hello["index"])
        if hello.get("digest") != self._digest:
            connection.send({"refused": "its model has other weights, or another optimizer"})
            raise Disconnected("its model is another one")
        peer = index if kind != SERVER else -2 - index
        with self.changed:
            before, self._peers[peer] = self._peers.get(peer), connection
            self._kinds[peer] = kind
            if kind == SERVER:
                self.addresses[index] = (connection.peer_address, int(hello["port"]))
            self.changed.notify_all()
        if before is not None:
            before.shut()
        if kind == SERVER:
            connection.send({})
            return peer
        with self.changed:
            self._wait_for_work(lambda: self.era >= 0)
            self.queue.joined(peer)
            servers = [list(self.addresses[number]) for number in range(self.servers)]
        self._report("worker_joined", worker=peer)
        connection.send({"era": self.era, "servers": servers})
        return peer

    def answer(self, peer: int, connection: Connection, message: Message, body: memoryview) -> None:
        if peer < 0:
            raise ValueError("a server has nothing to say")
        with self.changed:
            self._moved[peer] = message.get("sent", {})
            if "brought" in message:
                self._accept(peer, message["brought"], body)
            is_there = self._is_there(peer, connection)
            has_none = is_there and not self.is_over and not self._next_for(peer)
            settles = has_none and bool(message.get("under_way"))
            if has_none and not settles:
                self._wait_for_work(
                    lambda: not self._is_there(peer, connection) or self._next_for(peer)
                )
            if not self._is_there(peer, connection):
                raise Disconnected("it has come again, by another connection")
            signal: Any = OVER if self.is_over else SETTLE if settles else None
            work = signal or dataclasses.asdict(self._next_chunk)
            settings, statistics = self.settings, self.statistics
        connection.send({"work": work, **settings}, statistics)

    def _is_there(self, peer: int, connection: Connection) -> bool:
        """Whether this is the newest connection of a worker; that of a killed one may linger."""
        return self._peers.get(peer) is connection

    def _next_for(self, worker: int) -> bool:
        """Whether there is a chunk for this worker; if so it is assigned to it."""
        chunk = self.queue.next_for(worker)
        if chunk is not None:
            self._next_chunk = chunk
        return chunk is not None

    def _wait_for_work(self, until: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.is_closed or self.is_over or until())
        if self.is_closed:
            raise Disconnected("the training is at its end")

    def _accept(self, worker: int, report: dict[str, Any], body: memoryview) -> None:
        number = int(report["chunk"])
        if report["era"] != self.era:
            return
        steps = self.queue.ledger.chunk(number).steps
        if not self.queue.in_step and len(report["steps"]) != steps:
            raise ValueError(f"of {len(report['steps'])} steps, where its chunk has {steps}")
        if not self.queue.came(worker, number):
            return
        tally = torch.frombuffer(body, dtype=torch.uint8).clone().view(self._tally_type)
        self._results.append(ChunkResult(worker, self.queue.ledger.chunk(number), report, tally))
        self.changed.notify_all()

    def lost(self, peer: int, connection: Connection, error: Exception) -> None:
        """Hand out the chunks of a lost worker again; a lost server ends the attempt."""
        with self.changed:
            if self.is_closed or self._peers.get(peer) is not connection:
                return
            del self._peers[peer]
            kind = self._kinds.pop(peer)
            freed = [] if kind == SERVER else self.queue.lost(peer)
            if kind == SERVER and not self.is_over:
                self._is_lost = f"server {-2 - peer} is gone: {error}"
            over = self.is_over or self.queue.ledger.is_over
            self.changed.notify_all()
        if kind != SERVER and not over:
            chunks = [{"step": chunk.first, "part": chunk.part} for chunk in freed]
            self._report("handed_out_again", worker=peer, freed=chunks, why=str(error))
