"""A learner: it trains alone in chunks of steps, and brings what it has found to the synchronizer.

    begin   <- the newest weights, less what it has found and is in no version yet
    weights <- `every` steps of its own optimizer from there, on its chunk of the samples
    found    = begin - weights, sent with the number of samples; the answer has the next chunk

So nothing that it has found is lost while it waits for a merge, and nothing counts twice. With
`fragments` it brings what it has found in one part of the weights, and keeps the rest (`rest`).
With `overlap` it has a chunk more than it works on, and trains it while what it has found is on its
way. What was not merged when a synchronizer is gone is handed out again by the one that comes back
(`wire`), so the learner forgets it, and brings what it is working on.
"""

from __future__ import annotations

import dataclasses
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
from allranks.torch.elastic.merge import Contribution, Rest
from allranks.torch.elastic.service import (
    OVER,
    REMAINDERS,
    REST,
    Heard,
    Wire,
    inner_state,
    largest,
    load_inner_state,
    packed,
    with_rest,
    without_rest,
)
from allranks.torch.elastic.strategy import FlatModel, Numbers
from allranks.torch.trainer import Trainer
from allranks.training.progress import Progress, StepResult
from allranks.training.work_queue import Chunk

NOTHING_TO_DO_S = 0.05
NONE = -1  # no chunk


class Learner:
    """One learner: its trainer, the weights that it began from, and what it has found since."""

    def __init__(
        self, trainer: Trainer, parts: int, *, keeps: bool = False, fragments: int = 1
    ) -> None:
        self.trainer = trainer
        self.flat = FlatModel(trainer.strategy.model)
        self.parts = parts
        self.version = -1
        self.theta: Numbers | None = None
        self.rest = Rest(self.flat, fragments)
        self.unmerged: dict[int, Contribution] = {}
        self.keeps, self.kept = keeps, dict[int, Any]()
        """The inner optimizer after each chunk that waits, and after the last one that does not."""
        self.begin = self.flat.read()
        self._memory = memoryview(bytearray(self.flat.nbytes if self.rest.kept is None else 0))

    def place(self, _: Message, size: int) -> memoryview:
        """Where weights that come are put: those before them are not needed any more.

        Fragments are copied from there, and two answers may come before any is taken up.
        """
        return memoryview(bytearray(size)) if self.rest.kept is not None else self._memory[:size]

    def take(
        self, answer: Message, body: memoryview, unsent: Collection[int] = frozenset()
    ) -> None:
        """Begin from the newest weights, less what was found and is in none yet.

        Chunks that are `unsent` the answer says nothing of.
        """
        if len(body):
            self._take_weights([int(n) for n in answer["fragments"]], body)
        self.version = int(answer["version"])
        self.rest.turn = int(answer["fragment"])
        waits = {*map(int, answer["waits"]), *unsent}
        self.unmerged = {n: found for n, found in self.unmerged.items() if n in waits}
        for settled in [n for n in self.kept if n not in self.unmerged][:-1]:
            del self.kept[settled]
        self.begin_anew()

    def _take_weights(self, fragments: list[int], body: memoryview) -> None:
        """Fragments of newer weights, and the buffers."""
        parts = [self.rest.parts[n] for n in fragments]
        came = self.flat.take(body, sum(part.stop - part.start for part in parts))
        if len(parts) == len(self.rest.parts):
            self.theta = came
            return
        assert self.theta is not None, "the first answer has all weights"
        at = 0
        for part in (*parts, slice(self.flat.parameters, len(self.theta.weights))):
            size = part.stop - part.start
            self.theta.weights[part] = came.weights[at : at + size]
            at += size
        self.theta.counts.copy_(came.counts)

    def begin_anew(self) -> None:
        """Let the model be the weights as they were last heard of, less what is in none yet."""
        assert self.theta is not None, "the first answer has the weights"
        begin = self.theta.copied()
        own = self.flat.parameters
        for brought in self.unmerged.values():
            part, found = self.rest.parts[brought.fragment], brought.sent
            size = part.stop - part.start
            begin.weights[part].sub_(found.weights[:size])
            begin.weights[own:] = found.weights[size:]
            begin.counts.copy_(found.counts)
        if self.rest.kept is not None:
            begin.weights[:own].sub_(self.rest.kept)
        self.begin = begin
        self.flat.write(begin)

    def train(self, chunk: Chunk) -> tuple[dict[str, Any], Numbers]:
        """Make the steps of a chunk; what there is to say of it, and what is brought of it."""
        results = [self.trainer.step(batch) for batch in self._batches(chunk)]
        self.trainer.settle()
        found, own = self.flat.read(), self.flat.parameters
        torch.sub(self.begin.weights[:own], found.weights[:own], out=found.weights[:own])
        taken = [result for result in results if result.updated]
        samples = sum(result.samples for result in results)
        self._found = self.rest.brings(found, samples)
        said = {
            "chunk": chunk.number,
            "version": self.version,
            "samples": samples,
            "fragment": self._found.fragment,
            "share": self._found.share,
            "owes": any(self.rest.shares),
            "loss": sum(result.loss * result.weight for result in taken),
            "weight": sum(result.weight for result in taken),
            "rate": _rate_of(results),
        }
        return said, self._found.sent

    def brought(self, chunk: Chunk) -> None:
        """What was found is on its way: kept until an answer says that it is in the weights."""
        self.unmerged[chunk.number] = self._found
        if self.keeps:
            state = inner_state(self.trainer.strategy)
            self.kept[chunk.number] = with_rest(state, self.rest.state())

    def forget(self, unsent: Collection[int] = frozenset()) -> None:
        """Another synchronizer has come: what it does not know of is handed out again.

        But for chunks that are `unsent`: these it will hear of. Of what was kept for later turns
        nobody knows in which chunks it was found, so it is lost.
        """
        self.unmerged = {n: found for n, found in self.unmerged.items() if n in unsent}
        self.rest.forget()

    def _batches(self, chunk: Chunk) -> Any:
        """This part of the global batches of the chunk; without those that leave it no sample."""
        trainer = self.trainer
        per_epoch = trainer.task_data.batches.steps_per_epoch
        assert per_epoch is not None, "streams were refused"
        epoch, step = divmod(chunk.first, per_epoch)
        trainer.progress = done = Progress(epoch, step, chunk.first, updates=chunk.first)
        own = dataclasses.replace(trainer.task_data.batches, rank=chunk.part, ranks=self.parts)
        trainer.heartbeat.enter("data")
        try:
            for batch in own.after(done, 2**31, chunk.first + chunk.steps):
                if batch.own_samples:
                    yield batch
        finally:
            own.close()


def _rate_of(results: list[StepResult]) -> float:
    return results[-1].learning_rate if results else 0.0


class Learning:
    """The chunks that a learner has, and its exchanges, each in a thread beside the training.

    With `overlap` it trains the next chunk meanwhile, of which it has one more from the beginning,
    and takes the answer up after that. Without, it waits.
    """

    def __init__(self, learner: Learner, wire: Wire, *, overlap: bool) -> None:
        self.learner, self.wire, self.overlap = learner, wire, overlap
        self.ready: deque[Chunk] = deque()
        self.is_over = self.brings_rest = False
        self._way: tuple[int, Future[list[Heard]]] | None = None

    def go(self) -> None:
        """Train until the synchronizer says that it is over."""
        heartbeat = self.learner.trainer.heartbeat
        with ThreadPoolExecutor(1) as beside:
            try:
                for _ in range(1 + self.overlap):
                    self._ask(beside)
                while not self.is_over:
                    if self.ready:
                        self._train(beside)
                    elif self._way is not None:
                        self._hear()
                    elif self.brings_rest:
                        self._bring_rest(beside)
                    else:
                        heartbeat.enter("exchange")
                        time.sleep(NOTHING_TO_DO_S)
                        self._ask(beside)
            finally:
                self.wire.close()

    def _ask(self, beside: Executor) -> None:
        holds = [chunk.number for chunk in self.ready]
        self._way = NONE, beside.submit(self.wire.exchange, {}, None, holds)
        self._hear()

    def _bring_rest(self, beside: Executor) -> None:
        """All chunks are done: what was kept for later turns goes along now."""
        shares, rest = self.learner.rest.all()
        self._way = NONE, beside.submit(self.wire.exchange, {"rest": shares}, rest, [])
        self._hear()

    def _train(self, beside: Executor) -> None:
        """Train a chunk, take up what came meanwhile, and send what was found."""
        learner, chunk = self.learner, self.ready.popleft()
        said, found = learner.train(chunk)
        learner.brought(chunk)
        if self._way is not None:
            self._hear(chunk.number)
        elif self.overlap:
            learner.begin_anew()
        if self.is_over:
            return
        learner.trainer.heartbeat.enter("exchange")
        learner.trainer.heartbeat.collective()
        holds = [chunk.number, *(one.number for one in self.ready)]
        sent = beside.submit(self.wire.exchange, {"work": said}, found, holds)
        self._way = chunk.number, sent
        if not self.overlap:
            self._hear()

    def _hear(self, trained: int = NONE) -> None:
        """Wait for what is under way, and take it up; what was `trained` since is not sent yet."""
        assert self._way is not None, "something is under way"
        learner, (sent, way), self._way = self.learner, self._way, None
        learner.trainer.heartbeat.enter("exchange")
        for heard in way.result():
            unsent = {sent, trained} if heard.anew else {trained}
            if heard.anew:
                learner.forget(unsent)
            if heard.inner is not None:
                load_inner_state(learner.trainer.strategy, without_rest(heard.inner))
                learner.rest.load(heard.inner.get(REMAINDERS))
            asked = int(heard.answer["keep"])
            state = learner.kept.get(asked)
            learner.take(heard.answer, heard.body, unsent)
            if asked >= 0:
                most = largest(learner.flat.nbytes)
                self.wire.say({"inner": asked}, [] if state is None else packed(state, most))
            work = heard.answer["work"]
            self.is_over = self.is_over or work == OVER
            self.brings_rest = work == REST
            if work not in (None, OVER, REST):
                self.ready.append(Chunk(**work))


def learn(trainer: Trainer, job: Job, world: World, events: JsonLines) -> None:
    """Be a learner until the synchronizer says that it is over."""
    options = job.strategy_spec.options
    keeps, fragments = options["inner"] == "kept", options["fragments"]
    learner = Learner(trainer, job.ranks, keeps=keeps, fragments=fragments)
    flat = learner.flat
    wire = Wire(world, flat.digest, flat.nbytes, options["patience_s"], learner.place)
    events.event("ready", host=sockets.gethostname(), role=world.role, index=world.role_index)
    Learning(learner, wire, overlap=options["overlap"] == "1").go()
    events.event("done", version=learner.version)
    trainer.heartbeat.enter("done")
