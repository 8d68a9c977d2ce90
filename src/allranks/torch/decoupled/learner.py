"""A learner: it trains alone in chunks of steps, and brings what it has found to the synchronizer.

    begin   <- the newest weights, less what it has found and is in no version yet
    weights <- `every` steps of its own optimizer from there, on its chunk of the samples
    found    = begin - weights, sent with the number of samples; the answer has the next chunk

So nothing that it has found is lost while it waits for a merge, and nothing counts twice. A
synchronizer that is gone is waited for, `patience_s` at most; what was not merged by then is handed
out again by the one that comes back, so the learner forgets it, and brings what it is working on.
"""

from __future__ import annotations

import dataclasses
import socket as sockets
import time
from typing import Any

import torch

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.launcher.messages.answering import ANSWER_S
from allranks.launcher.messages.connection import Connection
from allranks.launcher.messages.meeting_point import connect
from allranks.launcher.nodes.channel import Disconnected, Message, Refused
from allranks.launcher.world import World
from allranks.torch.decoupled.flat import FlatModel, Numbers
from allranks.torch.decoupled.inner_state import (
    inner_state,
    largest,
    load_inner_state,
    packed,
    unpacked,
)
from allranks.torch.decoupled.service import OVER
from allranks.torch.trainer import Trainer
from allranks.training.dispatch.ledger import Chunk
from allranks.training.progress import Progress, StepResult

NOTHING_TO_DO_S = 0.05


class Learner:
    """One learner: its trainer, the weights that it began from, and what it has found since."""

    def __init__(self, trainer: Trainer, parts: int, *, keeps: bool = False) -> None:
        self.trainer = trainer
        self.flat = FlatModel(trainer.strategy.model)
        self.parts = parts
        self.version = -1
        self.theta: Numbers | None = None
        self.unmerged: dict[int, Numbers] = {}
        self.keeps, self.kept = keeps, dict[int, Any]()
        """The inner optimizer after each chunk that waits, and after the last one that does not."""
        self.begin = self.flat.read()
        self._memory = memoryview(bytearray(self.flat.nbytes))

    def place(self, size: int) -> memoryview:
        """Where weights that come are put: those before them are not needed any more."""
        return self._memory[:size]

    def take(self, answer: Message, body: memoryview) -> None:
        """Begin from the newest weights, less what was found and is in none yet."""
        if len(body):
            self.theta = self.flat.take(body)
        assert self.theta is not None, "the first answer has the weights"
        self.version = int(answer["version"])
        waits = set(map(int, answer["waits"]))
        self.unmerged = {n: found for n, found in self.unmerged.items() if n in waits}
        begin = self.theta.copied()
        own = self.flat.parameters
        for found in self.unmerged.values():
            begin.weights[:own].sub_(found.weights[:own])
            begin.weights[own:] = found.weights[own:]
            begin.counts.copy_(found.counts)
        for settled in [n for n in self.kept if n not in self.unmerged][:-1]:
            del self.kept[settled]
        self.begin = begin
        self.flat.write(begin)

    def train(self, chunk: Chunk) -> tuple[dict[str, Any], Numbers]:
        """Make the steps of a chunk; what there is to say of it, and what was found."""
        results = [self.trainer.step(batch) for batch in self._batches(chunk)]
        self.trainer.settle()
        found, own = self.flat.read(), self.flat.parameters
        torch.sub(self.begin.weights[:own], found.weights[:own], out=found.weights[:own])
        taken = [result for result in results if result.updated]
        said = {
            "chunk": chunk.number,
            "version": self.version,
            "samples": sum(result.samples for result in results),
            "loss": sum(result.loss * result.weight for result in taken),
            "weight": sum(result.weight for result in taken),
            "rate": _rate_of(results),
        }
        return said, found

    def brought(self, chunk: Chunk, found: Numbers) -> None:
        """It is on its way: kept until an answer says that it is in the weights."""
        self.unmerged[chunk.number] = found
        if self.keeps:
            self.kept[chunk.number] = inner_state(self.trainer.strategy)

    def forget(self) -> None:
        """Another synchronizer has come: what it does not know of is handed out again."""
        self.unmerged.clear()

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


class Wire:
    """A learner's connection to the synchronizer, made again when it breaks."""

    def __init__(self, learner: Learner, world: World, patience_s: float) -> None:
        self.learner, self.world, self._patience_s = learner, world, patience_s
        self._connection: Connection | None = None
        self.sent = 0

    def ask(self, message: Message, found: Numbers | None, holds: Chunk | None) -> Any:
        """The answer to a message, taken up; if the synchronizer has changed meanwhile, said anew.

        Returns the work to do next: a chunk's values, `None` or `OVER`.
        """
        while True:
            try:
                if self._connection is None:
                    work = self._join(holds)
                    if holds is None:
                        return work
                connection = self._connection
                assert connection is not None
                body = () if found is None else found.buffers
                answer, numbers = connection.ask(message, *body, place=self.learner.place)
                if found is not None and holds is not None:
                    self.learner.brought(holds, found)
                self._take(connection, answer, numbers)
                return answer["work"]
            except Disconnected:
                self.close()
                self.learner.trainer.heartbeat.enter("exchange")

    def _join(self, holds: Chunk | None) -> Any:
        learner, heartbeat = self.learner, self.learner.trainer.heartbeat
        heartbeat.enter("exchange")
        self._connection = connection = connect(
            self.world, largest(learner.flat.nbytes), ANSWER_S, self._patience_s
        )
        hello = {
            "learner": self.world.role_index,
            "digest": learner.flat.digest,
            "holds": -1 if holds is None else holds.number,
            "fresh": learner.version < 0,
        }
        try:
            answer, numbers = connection.ask(hello, place=learner.place)
        except Refused as error:
            raise RequestError(
                asked="--strategy decoupled",
                found=str(error),
                why="learners and the synchronizer exchange the weights of one model",
                do="let model() of the task return the same model in every process",
            ) from error
        learner.forget()
        if answer["inner"]:
            _, body = connection.receive()
            load_inner_state(learner.trainer.strategy, unpacked(body))
        self._take(connection, answer, numbers)
        return answer["work"]

    def _take(self, connection: Connection, answer: Message, numbers: memoryview) -> None:
        """Take an answer up, and say what the inner optimizer was, if that is asked."""
        learner, asked = self.learner, int(answer["keep"])
        state = learner.kept.get(asked)
        learner.take(answer, numbers)
        if asked >= 0:
            most = largest(learner.flat.nbytes)
            connection.send({"inner": asked}, *([] if state is None else packed(state, most)))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def learn(trainer: Trainer, job: Job, world: World, events: JsonLines) -> None:
    """Be a learner until the synchronizer says that it is over."""
    options = job.strategy_spec.options
    learner = Learner(trainer, job.ranks, keeps=options["inner"] == "kept")
    wire = Wire(learner, world, options["patience_s"])
    heartbeat = trainer.heartbeat
    events.event("ready", host=sockets.gethostname(), role=world.role, index=world.role_index)
    try:
        work = wire.ask({}, None, None)
        while work != OVER:
            if work is None:
                heartbeat.enter("exchange")
                time.sleep(NOTHING_TO_DO_S)
                work = wire.ask({}, None, None)
                continue
            chunk = Chunk(**work)
            said, found = learner.train(chunk)
            heartbeat.enter("exchange")
            heartbeat.collective()
            work = wire.ask({"work": said}, found, chunk)
    finally:
        wire.close()
    events.event("done", version=learner.version)
    heartbeat.enter("done")
