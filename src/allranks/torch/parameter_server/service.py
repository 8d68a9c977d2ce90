"""The scheduler's end of the wire: servers say where they are, workers are given work.

    who      message                                    answer
    server   hello: index, digest, port                 {}, and "over" at the end
    worker   hello: index, digest                       era, servers: [[address, port], …]
    worker   ask, or brought: chunk, …; body: tally     work, and what is `told`; body: statistics
             sent: {kind: bytes so far}
    worker   returned: what it was handed ahead         work
    worker   under_way                                  work

`work` is a chunk ("first", "part", …) or "over"; or "settle", where there is nothing for a worker
of which a change is `under way` to the servers: it brings that, and asks again. Else an answer is
held back while there is nothing for the worker. The thread that trains hears of what came (`step`,
`brought`), and of a server that is lost.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.errors import PeerLost
from allranks.launcher.messages.answering import Answering
from allranks.launcher.messages.connection import Connection
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.strategies.cards.parameter_server import SERVER
from allranks.torch.parameter_server.handing_out import HandingOut
from allranks.torch.parameter_server.links import Address
from allranks.torch.parameter_server.server import OVER
from allranks.training.work_queue import Chunk

LARGEST_TALLY = 1 << 26
SETTLE = "settle"
Report = Callable[..., None]


@dataclass(frozen=True)
class Done:
    """What a worker says of a chunk that it is done with, and the tallies of its steps."""

    said: dict[str, Any]
    tallies: bytes


@dataclass(frozen=True)
class Brought:
    """What a worker has brought: of which chunk, what it says of it, and its tally."""

    worker: int
    chunk: Chunk
    said: dict[str, Any]
    tally: Tensor

    def steps(self) -> list[Brought]:
        """Out of step: the same step by step."""
        chunk, said = self.chunk, self.said["steps"]
        tallies = self.tally.view(chunk.steps, -1)
        return [
            Brought(self.worker, Chunk(chunk.number, chunk.part, chunk.first + n, 1), one, tally)
            for n, (one, tally) in enumerate(zip(said, tallies, strict=True))
        ]


class Service(Answering):
    """The servers and workers of one training. `report` hears who came and who is lost."""

    def __init__(
        self,
        handing: HandingOut,
        servers: int,
        digest: str,
        listener: socket.socket,
        secret: str,
        tally_type: torch.dtype,
        report: Report,
    ) -> None:
        super().__init__(listener, secret, LARGEST_TALLY)
        self.handing, self._digest, self._report = handing, digest, report
        self.servers, self._tally_type = servers, tally_type
        self.addresses: dict[int, Address] = {}
        self.era = -1
        """Set once the servers have their weights: workers are welcome from then on."""
        self.told: dict[str, Any] = {}
        """Out of step: what workers are told with their work."""
        self.statistics = b""
        """The body of that."""
        self.is_over = False
        self._found: list[Brought] = []
        self._peers: dict[int, Connection] = {}
        self._kinds: dict[int, str] = {}
        self._is_lost = ""
        self._sent: dict[int, dict[str, Any]] = {}

    # --- for the thread that trains -------------------------------------------------------

    def wait_for_servers(self, timeout_s: float) -> list[Address] | None:
        """Where all servers are; `None` if some have not come within `timeout_s`."""
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

    def step(self, timeout_s: float) -> list[Brought] | None:
        """In step: what all parts have brought, in their order; `None` if not all have come yet."""
        with self.changed:
            self._wait(lambda: self.handing.is_complete, timeout_s)
            if not self.handing.is_complete:
                return None
            found, self._found = self._found, []
        return sorted(found, key=lambda one: one.chunk.part)

    def tell(self, told: dict[str, Any], statistics: bytes) -> None:
        """Out of step: what workers must know of the work that they are given from here on."""
        with self.changed:
            self.told, self.statistics = told, statistics

    def calls_back(self) -> bool:
        """In step: whether workers that are ahead are called back, for a part that nobody has."""
        with self.changed:
            return self.handing.calls_back()

    def close_step(self) -> None:
        """In step: hand out the next one."""
        with self.changed:
            self.handing.close_step()
            self.changed.notify_all()

    def brought(self, timeout_s: float) -> list[Brought]:
        """Out of step: what came since the last call; waits up to `timeout_s` for the first."""
        with self.changed:
            if not self._found and not self.handing.ledger.is_over:
                self._wait(lambda: bool(self._found), timeout_s)
            found, self._found = self._found, []
            return found

    def pause(self) -> None:
        """Hand out nothing more, until `go_on`."""
        with self.changed:
            self.handing.is_paused = True

    def go_on(self) -> None:
        with self.changed:
            self.handing.is_paused = False
            self.changed.notify_all()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether no worker has anything any more."""
        with self.changed:
            self._wait(lambda: self.handing.is_idle, timeout_s)
            return self.handing.is_idle

    def wait_until_settled(self, timeout_s: float) -> bool:
        """Whether no worker has anything any more, and nothing that came is yet to be counted."""
        with self.changed:
            self._wait(lambda: self.handing.is_idle or bool(self._found), timeout_s)
            return self.handing.is_idle and not self._found

    def finish(self) -> None:
        """There is no more work: tell all who ask, and the servers."""
        with self.changed:
            if self.is_over:
                return
            self.is_over = True
            self.changed.notify_all()
            servers = [self._peers[who] for who, kind in self._kinds.items() if kind == SERVER]
        for connection in servers:
            with suppress(Disconnected):
                connection.send({"work": OVER})

    def sent_by_workers(self) -> dict[int, dict[str, Any]]:
        """What each worker says that it has sent so far."""
        with self.changed:
            return dict(self._sent)

    def _wait(self, until: Callable[[], bool], timeout_s: float) -> None:
        """Wait while nobody is lost without whom nothing goes on; raises `PeerLost` then."""
        self.changed.wait_for(lambda: until() or bool(self._is_lost), timeout_s)
        if self._is_lost:
            raise PeerLost(self._is_lost)

    # --- peers ----------------------------------------------------------------------------

    def admit(self, connection: Connection, hello: Message) -> int:
        kind, index = str(hello["role"]), int(hello["index"])
        if hello.get("digest") != self._digest:
            connection.send({"refused": "its model has other weights, or another optimizer"})
            raise Disconnected("its model is another one")
        who = index if kind != SERVER else -2 - index
        with self.changed:
            before, self._peers[who] = self._peers.get(who), connection
            self._kinds[who] = kind
            if kind == SERVER:
                self.addresses[index] = (connection.peer_address, int(hello["port"]))
            self.changed.notify_all()
        if before is not None:
            before.shut()
        if kind == SERVER:
            connection.send({})
            return who
        with self.changed:
            self._wait_for_work(lambda: self.era >= 0)
            self.handing.joined(who)
            servers = [list(self.addresses[number]) for number in range(self.servers)]
        self._report("worker_joined", worker=who)
        connection.send({"era": self.era, "servers": servers})
        return who

    def answer(self, who: int, connection: Connection, message: Message, body: memoryview) -> None:
        if who < 0:
            raise ValueError("a server has nothing to say")
        with self.changed:
            self._sent[who] = message.get("sent", {})
            if "brought" in message:
                self._take(who, message["brought"], body)
            if "returned" in message:
                self.handing.returned(who)
            is_there = self._is_there(who, connection)
            has_none = is_there and not self.is_over and not self._next_for(who)
            settles = has_none and bool(message.get("under_way"))
            if has_none and not settles:
                self._wait_for_work(
                    lambda: not self._is_there(who, connection) or self._next_for(who)
                )
            if not self._is_there(who, connection):
                raise Disconnected("it has come again, by another connection")
            given: Any = OVER if self.is_over else SETTLE if settles else None
            work = given or dataclasses.asdict(self._given)
            told, statistics = self.told, self.statistics
        connection.send({"work": work, **told}, statistics)

    def _is_there(self, who: int, connection: Connection) -> bool:
        """Whether this is the newest connection of a worker; one that was killed waits here too."""
        return self._peers.get(who) is connection

    def _next_for(self, who: int) -> bool:
        """Whether there is something for this worker, which has it from then on."""
        found = self.handing.next_for(who)
        if found is not None:
            self._given = found
        return found is not None

    def _wait_for_work(self, until: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.is_closed or self.is_over or until())
        if self.is_closed:
            raise Disconnected("the training is at its end")

    def _take(self, who: int, said: dict[str, Any], body: memoryview) -> None:
        number = int(said["chunk"])
        if said["era"] != self.era:
            return
        steps = self.handing.ledger.chunk(number).steps
        if not self.handing.in_step and len(said["steps"]) != steps:
            raise ValueError(f"of {len(said['steps'])} steps, where its chunk has {steps}")
        if not self.handing.came(who, number):
            return
        tally = torch.frombuffer(body, dtype=torch.uint8).clone().view(self._tally_type)
        self._found.append(Brought(who, self.handing.ledger.chunk(number), said, tally))
        self.changed.notify_all()

    def lost(self, who: int, connection: Connection, error: Exception) -> None:
        """A worker's chunks are handed out again; without a server nothing goes on."""
        with self.changed:
            if self.is_closed or self._peers.get(who) is not connection:
                return
            del self._peers[who]
            kind = self._kinds.pop(who)
            freed = [] if kind == SERVER else self.handing.lost(who)
            if kind == SERVER and not self.is_over:
                self._is_lost = f"server {-2 - who} is gone: {error}"
            over = self.is_over or self.handing.ledger.is_over
            self.changed.notify_all()
        if kind != SERVER and not over:
            told = [{"step": chunk.first, "part": chunk.part} for chunk in freed]
            self._report("handed_out_again", worker=who, freed=told, why=str(error))
