"""The synchronizer's end of the wire: it hands out chunks and weights, and takes what was found.

One thread listens, one for each learner answers it, one looks at the clock; the thread that trains
hears of merges, evaluates and saves meanwhile. All touch the weights under one lock, for as long as
it takes to add two of them. Each answer is made at once: no learner waits for another one.

    hello  learner, digest, holds (the chunk it is in)     -> version, waits, work; body: weights
    found  a `Work`; body: old minus new                   -> version, waits, work; body: weights
    ask                                                    -> the same

`work` is a chunk ("first", "steps", …), `null` where there is nothing to do for the moment, or
"over". The weights come along where they are newer than those the learner has; `waits` are the
chunks that it has brought and that are in no version yet.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from allranks.launcher.messages.connection import Connection
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.torch.decoupled.flat import FlatModel, Numbers
from allranks.torch.decoupled.merging import Merged, Merging, Work
from allranks.training.dispatch.ledger import Chunk

ANSWER_S = 120.0
OVER = "over"
Report = Callable[..., None]


class Service:
    """The learners of one training. `report` hears, from any thread, who came and who is lost.

    `samples_of` says how many samples a chunk has.
    """

    def __init__(
        self,
        merging: Merging,
        flat: FlatModel,
        listener: socket.socket,
        secret: str,
        grace_s: float,
        report: Report,
        samples_of: Callable[[Chunk], int] = lambda chunk: 0,
    ) -> None:
        self.merging, self._flat, self._secret = merging, flat, secret
        self._grace_s, self._report, self._samples_of = grace_s, report, samples_of
        self._listener = listener
        self._changed = threading.Condition()
        self._merges: list[Merged] = []
        self._since = 0.0
        self._published: tuple[int, Numbers] | None = None
        self._peers: dict[int, Connection] = {}
        self._all: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = self.is_over = False
        self._sent = self._control = 0

    def start(self) -> None:
        """From now on learners are answered."""
        self._listener.settimeout(0.2)
        for work in (self._accept, self._watch_the_clock):
            self._begin(work)

    def merges(self, timeout_s: float) -> list[Merged]:
        """The merges since the last call; waits up to `timeout_s` for the first."""
        with self._changed:
            if not self._merges and not self.merging.ledger.is_over:
                self._changed.wait_for(lambda: self._merges, timeout_s)
            found, self._merges = self._merges, []
            return found

    def snapshot(self) -> tuple[Numbers, dict[str, Any]]:
        """The weights, and the rest of the state, of one moment."""
        with self._changed:
            return self.merging.theta.copied(), self.merging.state()

    def sent_bytes(self) -> dict[str, float]:
        """What was sent to learners so far: weights, and all the rest."""
        with self._changed:
            weights = self._sent + sum(peer.sent for peer in self._all)
            control = self._control + sum(peer.control for peer in self._all)
        return {"gradients": weights, "control": control}

    def close(self) -> None:
        """Leave all learners, and wait for the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            peers = list(self._all)
        self._listener.close()
        for peer in peers:
            peer.shut()
        for thread in list(self._threads):
            thread.join()

    # --- threads --------------------------------------------------------------------------

    def _begin(self, work: Callable[..., None], *args: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # it was closed
            self._begin(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        """One learner, from its proof to its end."""
        learner = -1
        with Connection(peer, self._flat.nbytes, ANSWER_S) as connection:
            try:
                with self._changed:
                    self._all.add(connection)
                connection.admit(self._secret)
                hello, _ = connection.receive()
                learner = self._admitted(connection, hello)
                connection.waits_for_ever()
                while not self._is_closed:
                    self._answer(learner, connection, *connection.receive())
            except (ValueError, KeyError, TypeError) as error:  # it speaks another language
                with suppress(Disconnected):
                    connection.send({"refused": f"{type(error).__name__}: {error}"})
                self._lose(learner, connection, error)
            except Disconnected as error:
                self._lose(learner, connection, error)
            finally:
                self._count(connection)

    def _count(self, connection: Connection) -> None:
        with self._changed:
            self._all.discard(connection)
            self._sent += connection.sent
            self._control += connection.control

    def _admitted(self, connection: Connection, hello: Message) -> int:
        """Who it is, once it has the weights; what it held before a restart it still holds."""
        if hello.get("digest") != self._flat.digest:
            connection.send({"refused": "its model has other weights, or other types of them"})
            raise Disconnected("its model is another one")
        learner, holds = int(hello["learner"]), int(hello["holds"])
        with self._changed:
            before, self._peers[learner] = self._peers.get(learner), connection
            known = 0 <= holds < self.merging.ledger.chunks
            if known and not self.merging.ledger.is_done(holds):
                self.merging.ledger.take(learner, holds)
        if before is not None:
            before.shut()
        connection.given = -1
        self._report("learner_joined", learner=learner, version=self.merging.version)
        self._send_answer(learner, connection, None if known else self._work_for(learner))
        return learner

    def _answer(
        self, learner: int, connection: Connection, message: Message, body: memoryview
    ) -> None:
        if "work" in message:
            work, delta = Work.from_data(message["work"]), self._flat.take(body)
            with self._changed:
                if not 0 <= work.chunk < self.merging.ledger.chunks:
                    raise Disconnected(f"it trained with chunk {work.chunk}, which is none")
                was_empty = not self.merging.found
                self.merging.bring(learner, work, delta)
                if was_empty and self.merging.found:
                    self._since = time.monotonic()
                if self.merging.is_due:
                    self._merge()
                self._changed.notify_all()
        self._send_answer(learner, connection, self._work_for(learner))

    def _work_for(self, learner: int) -> Any:
        with self._changed:
            if self.is_over or self.merging.ledger.is_over:
                return OVER
            chunk = self.merging.ledger.next_for(learner, self.merging.waiting)
            return None if chunk is None else dataclasses.asdict(chunk)

    def _send_answer(self, learner: int, connection: Connection, work: Any) -> None:
        with self._changed:
            version, numbers = self._newest()
            own = self.merging.found.get(learner)
            waits = [] if own is None else [one.chunk for one in own.work]
        is_new, connection.given = version != connection.given, version
        header = {"version": version, "waits": waits, "work": work}
        connection.send(header, *(numbers.buffers if is_new else ()))

    def _newest(self) -> tuple[int, Numbers]:
        """The weights of this version, in memory that does not change; one copy for all."""
        version = self.merging.version
        if self._published is None or self._published[0] != version:
            self._published = version, self.merging.theta.copied()
        return self._published

    def _merge(self) -> None:
        self._merges.append(self.merging.merge())
        self._changed.notify_all()

    def _watch_the_clock(self) -> None:
        """Merge without a quorum, once the first of what came has waited for long enough."""
        with self._changed:
            while not self._is_closed:
                if not self.merging.found:
                    self._changed.wait()
                    continue
                left = self._since + self._grace_s - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._merge()

    def _lose(self, learner: int, connection: Connection, error: Exception) -> None:
        """A learner is gone: what it has not brought is handed out again."""
        with self._changed:
            if self._is_closed or self._peers.get(learner) is not connection:
                return
            del self._peers[learner]
            freed = self.merging.ledger.lost(learner)
            over = self.is_over or self.merging.ledger.is_over
            version = self.merging.version
        if not over:
            told = [
                {
                    "samples": self._samples_of(chunk),
                    "first": chunk.first,
                    "last": chunk.first + chunk.steps - 1,
                }
                for chunk in freed
            ]
            why = str(error)
            self._report("learner_lost", learner=learner, version=version, freed=told, why=why)
