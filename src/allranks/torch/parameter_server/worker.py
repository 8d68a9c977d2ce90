"""A worker: it pulls weights, computes a chunk, pushes the gradient, and repeats.

    mode=sync     part of batch t   pull version t of all servers; forward, backward; push the
                                    gradient to all servers, send the tally to the scheduler
    mode=async    a whole batch     the step of one process, whose update is on the servers:
                                    push the gradient, pull the newest weights
    mode=delta    batches           the steps of one process; push the change of the weights,
                                    pull the newest weights (`exchange`)

A worker waits up to `patience_s` for a lost server or scheduler. Then all servers have the weights
of a checkpoint, and the worker's chunk is handed out again.
"""

from __future__ import annotations

import dataclasses
import math
import socket as sockets
import time
from collections.abc import Generator
from typing import Any

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.launcher.messages import ANSWER_S, Buffer, Connection, connect
from allranks.launcher.nodes.channel import Disconnected, Refused
from allranks.launcher.processes.linux import keep_freed_memory
from allranks.launcher.world import World
from allranks.strategies.roles import WORKER
from allranks.torch.data.batch import Batch
from allranks.torch.model.precision import explaining
from allranks.torch.parameter_server.exchange import Changes, Exchange
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.server import OVER
from allranks.torch.parameter_server.service import LARGEST_TALLY, SETTLE, Done
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.step.bad_step import own_part
from allranks.torch.step.tally import Tally
from allranks.torch.step.user_buffers import written_in_forward
from allranks.torch.trainer import Trainer
from allranks.training.progress import Progress
from allranks.training.work_queue import Chunk


class Reader:
    """The batches of a worker's chunks; consecutive chunks share one iterator."""

    def __init__(self, trainer: Trainer, parts: int) -> None:
        self.trainer, self.parts = trainer, parts
        batches = trainer.task_data.batches
        self.per_epoch = batches.steps_by_number(trainer.strategy.name)
        self._batches: dict[int, Any] = {}
        self._open: Generator[Batch] | None = None
        self._next = (-1, -1)

    def batch(self, chunk: Chunk) -> Batch:
        """The chunk's part of the batch of its first step."""
        where = chunk.part, chunk.first
        if self._open is None or where != self._next:
            self.close()
            if chunk.part not in self._batches:
                batches = self.trainer.task_data.batches
                self._batches[chunk.part] = batches.of_reader(chunk.part, self.parts)
            epoch, step = divmod(chunk.first, self.per_epoch)
            done = Progress(epoch, step, chunk.first, updates=chunk.first)
            self._open = self._batches[chunk.part].after(done, 2**31, None)
        self._next = chunk.part, chunk.first + 1
        return next(self._open)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None


LOOK_S = 0.05


class Worker:
    """One worker: its trainer, its connections, and the loop."""

    def __init__(self, trainer: Trainer, job: Job, world: World) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ParameterServer)
        strategy.workers = job.ranks
        self.trainer, self.strategy, self.world = trainer, strategy, world
        self.exchange = Exchange(strategy)
        self.reader = Reader(trainer, strategy.parts)
        self._patience_s = float(strategy.context.options["patience_s"])
        self._scheduler: Connection | None = None
        self.changes: Changes | None = None
        if strategy.pushes_changes:
            self.changes = Changes(self.exchange, job.ranks)
        if not strategy.in_step:
            strategy.side = self.changes or self.exchange

    def run(self) -> None:
        """Work until the scheduler says that the job is over."""
        done: Done | None = None
        while True:
            try:
                if self._scheduler is None:
                    self._join()
                answer = self._ask(done)
                if answer["work"] == OVER:
                    return
                if answer["work"] == SETTLE:
                    assert self.changes is not None
                    done = self.changes.settle()
                else:
                    done = self._work(Chunk(**answer["work"]))
            except Refused:
                raise
            except Disconnected:  # its chunk is handed out again
                self._leave()
                done = None

    # --- the scheduler --------------------------------------------------------------------

    def _join(self) -> None:
        """Connect to the scheduler, and to the servers it names."""
        heartbeat = self.trainer.heartbeat
        heartbeat.enter("exchange")
        self._scheduler = connect(self.world, LARGEST_TALLY, ANSWER_S, self._patience_s)
        self._scheduler.waits_for_ever()
        hello = {
            "role": WORKER,
            "index": self.world.role_index,
            "digest": self.strategy.digest,
        }
        try:
            answer, _ = self._scheduler.ask(hello)
        except Refused as error:
            raise RequestError(
                asked="--strategy ps",
                found=str(error),
                why="workers and servers exchange the weights of one model",
                do="let model() and optimizer() of the task return the same in every process",
            ) from error
        addresses = [(str(host), int(port)) for host, port in answer["servers"]]
        links = Links(addresses, self.world.secret, self.strategy.most())
        shares = self.strategy.context.options["transport"] == "auto"
        try:
            self.exchange.link(links, int(answer["era"]), hello, shares=shares)
        except BaseException:
            links.close()
            raise

    def _ask(self, done: Done | None) -> dict[str, Any]:
        """Report the finished chunk, if there is one, and get the next work."""
        heartbeat, scheduler = self.trainer.heartbeat, self._scheduler
        assert scheduler is not None
        heartbeat.enter("exchange")
        message: dict[str, Any] = {"sent": self.exchange.moved}
        if self.changes is not None and self.changes.is_under_way:
            message["under_way"] = True
        body: tuple[Buffer, ...] = ()
        if done is not None:
            message["brought"], body = done.report, (done.tallies,)
        answer, statistics = scheduler.ask(message, *body)
        self.strategy.apply_settings(answer, statistics)
        return answer

    def _leave(self) -> None:
        self._unlink()
        if self._scheduler is not None:
            self._scheduler.close()
        self._scheduler = None
        time.sleep(LOOK_S)

    # --- the work -------------------------------------------------------------------------

    def _work(self, chunk: Chunk) -> Done | None:
        """Compute a chunk and push the gradient; returns the report."""
        return self._part(chunk) if self.strategy.in_step else self._steps(chunk)

    def _read(self, chunk: Chunk) -> Batch:
        heartbeat = self.trainer.heartbeat
        heartbeat.at_step(chunk.first)
        heartbeat.enter("data")
        batch = self.reader.batch(chunk)
        heartbeat.enter("exchange")
        heartbeat.collective()
        return batch

    def _part(self, chunk: Chunk) -> Done:
        """Synchronous mode: its part of a batch, with the weights of that step."""
        trainer, batch = self.trainer, self._read(chunk)
        self.exchange.pull(chunk.first)
        trainer.heartbeat.enter("compute")
        trainer.faults.reach("step", chunk.first)
        precision = self.strategy.step.precision
        with trainer.meter.watching(batch.own_samples), explaining(precision):
            tally = self.exchange.compute(batch)
            self.exchange.check_gradients(tally)
        if self.strategy.step.user_buffers.written:
            raise written_in_forward(sorted(self.strategy.step.user_buffers.written))
        trainer.heartbeat.enter("exchange")
        self.exchange.push({"step": chunk.first, "part": chunk.part})
        trainer.faults.reach("stepped", chunk.first)
        report = {"chunk": chunk.number, "era": self.exchange.era}
        return Done(report | self._bad_samples(batch, tally), _bytes(tally))

    def _bad_samples(self, batch: Batch, tally: Tally) -> dict[str, Any]:
        """The bad samples of a part with a non-finite loss: the scheduler has no samples."""
        if math.isfinite(tally.loss):
            return {}
        findings = own_part(self.strategy.step, batch, self.world.rank, spiked=False)
        return {"found": [dataclasses.asdict(finding) for finding in findings]}

    def _steps(self, chunk: Chunk) -> Done | None:
        """Asynchronous modes: whole batches; returns the report of those which the servers have."""
        self.exchange.number = chunk.number
        reports, tallies = list[dict[str, Any]](), list[bytes]()
        for first in range(chunk.first, chunk.first + chunk.steps):
            batch = self._read(Chunk(chunk.number, chunk.part, first, 1))
            if self.exchange.version < 0:
                self.exchange.pull(-1)
                if self.changes is not None:
                    self.changes.begin()
            report, tally = self._step(batch)
            reports.append(report)
            tallies.append(_bytes(tally))
        chunk_report = {"steps": reports, "chunk": chunk.number, "era": self.exchange.era}
        done = Done(chunk_report, b"".join(tallies))
        return done if self.changes is None else self.changes.push(chunk, done)

    def _step(self, batch: Batch) -> tuple[dict[str, Any], Tally]:
        trainer, at = self.trainer, batch.index
        epoch, step = divmod(at, self.reader.per_epoch)
        trainer.progress = Progress(epoch, step, at, updates=at)
        result = trainer.step(batch)
        trainer.settle()
        if trainer.user_buffers:
            raise written_in_forward(trainer.user_buffers)
        loss = result.loss if math.isfinite(result.loss) else math.nan
        tally = self.strategy.side.tally
        assert tally is not None
        report = {
            "loss": loss,
            "updated": result.updated,
            "rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "bad": result.bad,
        }
        return report, tally

    def _unlink(self) -> None:
        if self.changes is not None:
            self.changes.forget()
        self.exchange.unlink()

    def close(self) -> None:
        self.reader.close()
        self._unlink()
        if self.changes is not None:
            self.changes.close()
        if self._scheduler is not None:
            self._scheduler.close()


def _bytes(tally: Tally) -> bytes:
    array: Any = tally.tensor.detach().cpu().numpy()
    return bytes(array.tobytes())


def work(trainer: Trainer, job: Job, world: World, events: JsonLines) -> None:
    """Run a worker until the scheduler says that the job is over."""
    events.event("ready", host=sockets.gethostname(), role=world.role, index=world.role_index)
    keep_freed_memory()
    worker = Worker(trainer, job, world)
    try:
        worker.run()
    finally:
        worker.close()
    events.event("done")
    trainer.heartbeat.enter("done")
