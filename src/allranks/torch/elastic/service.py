"""The synchronizer's server: it hands out chunks and weights, and receives deltas.

Each learner has a thread which answers it (`Answering`), and one thread watches the clock. The
training thread gets merges, evaluates and saves meanwhile. All use the weights under one lock, for
no longer than an addition of two of them. Answers are immediate: no learner waits for another one.

    hello  learner, digest, holds (its chunks)             -> version, waits, work; body: weights
    work   a `Work`; body: old minus new, of its fragment  -> the same
    rest   the samples of each fragment; body: all         -> the same
    ask                                                    -> the same
    inner  the chunk; body: the optimizer after it         -> nothing

`work` is a chunk ("first", "steps", …), `null` if there is none just now, "over", or "rest" if
all chunks are done and this learner has unsent deltas. The body has the `fragments` of the weights
that are newer than the learner's, and the buffers. `fragment` is the one to send next. `waits` are
chunks that the learner has sent and that are in no version yet. `keep` asks for the inner optimizer
after that chunk, for a checkpoint. A learner in a new process (`fresh`) gets the optimizer of the
last checkpoint after its first answer.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.errors import RequestError
from allranks.launcher.messages import ANSWER_S, Answering, Connection, Place, connect
from allranks.launcher.nodes.channel import Disconnected, Message, Refused
from allranks.launcher.world import World
from allranks.torch.checkpoint.state import copied, unpacked
from allranks.torch.checkpoint.state import packed as as_message
from allranks.torch.elastic.merge import Merged, Merging, Work
from allranks.torch.elastic.strategy import FlatModel, Numbers
from allranks.torch.strategies.base import Strategy
from allranks.training.work_queue import Chunk

# --- inner state ---------------------------------------------------------------------------------
# The inner optimizer of a learner as a message: to the synchronizer's checkpoint, and back.
#
# A learner keeps its optimizer state after each chunk that waits for a merge, and after the last
# merged one. A checkpoint has the latter, so that a resumed job makes each step once, with the
# right optimizer state.


OPTIMIZER, REMAINDERS = "optimizer", "rest"


def largest(weight_bytes: int) -> int:
    """The largest message for weights of so many bytes."""
    return 16 * weight_bytes + (1 << 20)


def inner_state(strategy: Strategy) -> Any:
    """A copy of the present optimizer state."""
    return copied(strategy.state()[OPTIMIZER])


def load_inner_state(strategy: Strategy, state: Any) -> None:
    """Load what `inner_state` returned; weights do not change."""
    strategy.load_state({**strategy.state(), OPTIMIZER: state})


def with_remainder(state: Any, remainder: Any) -> Any:
    """The state with the unsent deltas; the state itself if `remainder` is `None`."""
    return state if remainder is None else {OPTIMIZER: state, REMAINDERS: remainder}


def owes(state: Any) -> bool:
    """Whether a state has unsent deltas."""
    return REMAINDERS in state and any(state[REMAINDERS]["shares"])


def without_remainder(state: Any) -> Any:
    """The optimizer state alone."""
    return state[OPTIMIZER] if REMAINDERS in state else state


def packed(state: Any, most_bytes: int) -> list[bytes | memoryview]:
    """The body of a message with a state; raises `RequestError` if it is too large."""
    pieces = as_message(state)
    size = sum(map(len, pieces))
    if size > most_bytes:
        raise RequestError(
            asked="--strategy decoupled:inner=kept",
            found=f"an optimizer state of {size} bytes; at most {most_bytes} are sent",
            why="a checkpoint has the optimizer state of each learner",
            do="--strategy decoupled:inner=anew",
        )
    return pieces


OVER, REMAINDER = "over", "rest"
REST_S = 30.0
"""At the end a stalled learner is waited for at least this long."""
Report = Callable[..., None]


class LearnerService(Answering):
    """The learners of one job. Calls `report`, from any thread, when one joins or is lost.

    `samples_of` returns the number of samples of a chunk.
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
        keeps: bool = False,
    ) -> None:
        super().__init__(listener, secret, largest(flat.nbytes))
        self.inner: dict[int, tuple[int, Any]] = {}
        """For each learner a chunk, and the inner optimizer after it."""
        self.resumed = set[int]()
        """The learners whose `inner` is from the resumed checkpoint, and which have not joined yet:
        these also get the unsent deltas in it. All others have their own, or have lost them."""
        self._keeps, self._wanted = keeps, dict[int, int]()
        self.merging, self._flat = merging, flat
        self._grace_s, self._report, self._samples_of = grace_s, report, samples_of
        self._merges: list[Merged] = []
        self._since = 0.0
        self._published: tuple[int, Numbers] | None = None
        self._peers: dict[int, Connection] = {}
        self.is_over = False

    def start(self) -> None:
        """From now on learners are answered."""
        self._since = time.monotonic()
        super().start()
        self.begin(self._watch_the_clock)

    @property
    def is_done(self) -> bool:
        """Whether all updates are in the weights."""
        with self.changed:
            return self.merging.is_over

    def merges(self, timeout_s: float) -> list[Merged]:
        """The merges since the last call; waits up to `timeout_s` for the first."""
        with self.changed:
            if not self._merges and not self.merging.is_over:
                self.changed.wait_for(lambda: self._merges, timeout_s)
            merges, self._merges = self._merges, []
            return merges

    def snapshot(self, *, asks: bool = False) -> tuple[Numbers, dict[str, Any]]:
        """The weights and the other state, consistent with each other.

        With `asks` learners then send their inner optimizers of that moment: see `collect`.
        """
        with self.changed:
            if asks and self._keeps:
                clocks = {k: clock.chunk for k, clock in self.merging.clocks.items()}
                self._wanted = {k: n for k, n in clocks.items() if self._lacks(k, n)}
            return self.merging.theta.copied(), self.merging.state()

    def _lacks(self, learner: int, chunk: int) -> bool:
        """Whether a learner is connected, and its optimizer after this chunk is missing."""
        return learner in self._peers and self.inner.get(learner, (-1,))[0] != chunk

    def collect(self, state: dict[str, Any], patience_s: float) -> dict[int, Any]:
        """The inner optimizers of the learners in the state of a snapshot; waits for them.

        A learner sends its optimizer with its next chunk. For late and lost learners the last known
        one is returned, if any.
        """
        if not self._keeps:
            return {}
        with self.changed:
            self.changed.wait_for(lambda: not self._wanted or self.is_closed, patience_s)
            self._wanted, states = {}, dict(self.inner)
        clocks = {learner: int(clock["chunk"]) for learner, clock in state["clocks"].items()}
        late = {k for k, n in clocks.items() if k not in states or states[k][0] != n}
        stripped = late.union(state["rested"])
        if late:
            self._report("inner_left_out", learners=sorted(late))
        return {
            k: {"chunk": n, "state": without_remainder(i) if k in stripped else i}
            for k, (n, i) in states.items()
        }

    # --- threads --------------------------------------------------------------------------

    def admit(self, connection: Connection, hello: Message) -> int:
        """Send the weights to a learner; it keeps the chunks it had before a restart."""
        if hello.get("digest") != self._flat.digest:
            connection.send({"refused": "its model has other weights, or other types of them"})
            raise Disconnected("its model is another one")
        learner, holds = int(hello["learner"]), [int(number) for number in hello["holds"]]
        with self.changed:
            before, self._peers[learner] = self._peers.get(learner), connection
            ledger = self.merging.ledger
            known = [n for n in holds if 0 <= n < ledger.chunks and not ledger.is_done(n)]
            for number in known:
                ledger.take(learner, number)
            is_resumed = learner in self.resumed
        if before is not None:
            before.shut()
        connection.newest_version = -1
        self._report("learner_joined", learner=learner, version=self.merging.version)
        inner = self.inner.get(learner) if hello.get("fresh") else None
        work = None if known else self._work_for(learner)
        self._send_answer(learner, connection, work, follows=inner is not None)
        if inner is not None:
            state = inner[1] if is_resumed else without_remainder(inner[1])
            connection.send({"inner": inner[0]}, *packed(state, largest(self._flat.nbytes)))
        with self.changed:
            self.resumed.discard(learner)
        return learner

    def answer(
        self, learner: int, connection: Connection, message: Message, body: memoryview
    ) -> None:
        if "inner" in message:
            state = int(message["inner"]), unpacked(body) if len(body) else None
            with self.changed:
                if state[1] is not None:
                    self.inner[learner] = state
                if self._wanted.get(learner) == state[0]:
                    del self._wanted[learner]
                self.changed.notify_all()
            return
        if "work" in message:
            self._accept(learner, Work.from_data(message["work"]), body)
        elif "rest" in message:
            shares = [int(samples) for samples in message["rest"]]
            with self.changed:
                self.merging.add_remainder(learner, shares, self._flat.from_bytes(body))
                self._merge_remainders()
        self._send_answer(learner, connection, self._work_for(learner))

    def _accept(self, learner: int, work: Work, body: memoryview) -> None:
        """Add the delta of a chunk, and merge if that is due."""
        merging = self.merging
        delta = self._flat.from_bytes(body, merging.size_of(work.fragment))
        with self.changed:
            if not 0 <= work.chunk < merging.ledger.chunks:
                raise Disconnected(f"it trained with chunk {work.chunk}, which is none")
            was_empty = not merging.updates
            merging.add_update(learner, work, delta)
            if was_empty and merging.updates:
                self._since = time.monotonic()
            if merging.is_due:
                self._merge()
            self.changed.notify_all()

    def _merge_remainders(self) -> None:
        """Merge the remainders once no learner has unsent deltas."""
        merging = self.merging
        if merging.ledger.is_over and merging.updates and not merging.owing:
            merging.merge_remainders()
        self.changed.notify_all()

    def _work_for(self, learner: int) -> Any:
        with self.changed:
            if self.is_over:
                return OVER
            if self.merging.ledger.is_over:
                return REMAINDER if learner in self.merging.owing else OVER
            merging, is_whole = self.merging, len(self.merging.parts) == 1
            chunk = merging.ledger.next_for(learner, merging.waiting, spare=is_whole)
            return None if chunk is None else dataclasses.asdict(chunk)

    def _send_answer(
        self, learner: int, connection: Connection, work: Any, *, follows: bool = False
    ) -> None:
        with self.changed:
            version, numbers = self._newest()
            merging = self.merging
            newer = [n for n, at in enumerate(merging.changed_at) if at > connection.newest_version]
            next_fragment = merging.fragment
            update = self.merging.updates.get(learner)
            waits = [] if update is None else [w.chunk for w in update.work]
            keep = self._wanted.get(learner, -1)
            if self._keeps and work == OVER and learner in self.merging.clocks:
                keep = self.merging.clocks[learner].chunk  # a last checkpoint may need it
        is_new, connection.newest_version = version != connection.newest_version, version
        header = {"version": version, "waits": waits, "work": work}
        header |= {"inner": follows, "keep": keep, "fragments": newer, "fragment": next_fragment}
        parts = [merging.parts[n] for n in newer]
        connection.send(header, *(numbers.buffers_of(parts, merging.parameters) if is_new else ()))

    def _newest(self) -> tuple[int, Numbers]:
        """A copy of the weights of this version, which all threads share and none changes."""
        version = self.merging.version
        if self._published is None or self._published[0] != version:
            self._published = version, self.merging.theta.copied()
        return self._published

    def _merge(self) -> None:
        self._merges.append(self.merging.merge())
        if self.merging.ledger.is_over:
            self._since = time.monotonic()
        self.changed.notify_all()

    def _watch_the_clock(self) -> None:
        """Merge without a quorum, once the first update has waited for `grace_s`.

        After all chunks are done, learners have that time for remainders, at least `REST_S`.
        """
        with self.changed:
            while not self.is_closed:
                is_over = self.merging.ledger.is_over
                if is_over and self.merging.owing:
                    remaining_s = self._since + max(self._grace_s, REST_S) - time.monotonic()
                elif self.merging.updates:
                    remaining_s = self._since + self._grace_s - time.monotonic()
                else:
                    self.changed.wait()
                    continue
                if remaining_s > 0:
                    self.changed.wait(remaining_s)
                elif is_over:
                    self._report("rest_left_out", learners=sorted(self.merging.owing))
                    self.merging.owing.clear()
                    self._merge_remainders()
                else:
                    self._merge()

    def lost(self, learner: int, connection: Connection, error: Exception) -> None:
        """Hand out the unfinished chunks of a lost learner again."""
        with self.changed:
            if self.is_closed or self._peers.get(learner) is not connection:
                return
            del self._peers[learner]
            self._wanted.pop(learner, None)
            self.changed.notify_all()
            freed = self.merging.ledger.lost(learner)
            self.merging.owing.discard(learner)
            self._merge_remainders()
            over = self.is_over or self.merging.ledger.is_over
            version = self.merging.version
        if not over:
            chunks = [
                {
                    "samples": self._samples_of(chunk),
                    "first": chunk.first,
                    "last": chunk.first + chunk.steps - 1,
                }
                for chunk in freed
            ]
            why = str(error)
            self._report("learner_lost", learner=learner, version=version, freed=chunks, why=why)


# --- wire ----------------------------------------------------------------------------------------
# A learner's connection to the synchronizer, which reconnects after a failure.
#
# It waits up to `patience_s` for a lost synchronizer. It tells the restarted one which chunks the
# learner has; all others are handed out again.


@dataclass(frozen=True)
class Reply:
    """An answer, with weights if they are newer; `anew`: the first one after a connection."""

    answer: Message
    body: memoryview
    anew: bool = False
    inner: Any = None
    """The inner optimizer to begin with, if any."""


class Wire:
    """One exchange at a time, from any thread. Bodies are received where `place` says."""

    def __init__(
        self, world: World, digest: str, weight_bytes: int, patience_s: float, place: Place
    ) -> None:
        self.world, self._digest, self._patience_s = world, digest, patience_s
        self._most, self._place = largest(weight_bytes), place
        self._connection: Connection | None = None
        self._joined = self._closed = False

    def exchange(
        self, message: Message, numbers: Numbers | None, holds: Sequence[int]
    ) -> list[Reply]:
        """The answer to a message, after those to the hello of each new connection.

        Without `numbers` to send the answer to a hello suffices.
        """
        replies: list[Reply] = []
        while True:
            try:
                if self._connection is None:
                    replies.append(self._join(holds))
                    if numbers is None:
                        return replies
                connection = self._connection
                assert connection is not None
                body = () if numbers is None else numbers.buffers
                replies.append(Reply(*connection.ask(message, *body, place=self._place)))
                return replies
            except Disconnected:
                if self._closed:
                    raise
                self._leave()

    def send(self, message: Message, pieces: Sequence[Any]) -> None:
        """Send a message without an answer; it is lost if the connection is."""
        try:
            if self._connection is not None:
                self._connection.send(message, *pieces)
        except Disconnected:
            self._leave()

    def _join(self, holds: Sequence[int]) -> Reply:
        connection = connect(self.world, self._most, ANSWER_S, self._patience_s)
        self._connection = connection
        hello = {"learner": self.world.role_index, "digest": self._digest, "holds": list(holds)}
        hello["fresh"] = not self._joined
        try:
            answer, numbers = connection.ask(hello, place=self._place)
            inner = unpacked(connection.receive()[1]) if answer["inner"] else None
        except Refused as error:
            raise RequestError(
                asked="--strategy decoupled",
                found=str(error),
                why="learners and the synchronizer exchange the weights of one model",
                do="let model() of the task return the same model in every process",
            ) from error
        self._joined = True
        return Reply(answer, numbers, anew=True, inner=inner)

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def close(self) -> None:
        """Close for good; ends an exchange under way in another thread."""
        self._closed = True
        if self._connection is not None:
            self._connection.shut()
            self._connection.close()
