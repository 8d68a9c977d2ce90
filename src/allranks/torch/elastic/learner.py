"""A learner: it trains alone in chunks of steps, and sends its deltas to the synchronizer.

    begin   <- the newest weights, minus its deltas which are in no version yet
    weights <- `every` steps of its own optimizer from there, on its chunk of the samples
    delta    = begin - weights, sent with the number of samples; the answer has the next chunk

So no delta is lost while it waits for a merge, and none counts twice. With `fragments` a learner
sends the delta of one part of the weights, and keeps the others (`Remainder`). With `overlap` it
has two chunks, and trains one while the delta of the other is under way. A restarted synchronizer
hands out all chunks again that were not merged. So the learner drops their deltas, and sends only
that of its present chunk (`Wire`).
"""

from __future__ import annotations

import socket as sockets
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch

from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.launcher.nodes.channel import Message
from allranks.launcher.world import World
from allranks.torch.elastic.merge import Contribution, Remainder
from allranks.torch.elastic.service import (
    OVER,
    REMAINDER,
    REMAINDERS,
    Reply,
    Wire,
    inner_state,
    largest,
    load_inner_state,
    packed,
    with_remainder,
    without_remainder,
)
from allranks.torch.elastic.strategy import FlatModel, Numbers
from allranks.torch.trainer import Trainer
from allranks.training.progress import Progress
from allranks.training.work_queue import Chunk

NOTHING_TO_DO_S = 0.05
NONE = -1  # no chunk


class Learner:
    """One learner: its trainer, the weights it began with, and its deltas since then."""

    def __init__(
        self, trainer: Trainer, parts: int, *, keeps: bool = False, fragments: int = 1
    ) -> None:
        self.trainer = trainer
        self.flat = FlatModel(trainer.strategy.model)
        self.parts = parts
        self.version = -1
        self.theta: Numbers | None = None
        self.remainder = Remainder(self.flat, fragments)
        self.unmerged: dict[int, Contribution] = {}
        self.keeps, self.inner_states = keeps, dict[int, Any]()
        """The inner optimizer after each chunk that waits for a merge, and the last merged one."""
        self.begin = self.flat.read()
        memory_bytes = self.flat.nbytes if self.remainder.delta is None else 0
        self._memory = memoryview(bytearray(memory_bytes))

    def place(self, _: Message, size: int) -> memoryview:
        """Memory for received weights: overwrites the previous ones, which are not needed any more.

        New memory with fragments: two answers may arrive before the first one is copied.
        """
        is_reused = self.remainder.delta is None
        return self._memory[:size] if is_reused else memoryview(bytearray(size))

    def load_answer(
        self, answer: Message, body: memoryview, unsent: Collection[int] = frozenset()
    ) -> None:
        """Begin from the newest weights, minus the deltas that are not in them yet.

        The answer does not list chunks that are `unsent`.
        """
        if len(body):
            self._load_weights([int(n) for n in answer["fragments"]], body)
        self.version = int(answer["version"])
        self.remainder.turn = int(answer["fragment"])
        waits = {*map(int, answer["waits"]), *unsent}
        self.unmerged = {n: c for n, c in self.unmerged.items() if n in waits}
        for settled in [n for n in self.inner_states if n not in self.unmerged][:-1]:
            del self.inner_states[settled]
        self.restart()

    def _load_weights(self, fragments: list[int], body: memoryview) -> None:
        """Load newer fragments of the weights, and the buffers."""
        parts = [self.remainder.parts[n] for n in fragments]
        weights = self.flat.from_bytes(body, sum(part.stop - part.start for part in parts))
        if len(parts) == len(self.remainder.parts):
            self.theta = weights
            return
        assert self.theta is not None, "the first answer has all weights"
        at = 0
        for part in (*parts, slice(self.flat.parameters, len(self.theta.weights))):
            size = part.stop - part.start
            self.theta.weights[part] = weights.weights[at : at + size]
            at += size
        self.theta.counts.copy_(weights.counts)

    def restart(self) -> None:
        """Load the last received weights into the model, minus the deltas not in them yet."""
        assert self.theta is not None, "the first answer has the weights"
        begin = self.theta.copied()
        parameters = self.flat.parameters
        for contribution in self.unmerged.values():
            part, numbers = self.remainder.parts[contribution.fragment], contribution.numbers
            size = part.stop - part.start
            begin.weights[part].sub_(numbers.weights[:size])
            begin.weights[parameters:] = numbers.weights[size:]
            begin.counts.copy_(numbers.counts)
        if self.remainder.delta is not None:
            begin.weights[:parameters].sub_(self.remainder.delta)
        self.begin = begin
        self.flat.write(begin)

    def train(self, chunk: Chunk) -> tuple[dict[str, Any], Numbers]:
        """Train the steps of a chunk; returns its report and the delta to send."""
        results = [self.trainer.step(batch) for batch in self._batches(chunk)]
        self.trainer.settle()
        delta, size = self.flat.read(), self.flat.parameters
        torch.sub(self.begin.weights[:size], delta.weights[:size], out=delta.weights[:size])
        updates = [result for result in results if result.updated]
        samples = sum(result.samples for result in results)
        self._contribution = self.remainder.contribution(delta, samples)
        report = {
            "chunk": chunk.number,
            "version": self.version,
            "samples": samples,
            "fragment": self._contribution.fragment,
            "share": self._contribution.share,
            "owes": any(self.remainder.shares),
            "loss": sum(result.loss * result.weight for result in updates),
            "weight": sum(result.weight for result in updates),
            "rate": results[-1].learning_rate if results else 0.0,
        }
        return report, self._contribution.numbers

    def mark_sent(self, chunk: Chunk) -> None:
        """Keep the delta of a sent chunk until an answer says that it is in the weights."""
        self.unmerged[chunk.number] = self._contribution
        if self.keeps:
            state = inner_state(self.trainer.strategy)
            self.inner_states[chunk.number] = with_remainder(state, self.remainder.state())

    def forget(self, unsent: Collection[int] = frozenset()) -> None:
        """Drop the deltas which a new synchronizer does not know: it hands their chunks out again.

        Keeps those of `unsent` chunks. The remainder is lost, as its chunks are not known.
        """
        self.unmerged = {n: c for n, c in self.unmerged.items() if n in unsent}
        self.remainder.forget()

    def _batches(self, chunk: Chunk) -> Any:
        """This part of the global batches of the chunk, without batches that have no samples."""
        trainer = self.trainer
        per_epoch = trainer.task_data.batches.steps_per_epoch
        assert per_epoch is not None, "streams were refused"
        epoch, step = divmod(chunk.first, per_epoch)
        trainer.progress = done = Progress(epoch, step, chunk.first, updates=chunk.first)
        batches = trainer.task_data.batches.of_reader(chunk.part, self.parts)
        trainer.heartbeat.enter("data")
        try:
            for batch in batches.after(done, 2**31, chunk.first + chunk.steps):
                if batch.own_samples:
                    yield batch
        finally:
            batches.close()


class Learning:
    """The chunks of a learner, and its exchanges with the synchronizer in another thread.

    With `overlap` it has one more chunk, trains it during an exchange, and loads the answer after
    that. Without, it waits for the answer.
    """

    def __init__(self, learner: Learner, wire: Wire, *, overlap: bool) -> None:
        self.learner, self.wire, self.overlap = learner, wire, overlap
        self.ready: deque[Chunk] = deque()
        self.is_over = self.sends_remainder = False
        self._pending: tuple[int, Future[list[Reply]]] | None = None

    def go(self) -> None:
        """Train until the synchronizer says that the job is over."""
        heartbeat = self.learner.trainer.heartbeat
        with ThreadPoolExecutor(1) as executor:
            try:
                for _ in range(1 + self.overlap):
                    self._ask(executor)
                while not self.is_over:
                    if self.ready:
                        self._train(executor)
                    elif self._pending is not None:
                        self._receive()
                    elif self.sends_remainder:
                        self._send_remainder(executor)
                    else:
                        heartbeat.enter("exchange")
                        time.sleep(NOTHING_TO_DO_S)
                        self._ask(executor)
            finally:
                self.wire.close()

    def _ask(self, executor: Executor) -> None:
        holds = [chunk.number for chunk in self.ready]
        self._pending = NONE, executor.submit(self.wire.exchange, {}, None, holds)
        self._receive()

    def _send_remainder(self, executor: Executor) -> None:
        """Send the remainder, after all chunks are done."""
        shares, numbers = self.learner.remainder.all()
        self._pending = NONE, executor.submit(self.wire.exchange, {"rest": shares}, numbers, [])
        self._receive()

    def _train(self, executor: Executor) -> None:
        """Train a chunk, load the answer that came meanwhile, and send the delta."""
        learner, chunk = self.learner, self.ready.popleft()
        report, numbers = learner.train(chunk)
        learner.mark_sent(chunk)
        if self._pending is not None:
            self._receive(chunk.number)
        elif self.overlap:
            learner.restart()
        if self.is_over:
            return
        learner.trainer.heartbeat.enter("exchange")
        learner.trainer.heartbeat.collective()
        holds = [chunk.number, *(waiting.number for waiting in self.ready)]
        reply = executor.submit(self.wire.exchange, {"work": report}, numbers, holds)
        self._pending = chunk.number, reply
        if not self.overlap:
            self._receive()

    def _receive(self, trained: int = NONE) -> None:
        """Wait for the pending answers and load them; chunk `trained` is not sent yet."""
        assert self._pending is not None, "something is under way"
        learner, (outgoing, future), self._pending = self.learner, self._pending, None
        learner.trainer.heartbeat.enter("exchange")
        for reply in future.result():
            unsent = {outgoing, trained} if reply.anew else {trained}
            if reply.anew:
                learner.forget(unsent)
            if reply.inner is not None:
                load_inner_state(learner.trainer.strategy, without_remainder(reply.inner))
                learner.remainder.load(reply.inner.get(REMAINDERS))
            kept_chunk = int(reply.answer["keep"])
            state = learner.inner_states.get(kept_chunk)
            learner.load_answer(reply.answer, reply.body, unsent)
            if kept_chunk >= 0:
                limit = largest(learner.flat.nbytes)
                self.wire.send({"inner": kept_chunk}, [] if state is None else packed(state, limit))
            work = reply.answer["work"]
            self.is_over = self.is_over or work == OVER
            self.sends_remainder = work == REMAINDER
            if work not in (None, OVER, REMAINDER):
                self.ready.append(Chunk(**work))


def learn(trainer: Trainer, job: Job, world: World, events: JsonLines) -> None:
    """Run a learner until the synchronizer says that the job is over."""
    options = job.strategy_spec.options
    keeps, fragments = options["inner"] == "kept", options["fragments"]
    learner = Learner(trainer, job.ranks, keeps=keeps, fragments=fragments)
    flat = learner.flat
    wire = Wire(world, flat.digest, flat.nbytes, options["patience_s"], learner.place)
    events.event("ready", host=sockets.gethostname(), role=world.role, index=world.role_index)
    Learning(learner, wire, overlap=options["overlap"] == "1").go()
    events.event("done", version=learner.version)
    trainer.heartbeat.enter("done")
