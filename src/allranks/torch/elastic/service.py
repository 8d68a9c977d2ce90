"""The synchronizer's end of the wire: it hands out chunks and weights, and takes what was found.

One thread for each learner answers it (`Answering`), one looks at the clock; the thread that trains
hears of merges, evaluates and saves meanwhile. All touch the weights under one lock, for as long as
it takes to add two of them. Each answer is made at once: no learner waits for another one.

    hello  learner, digest, holds (its chunks)             -> version, waits, work; body: weights
    found  a `Work`; body: old minus new, of its fragment  -> the same
    rest   the samples of each fragment; body: all         -> the same
    ask                                                    -> the same
    inner  the chunk; body: the optimizer after it         -> nothing

`work` is a chunk ("first", "steps", …), `null` where there is nothing to do for the moment, "over",
or "rest", where all chunks are done and this learner has not brought all that it found. Of the
weights those `fragments` come along that are newer than those the learner has, and the buffers;
`fragment` is the one that it brings next; `waits` are the chunks that it has brought and that are
in no version yet. With `keep` the synchronizer asks for the inner optimizer as it was after a
chunk, for a checkpoint; a learner whose process is a new one (`fresh`) is sent the one of the last
checkpoint behind its first answer.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from allranks.checkpoint.format import unflatten
from allranks.errors import RequestError
from allranks.launcher.messages.answering import ANSWER_S, Answering
from allranks.launcher.messages.connection import Buffer, Connection, Place
from allranks.launcher.messages.meeting_point import connect
from allranks.launcher.nodes.channel import Disconnected, Message, Refused
from allranks.launcher.world import World
from allranks.torch.checkpoint.state import copied
from allranks.torch.checkpoint.tree import DTYPES, NAMES, flatten
from allranks.torch.elastic.merge import Merged, Merging, Work
from allranks.torch.elastic.strategy import FlatModel, Numbers
from allranks.torch.strategies.base import Strategy
from allranks.training.work_queue import Chunk

# --- inner state ---------------------------------------------------------------------------------
# The inner optimizer of a learner on its way: from the learner into a checkpoint, and back.
#
#     | bytes of the text: u64 | text: JSON | tensors, one behind the other |
#
# A learner keeps what its optimizer was after each chunk that waits for a merge, and after the last
# one that is in the weights. A checkpoint has the latter, so that a training that goes on from it
# does each step once, with the optimizer that was there before. Nothing of it is a pickle.


OPTIMIZER, REMAINDERS = "optimizer", "rest"
_LENGTH = struct.Struct("!Q")


def largest(weight_bytes: int) -> int:
    """The most bytes of a message about weights of so many."""
    return 16 * weight_bytes + (1 << 20)


def inner_state(strategy: Strategy) -> Any:
    """A copy of what the optimizer keeps now."""
    return copied(strategy.state()[OPTIMIZER])


def load_inner_state(strategy: Strategy, state: Any) -> None:
    """Take up what `inner_state` returned; weights stay as they are."""
    strategy.load_state({**strategy.state(), OPTIMIZER: state})


def with_rest(state: Any, rest: Any) -> Any:
    """The state with what was found and not brought; without any it is the state itself."""
    return state if rest is None else {OPTIMIZER: state, REMAINDERS: rest}


def owes(state: Any) -> bool:
    """Whether there is anything that was not brought."""
    return REMAINDERS in state and any(state[REMAINDERS]["shares"])


def without_rest(state: Any) -> Any:
    """The state alone."""
    return state[OPTIMIZER] if REMAINDERS in state else state


def packed(state: Any, most_bytes: int) -> list[Buffer]:
    """A state as the pieces of a message; raises `RequestError` for one of too many bytes."""
    skeleton, tensors = flatten(state, OPTIMIZER)
    flat = {path: tensor.cpu().contiguous() for path, tensor in tensors.items()}
    rows = [[path, NAMES[one.dtype], list(one.shape)] for path, one in flat.items()]
    text = json.dumps({"state": skeleton, "tensors": rows}).encode()
    pieces: list[Buffer] = [_LENGTH.pack(len(text)), text, *map(_bytes, flat.values())]
    size = sum(map(len, pieces))
    if size > most_bytes:
        raise RequestError(
            asked="--strategy decoupled:inner=kept",
            found=f"an optimizer that keeps {size} bytes, {most_bytes} at most are sent",
            why="a checkpoint holds what the optimizer of each learner keeps",
            do="--strategy decoupled:inner=anew",
        )
    return pieces


def unpacked(body: memoryview) -> Any:
    """The state in the bytes of a message; raises `ValueError` or `KeyError` for what is none."""
    if len(body) < _LENGTH.size:
        raise ValueError("no state of an optimizer")
    at = _LENGTH.size + _LENGTH.unpack(body[: _LENGTH.size])[0]
    said = json.loads(bytes(body[_LENGTH.size : at]))
    tensors: dict[str, Tensor] = {}
    for path, name, shape in said["tensors"]:
        dtype = DTYPES[name]
        end = at + prod(shape) * dtype.itemsize
        if end > len(body):
            raise ValueError(f"the bytes of {path} are missing")
        raw = torch.tensor([], dtype=torch.uint8)
        if end > at:
            raw = torch.frombuffer(body[at:end], dtype=torch.uint8).clone()  # aligned
        tensors[path] = raw.view(dtype).view(shape)
        at = end
    return unflatten(said["state"], tensors)


def _bytes(tensor: Tensor) -> Buffer:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if tensor.numel() else b""


OVER, REST = "over", "rest"
REST_S = 30.0
"""So long a learner that is stalled is waited for at the end."""
Report = Callable[..., None]


class LearnerService(Answering):
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
        keeps: bool = False,
    ) -> None:
        super().__init__(listener, secret, largest(flat.nbytes))
        self.inner: dict[int, tuple[int, Any]] = {}
        """Of each learner a chunk, and the inner optimizer as it was after that."""
        self.resumed = set[int]()
        """The learners of whom that is of the checkpoint that was resumed, and who have not come:
        what they had not brought then goes on with them. What others have kept is with them, or
        lost with them."""
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
        """Whether all that was found is in the weights."""
        with self.changed:
            return self.merging.is_over

    def merges(self, timeout_s: float) -> list[Merged]:
        """The merges since the last call; waits up to `timeout_s` for the first."""
        with self.changed:
            if not self._merges and not self.merging.is_over:
                self.changed.wait_for(lambda: self._merges, timeout_s)
            found, self._merges = self._merges, []
            return found

    def snapshot(self, *, asks: bool = False) -> tuple[Numbers, dict[str, Any]]:
        """The weights, and the rest of the state, of one moment.

        If it `asks`, learners send their inner optimizers of that moment from now on: `collect`.
        """
        with self.changed:
            if asks and self._keeps:
                clocks = {k: clock.chunk for k, clock in self.merging.clocks.items()}
                self._wanted = {k: n for k, n in clocks.items() if self._lacks(k, n)}
            return self.merging.theta.copied(), self.merging.state()

    def _lacks(self, learner: int, chunk: int) -> bool:
        """Whether a learner is there, and its optimizer after this chunk is not."""
        return learner in self._peers and self.inner.get(learner, (-1,))[0] != chunk

    def collect(self, state: dict[str, Any], patience_s: float) -> dict[int, Any]:
        """The inner optimizers of the learners in the state of a snapshot, once they are here.

        A learner says what its optimizer was when it comes with its next chunk. Of those that do
        not come in time, and of lost ones, it is the last one that is known, if any.
        """
        if not self._keeps:
            return {}
        with self.changed:
            self.changed.wait_for(lambda: not self._wanted or self.is_closed, patience_s)
            self._wanted, found = {}, dict(self.inner)
        clocks = {learner: int(clock["chunk"]) for learner, clock in state["clocks"].items()}
        late = {k for k, n in clocks.items() if k not in found or found[k][0] != n}
        if late:
            self._report("inner_left_out", learners=sorted(late))
        return {
            k: {"chunk": n, "state": without_rest(i) if k in late or k in state["rested"] else i}
            for k, (n, i) in found.items()
        }

    def sent_by_kind(self) -> dict[str, float]:
        """What was sent to learners so far: weights, and all the rest."""
        found = self.sent_bytes()
        return {"gradients": found["sent"], "control": found["control"]}

    # --- threads --------------------------------------------------------------------------

    def admit(self, connection: Connection, hello: Message) -> int:
        """Who it is, once it has the weights; what it held before a restart it still holds."""
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
            state = inner[1] if is_resumed else without_rest(inner[1])
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
            self._take(learner, Work.from_data(message["work"]), body)
        elif "rest" in message:
            shares = [int(samples) for samples in message["rest"]]
            with self.changed:
                self.merging.bring_rest(learner, shares, self._flat.take(body))
                self._merge_rest()
        self._send_answer(learner, connection, self._work_for(learner))

    def _take(self, learner: int, work: Work, body: memoryview) -> None:
        """Take what was found in a chunk."""
        merging = self.merging
        delta = self._flat.take(body, merging.size_of(work.fragment))
        with self.changed:
            if not 0 <= work.chunk < merging.ledger.chunks:
                raise Disconnected(f"it trained with chunk {work.chunk}, which is none")
            was_empty = not merging.found
            merging.bring(learner, work, delta)
            if was_empty and merging.found:
                self._since = time.monotonic()
            if merging.is_due:
                self._merge()
            self.changed.notify_all()

    def _merge_rest(self) -> None:
        """Merge the rest of all learners once nobody owes any."""
        merging = self.merging
        if merging.ledger.is_over and merging.found and not merging.owing:
            merging.merge_rest()
        self.changed.notify_all()

    def _work_for(self, learner: int) -> Any:
        with self.changed:
            if self.is_over:
                return OVER
            if self.merging.ledger.is_over:
                return REST if learner in self.merging.owing else OVER
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
            own = self.merging.found.get(learner)
            waits = [] if own is None else [one.chunk for one in own.work]
            keep = self._wanted.get(learner, -1)
            if self._keeps and work == OVER and learner in self.merging.clocks:
                keep = self.merging.clocks[learner].chunk  # it leaves: a last checkpoint may follow
        is_new, connection.newest_version = version != connection.newest_version, version
        header = {"version": version, "waits": waits, "work": work}
        header |= {"inner": follows, "keep": keep, "fragments": newer, "fragment": next_fragment}
        parts = [merging.parts[n] for n in newer]
        connection.send(header, *(numbers.part(parts, merging.parameters) if is_new else ()))

    def _newest(self) -> tuple[int, Numbers]:
        """The weights of this version, in memory that does not change; one copy for all."""
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
        """Merge without a quorum, once the first of what came has waited for long enough.

        Once all chunks are done, learners have as long for the rest, and `REST_S` at least.
        """
        with self.changed:
            while not self.is_closed:
                is_over = self.merging.ledger.is_over
                if is_over and self.merging.owing:
                    left = self._since + max(self._grace_s, REST_S) - time.monotonic()
                elif self.merging.found:
                    left = self._since + self._grace_s - time.monotonic()
                else:
                    self.changed.wait()
                    continue
                if left > 0:
                    self.changed.wait(left)
                elif is_over:
                    self._report("rest_left_out", learners=sorted(self.merging.owing))
                    self.merging.owing.clear()
                    self._merge_rest()
                else:
                    self._merge()

    def lost(self, learner: int, connection: Connection, error: Exception) -> None:
        """A learner is gone: what it has not brought is handed out again."""
        with self.changed:
            if self.is_closed or self._peers.get(learner) is not connection:
                return
            del self._peers[learner]
            self._wanted.pop(learner, None)
            self.changed.notify_all()
            freed = self.merging.ledger.lost(learner)
            self.merging.owing.discard(learner)
            self._merge_rest()
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


# --- wire ----------------------------------------------------------------------------------------
# A learner's connection to the synchronizer, made again when it breaks.
#
# A synchronizer that is gone is waited for, `patience_s` at most. One that has come in its place is
# told which chunks the learner holds; what it does not know of it has handed out again.


@dataclass(frozen=True)
class Heard:
    """One answer, with the weights where they are newer; `anew`: of a synchronizer just joined."""

    answer: Message
    body: memoryview
    anew: bool = False
    inner: Any = None
    """The inner optimizer to begin with, if there is one."""


class Wire:
    """One exchange at a time, from any thread. Bodies go where `place` says."""

    def __init__(
        self, world: World, digest: str, weight_bytes: int, patience_s: float, place: Place
    ) -> None:
        self.world, self._digest, self._patience_s = world, digest, patience_s
        self._most, self._place = largest(weight_bytes), place
        self._connection: Connection | None = None
        self._joined = self._closed = False

    def exchange(
        self, message: Message, found: Numbers | None, holds: Sequence[int]
    ) -> list[Heard]:
        """The answer to a message; before it those of each synchronizer that had to be joined.

        Where there is nothing to bring, the answer to a hello is enough.
        """
        heard: list[Heard] = []
        while True:
            try:
                if self._connection is None:
                    heard.append(self._join(holds))
                    if found is None:
                        return heard
                connection = self._connection
                assert connection is not None
                body = () if found is None else found.buffers
                heard.append(Heard(*connection.ask(message, *body, place=self._place)))
                return heard
            except Disconnected:
                if self._closed:
                    raise
                self._leave()

    def say(self, message: Message, pieces: Sequence[Any]) -> None:
        """Send what has no answer; it is lost where the connection is."""
        try:
            if self._connection is not None:
                self._connection.send(message, *pieces)
        except Disconnected:
            self._leave()

    def _join(self, holds: Sequence[int]) -> Heard:
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
        return Heard(answer, numbers, anew=True, inner=inner)

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def close(self) -> None:
        """For good; an exchange under way in another thread ends with it."""
        self._closed = True
        if self._connection is not None:
            self._connection.shut()
            self._connection.close()
