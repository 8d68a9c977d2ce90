"""A worker: it pulls weights, computes what it is handed, pushes the gradient. Again.

    in step       part of batch t   weights of version t from all servers; forward, backward;
                                    the gradient to all servers, the tally to the scheduler
    out of step   a whole batch     the step of one process, whose update is on the servers:
                                    its gradient to them, the newest weights back

A server or the scheduler that is gone is waited for, `patience_s` at most; then all servers have
weights of a checkpoint, and what this worker was at is handed out again.
"""

from __future__ import annotations

import math
import socket as sockets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.launcher.messages.answering import ANSWER_S
from allranks.launcher.messages.connection import Buffer, Connection
from allranks.launcher.messages.meeting_point import connect
from allranks.launcher.nodes.channel import Disconnected, Message, Refused
from allranks.launcher.processes.linux import keep_freed_memory
from allranks.launcher.world import World
from allranks.strategies.roles import WORKER
from allranks.torch.data.batch import Batch
from allranks.torch.model.precision import KERNELS
from allranks.torch.parameter_server.links import CalledBack, Links, Stale
from allranks.torch.parameter_server.memory import offered
from allranks.torch.parameter_server.reader import Reader
from allranks.torch.parameter_server.server import OVER
from allranks.torch.parameter_server.service import LARGEST_TALLY
from allranks.torch.parameter_server.state import hyper_parameters_said
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.parameter_server.tables.lookups import Lookups
from allranks.torch.parameter_server.tables.placed import let_go
from allranks.torch.parameter_server.tables.pulled import pull_tables
from allranks.torch.parameter_server.tables.remote import Found, RemoteRows, RowGradients
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.step.user_buffers import written_in_forward
from allranks.torch.trainer import Trainer
from allranks.training.dispatch.ledger import Chunk
from allranks.training.progress import Progress, StepResult

LOOK_S = 0.05


class Exchange:
    """What a worker pulls and pushes: its side of the strategy, while it is linked to servers."""

    def __init__(self, strategy: ParameterServer, worker: int) -> None:
        self.strategy, self.worker = strategy, worker
        self._own = [(layout.new(), layout.new()) for layout in strategy.layouts]
        self.gradients, self.weights = map(list, zip(*self._own, strict=True))
        self._is_shared = [False] * len(self._own)
        self.links: Links | None = None
        self.era = self.version = -1
        self.number = -1
        self.tally: Tally | None = None
        self.moved: dict[str, Any] = {"pushed": 0, "pulled": [0] * len(self._own)}
        """The bytes that were pushed so far, and those that were pulled from each server."""
        self.rows = RemoteRows(strategy.tables, self.moved)
        self.lookups = Lookups(self.rows, self._used)
        pull_tables(strategy.model, self.lookups, self.rows.tables)
        for one in strategy.tables:
            let_go(strategy.parameters[one.position], strategy.step.optimizer)

    def _used(self, table: str) -> None:
        """Backward has reached a lookup in a table."""
        self.strategy.step.mark(self.rows.tables[table][1].position)

    def link(self, links: Links, era: int, hello: Message, *, shares: bool = True) -> None:
        """Go on with these servers: in memory that is shared, where they can and it `shares`."""
        offers = [offered(layout) if shares else (None, {}) for layout in self.strategy.layouts]
        links.open(hello, [offer for _, offer in offers])
        for server, (shared, _) in enumerate(offers):
            gradient, weights = self._own[server]
            self._is_shared[server] = shared is not None and links.shares[server]
            if shared is not None:
                shared.hide()
                if links.shares[server]:
                    gradient, weights = shared.gradient, shared.weights
            self.gradients[server], self.weights[server] = gradient, weights
            weights.be_memory_of(self.strategy.parameters)
        self.links, self.era, self.version = links, era, -1
        self.rows.link(links, era)

    def unlink(self) -> None:
        """Leave the servers."""
        if self.links is not None:
            self.links.close()
        self.links = None

    def pull(self, version: int) -> None:
        """The model has weights of this version or a later one from here on."""
        links = self.links
        assert links is not None
        for server in range(len(self.weights)):
            links.send(server, {"pull": version, "era": self.era})
        self.take()

    def take(self) -> None:
        """Take the weights that were asked for, and in step what is told with them.

        Raises `CalledBack`, with all answers heard, where other work comes first.
        """
        assert self.links is not None
        self.lookups.forget()
        parameters = [p.detach() for p in self.strategy.parameters]
        found = []
        for server, flat in enumerate(self.weights):
            answer, _ = self.links.receive(server, flat.place)
            if "stale" in answer:
                raise Stale(f"server {server} has been loaded anew")
            if "again" in answer:
                continue
            self.moved["pulled"][server] += flat.layout.nbytes
            found.append(int(answer["version"]))
            flat.write_to(parameters)
            if answer["follows"]:
                self.strategy.hear(*self.links.receive(server))
        if len(found) < len(self.weights):
            raise CalledBack
        self.version = min(found)

    def push(
        self,
        said: dict[str, Any],
        rows: Found | None = None,
        *,
        unused: bool = False,
        pulls: bool = False,
    ) -> None:
        """Send the gradients where they lie in `.grad` to all servers; then ask for weights."""
        links = self.links
        assert links is not None
        touched = self.lookups.gradients() if rows is None else rows
        for table, (ids, gradient) in touched.items():
            self.rows.push(table, ids, gradient)
        absent = self.rows.absent(touched)
        gradients = [
            p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
            for p in self.strategy.parameters
        ]
        for server, flat in enumerate(self.gradients):
            missing = flat.read_from(gradients)
            more = {"unused": missing + absent} if unused else {}
            body = () if self._is_shared[server] else (flat.buffer,)
            links.send(server, {"push": {**said, **more}, "era": self.era}, *body)
            self.moved["pushed"] += flat.layout.nbytes
            if pulls:
                links.send(server, {"pull": -1, "era": self.era})

    # --- out of step: the update of a step of this process ----------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        self.tally = self.strategy.compute(batch, self.gradients)
        return self.tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, RowGradients(self.strategy.parameters, self.rows, self.lookups)

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        """Within, the optimizer finds no gradient: the servers have applied it."""
        assert isinstance(gradients, RowGradients)
        said = {
            "number": self.number,
            "groups": hyper_parameters_said(self.strategy.step.optimizer),
        }
        self.push(said, gradients.found, unused=True, pulls=True)
        for parameter in gradients.parameters:
            parameter.grad = None
        yield
        self.take()

    def after_update(self, result: StepResult) -> None:
        """The weights are here already."""

    def take_weights(self, *, optimizer: bool = False) -> None:
        """A worker has what it pulled."""

    def put_weights(self) -> None:
        """A worker changes nothing on a server but by a gradient."""


class Worker:
    """One worker: its trainer, its connections, and the loop."""

    def __init__(self, trainer: Trainer, job: Job, world: World) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ParameterServer)
        strategy.workers = job.ranks
        self.trainer, self.strategy, self.world = trainer, strategy, world
        self.exchange = Exchange(strategy, world.role_index)
        self.reader = Reader(trainer, strategy.parts)
        self._patience_s = float(strategy.context.options["patience_s"])
        self._scheduler: Connection | None = None
        self._is_back = False
        if not strategy.in_step:
            strategy.side = self.exchange

    def run(self) -> None:
        """Work until the scheduler says that it is over."""
        done: tuple[dict[str, Any], bytes] | None = None
        while True:
            try:
                if self._scheduler is None:
                    self._join()
                answer = self._ask(done)
                if answer["work"] == OVER:
                    return
                done = self._work(Chunk(**answer["work"]))
            except CalledBack:
                done, self._is_back = None, True
            except Refused:
                raise
            except Disconnected:  # what it was at is handed out again
                self._leave()
                done = None

    # --- the scheduler --------------------------------------------------------------------

    def _join(self) -> None:
        """Meet the scheduler, and the servers that it names."""
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
                do="let model() and optimizer() of the task make the same in every process",
            ) from error
        addresses = [(str(host), int(port)) for host, port in answer["servers"]]
        links = Links(addresses, self.world.secret, self.strategy.most())
        shares = self.strategy.context.options["transport"] == "auto"
        try:
            self.exchange.link(links, int(answer["era"]), hello, shares=shares)
        except BaseException:
            links.close()
            raise

    def _ask(self, done: tuple[dict[str, Any], bytes] | None) -> dict[str, Any]:
        """Bring what was done, if anything, and get what comes next."""
        heartbeat, scheduler = self.trainer.heartbeat, self._scheduler
        assert scheduler is not None
        heartbeat.enter("exchange")
        message: dict[str, Any] = {"sent": self.exchange.moved}
        if self._is_back:
            message["returned"], self._is_back = True, False
        body: tuple[Buffer, ...] = ()
        if done is not None:
            message["brought"], body = done[0], (done[1],)
        answer, statistics = scheduler.ask(message, *body)
        self.strategy.hear(answer, statistics)
        return answer

    def _leave(self) -> None:
        self.exchange.unlink()
        if self._scheduler is not None:
            self._scheduler.close()
        self._scheduler = None
        time.sleep(LOOK_S)

    # --- the work -------------------------------------------------------------------------

    def _work(self, chunk: Chunk) -> tuple[dict[str, Any], bytes]:
        """What there is to say of a chunk, and its tally; the gradient is on its way."""
        heartbeat = self.trainer.heartbeat
        heartbeat.at_step(chunk.first)
        heartbeat.enter("data")
        batch = self.reader.batch(chunk)
        heartbeat.enter("exchange")
        heartbeat.collective()
        in_step = self.strategy.in_step
        if in_step or self.exchange.version < 0:
            self.exchange.pull(chunk.first if in_step else -1)
        said, tally = self._part(batch, chunk) if in_step else self._step(batch, chunk)
        said |= {"chunk": chunk.number, "era": self.exchange.era}
        array: Any = tally.tensor.detach().cpu().numpy()
        return said, array.tobytes()

    def _part(self, batch: Batch, chunk: Chunk) -> tuple[dict[str, Any], Tally]:
        trainer = self.trainer
        trainer.heartbeat.enter("compute")
        trainer.faults.reach("step", chunk.first)
        with trainer.meter.watching(batch.own_samples), KERNELS:
            tally = self.strategy.compute(batch, self.exchange.gradients)
        if self.strategy.step.user_buffers.written:
            raise written_in_forward(sorted(self.strategy.step.user_buffers.written))
        trainer.heartbeat.enter("exchange")
        self.exchange.push({"step": chunk.first, "part": chunk.part})
        trainer.faults.reach("stepped", chunk.first)
        return {}, tally

    def _step(self, batch: Batch, chunk: Chunk) -> tuple[dict[str, Any], Tally]:
        trainer, at = self.trainer, chunk.first
        epoch, step = divmod(at, self.reader.per_epoch)
        trainer.progress = Progress(epoch, step, at, updates=at)
        self.exchange.number = chunk.number
        result = trainer.step(batch)
        trainer.settle()
        if trainer.user_buffers:
            raise written_in_forward(trainer.user_buffers)
        loss = result.loss if math.isfinite(result.loss) else math.nan
        tally = self.exchange.tally
        assert tally is not None
        said = {
            "loss": loss,
            "updated": result.updated,
            "rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "bad": result.bad,
        }
        return said, tally

    def close(self) -> None:
        self.reader.close()
        self.exchange.unlink()
        if self._scheduler is not None:
            self._scheduler.close()


def work(trainer: Trainer, job: Job, world: World, events: JsonLines) -> None:
    """Be a worker until the scheduler says that it is over."""
    events.event("ready", host=sockets.gethostname(), role=world.role, index=world.role_index)
    keep_freed_memory()
    worker = Worker(trainer, job, world)
    try:
        worker.run()
    finally:
        worker.close()
    events.event("done")
    trainer.heartbeat.enter("done")
