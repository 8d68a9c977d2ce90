"""The scheduler: it leads a job in which workers compute the steps and servers hold the weights.

The code which all strategies share (`SharedStep.apply`) runs here as elsewhere: division,
regularizer, guard, clipping, rates. The gradient stays on the servers; each operation on it is sent
to them as a few numbers (`RemoteGradients`).

Synchronous mode: a step waits for all parts of its batch. Workers begin the next one while servers
update, also while this process evaluates or saves. Asynchronous modes: each finished batch of a
worker is a step, in order of arrival. Before a save no more work is handed out until all workers
are idle, so that a checkpoint has the updates of exactly the batches it counts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import PeerLost, RequestError
from allranks.launcher.messages import listen
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.torch.checkpoint.state import packed, unpacked
from allranks.torch.data.batch import Batch
from allranks.torch.model.precision import explaining
from allranks.torch.parameter_server.flat import Flat
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.row_table import state_in_torch
from allranks.torch.parameter_server.served_tables import check_no_rows, numbers_of, rows_in
from allranks.torch.parameter_server.service import ChunkResult, Service, WorkQueue
from allranks.torch.parameter_server.shard import cut_state, join_state, plain_hyperparameters
from allranks.torch.parameter_server.strategy import ParameterServer, Side
from allranks.torch.step.gradients import Gradients, clip_factor
from allranks.torch.step.tally import Tally
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.trainer import Trainer
from allranks.training.guard import BadStepFinding
from allranks.training.progress import RankRequests, StepResult
from allranks.training.work_queue import Ledger

LOOK_S = 0.2
NOT_SEARCHED = (
    "the loss of each worker is finite; the servers have only the sum of the gradients, so the "
    "samples behind it are not searched for (--strategy ddp does that)"
)


class AsyncScheduler(Side):
    """The side of the scheduler: its strategy has the whole model, its links lead to all servers.

    It loads weights into the servers and fetches them; workers make the steps.
    """

    def __init__(self, strategy: ParameterServer, links: Links) -> None:
        super().__init__(strategy)
        self.links = links

    def ask_all(
        self, message: Message, tensors: Sequence[Tensor | None] | None = None
    ) -> list[tuple[Message, memoryview]]:
        """Send a message, and the pieces of whole `tensors`, to all servers; wait for answers.

        Raises `PeerLost` if a server is gone.
        """
        bodies = [] if tensors is None else [flat.buffer for flat in self._flats(tensors)]
        with _is_lost():
            self.links.send_to_all(message, bodies)
            return self.links.receive_all()

    def load(self, version: int, era: int) -> None:
        """Send the weights and the optimizer state of this process to the servers."""
        strategy, optimizer = self.strategy, self.strategy.step.optimizer
        weights = self._flats(strategy.weights)
        message = {"do": "load", "version": version, "era": era}
        with _is_lost():
            self._load_tables()
            for server, flat in enumerate(weights):
                states = cut_state(optimizer, strategy.parameters, flat.layout.pieces)
                self.links.send(server, message, flat.buffer, *packed(states))
                self.links.receive(server)

    def take_weights(self, *, optimizer: bool = False) -> None:
        """Load the weights of the servers into the model, and optimizer states if asked."""
        answers = self.ask_all({"do": "fetch", "state": optimizer})
        strategy = self.strategy
        for layout, (_, body) in zip(strategy.layouts, answers, strict=True):
            if layout.nbytes:
                layout.new(body[: layout.nbytes]).write_to(strategy.weights)
            if optimizer:
                states = unpacked(body[layout.nbytes :])
                join_state(strategy.step.optimizer, strategy.parameters, layout.pieces, states)
        with _is_lost():
            self._take_tables(strategy.step.optimizer if optimizer else None)

    def put_weights(self) -> None:
        """Send the weights of this process to the servers; no worker may pull meanwhile."""
        self.ask_all({"do": "put"}, self.strategy.weights)

    def _load_tables(self) -> None:
        """Send each server its rows of the tables, and their optimizer state."""
        strategy, servers = self.strategy, len(self.links.servers)
        for number, table in enumerate(strategy.tables):
            weight = strategy.parameters[table.position]
            state = strategy.step.optimizer.state.get(weight, {})
            columns = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.ndim > 1}
            header = {"do": "load_rows", "table": number, "columns": list(columns)}
            header["step"] = int(state.get("step", 0))
            for server in range(servers):
                tensors = (weight, *columns.values())
                body = [numbers_of(each[server::servers]) for each in tensors]
                self.links.send(server, header, *body)
                self.links.receive(server)

    @torch.no_grad()
    def _take_tables(self, optimizer: Optimizer | None) -> None:
        """Fetch the tables from the servers, and their state if there is an `optimizer` for it."""
        servers = len(self.links.servers)
        for number, table in enumerate(self.strategy.tables):
            weight, plan = self.strategy.parameters[table.position], table.plan
            columns: dict[str, Tensor] = {}
            step = 0
            for server in range(servers):
                request = {"do": "fetch_rows", "table": number, "state": optimizer is not None}
                self.links.send(server, request)
                answer, body = self.links.receive(server)
                count, step = len(range(server, plan.rows, servers)), int(answer["step"])
                rows = rows_in(body, count, plan.dim, plan.kind)
                weight[server::servers] = rows.to(weight.device)
                at = rows.nbytes
                for name, width in zip(answer["columns"], answer["widths"], strict=True):
                    column = rows_in(body, count, width, plan.kind, at)
                    at += column.nbytes
                    if name not in columns:
                        columns[name] = weight.new_empty(plan.rows, width)
                    columns[name][server::servers] = column.to(weight.device)
            state = state_in_torch(table.rule, step, columns)
            if optimizer is not None and state and step:
                optimizer.state[weight].update(state)

    def _flats(self, tensors: Sequence[Tensor | None]) -> list[Flat]:
        """The pieces of whole tensors, in new memory for each server."""
        flats = [layout.new() for layout in self.strategy.layouts]
        for flat in flats:
            flat.read_from(tensors)
        return flats


class SyncScheduler(AsyncScheduler):
    """Synchronous mode: waits for all parts of a step, and lets the servers update."""

    def __init__(self, strategy: ParameterServer, links: Links, service: Service) -> None:
        super().__init__(strategy, links)
        self._service = service
        self._gradients: RemoteGradients | None = None
        self._findings: tuple[BadStepFinding, ...] = ()

    def forward_backward(self, batch: Batch) -> Tally:
        """The tallies of all parts, in their order."""
        step = self.strategy.step
        step.prepare(batch)
        self._service.go_on()
        results = self._service.step()
        self._findings = tuple(
            BadStepFinding(**row) for result in results for row in result.report.get("found", ())
        )
        tally = step.layout.tally()
        for result in results:
            tally.tensor.add_(result.tally)
        step.end(batch)
        return tally

    def find_bad_samples(self, batch: Batch, spiked: bool) -> tuple[BadStepFinding, ...]:
        """The samples behind a bad step, as the workers reported them."""
        return self._findings or (BadStepFinding(NOT_SEARCHED),)

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self._gradients = RemoteGradients(self)
        return local, self._gradients

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        """Within, parameters have no gradient; afterwards the servers update with theirs."""
        assert isinstance(gradients, RemoteGradients)
        for parameter in gradients.parameters:
            parameter.grad = None
        yield
        gradients.apply()

    def after_update(self, result: StepResult) -> None:
        """Let the servers update, and the workers begin the next step meanwhile."""
        assert self._gradients is not None
        if self.strategy.step.probe is not None:  # it may change weights before the next step
            self._service.pause()
        with _is_lost():
            self.links.send_to_all(self._gradients.update or {"do": "pass"})
            self.publish()
            self._service.close_step()
            self.links.receive_all()

    def publish(self) -> None:
        """Send the settings of the next step to workers, with their work."""
        step = self.strategy.step
        scale = None if step.loss_scale is None else step.loss_scale.value
        settings = {"loss_scale": scale, "regularizer": float(step.regularizers.was)}
        self._service.publish(settings, self.strategy.statistics())


class RemoteGradients(Gradients):
    """The gradient of a step: `factor` times the pieces which the servers have.

    It is not copied to this process; `parameters` have no `.grad`.
    """

    def __init__(self, scheduler: SyncScheduler) -> None:
        super().__init__(scheduler.strategy.parameters)
        self._scheduler = scheduler
        self.factor = 1.0
        self.unused: list[int] = []
        self.update: dict[str, Any] | None = None
        """The message which makes the servers apply it."""

    def settle(self, unused: Sequence[int]) -> None:
        self.unused = list(unused)

    def follow(self, parameters: list[nn.Parameter]) -> None:
        raise unfrozen_on_the_way(self._scheduler.strategy.name)

    def scale_(self, factor: float | Tensor) -> None:
        self.factor *= float(factor)

    def add(self, value: Tensor) -> None:
        """Add the gradient of `value`, a function of the weights computed in this process."""
        for parameter in self.parameters:
            parameter.grad = None
        value.backward()
        gradients = [p.grad for p in self.parameters]
        check_no_rows(
            self.parameters, {table.position for table in self._scheduler.strategy.tables}
        )
        self.unused = [at for at in self.unused if gradients[at] is None]
        self._scheduler.ask_all({"do": "add", "factor": self.factor}, gradients)
        self.factor = 1.0
        for parameter in self.parameters:
            parameter.grad = None

    def tensors(self) -> list[Tensor | None]:
        """The whole gradient, fetched from the servers; used by a trace."""
        gradients = [torch.zeros_like(p) for p in self.parameters]
        layouts = self._scheduler.strategy.layouts
        answers = self._scheduler.ask_all({"do": "gradients"})
        for layout, (_, body) in zip(layouts, answers, strict=True):
            if layout.nbytes:
                layout.new(body).write_to(gradients)
        unused = set(self.unused)
        return [None if at in unused else g * self.factor for at, g in enumerate(gradients)]

    def norm(self, *, clips: bool, left_out: bool) -> float:
        answers = self._scheduler.ask_all({"do": "squares", "unused": self.unused})
        squares = math.fsum(float(answer["squares"]) for answer, _ in answers)
        return math.sqrt(squares) * abs(self.factor) if squares >= 0 else math.nan

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        return torch.tensor(self.norm(clips=clips, left_out=left_out), dtype=torch.float64)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        self.factor *= clip_factor(limit, norm)

    def apply(self) -> None:
        """Prepare the update of the servers, with the optimizer's current hyperparameters."""
        groups = plain_hyperparameters(self._scheduler.strategy.step.optimizer)
        how = {"factor": self.factor, "groups": groups, "unused": self.unused}
        self.update = {"do": "apply", **how}


@contextmanager
def _is_lost() -> Iterator[None]:
    """Within, a broken connection to a server raises `PeerLost`."""
    try:
        yield
    except Disconnected as error:
        raise PeerLost(str(error)) from error


class SchedulerTrainer(Trainer):
    """The leader of a job of workers and servers. It reads samples only to evaluate."""

    strategy: ParameterServer
    service: Service | None = None
    _side: AsyncScheduler

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.strategy.workers = self.job.ranks
        self._report = more.get("report") or (lambda event, **values: None)
        self._saves_next = False
        self._uncounted: list[ChunkResult] = []

    # --- the loop -------------------------------------------------------------------------

    def calls(self) -> Iterator[list[Any]]:
        """The steps, until all samples are in the weights."""
        service = self._start_servers()
        self.heartbeat.at_step(self.progress.batch_index)
        self.heartbeat.enter("exchange")  # once: to wait and wait is no sign of life
        yield from self._batches() if self.strategy.in_step else self._results(service)
        self._leave(service)

    def _batches(self) -> Iterator[list[Batch]]:
        """Synchronous mode: the plans of the next batches, without data."""
        last_epoch = 2**31 if self.job.steps is not None else self.task.epochs
        batches = self.task_data.batches
        for batch in batches.plans(self.progress, last_epoch, self.job.steps):
            if self.evaluation_plan.is_over:
                return
            yield [batch]

    def _results(self, service: Service) -> Iterator[list[ChunkResult]]:
        """Asynchronous modes: results as they arrive; at an early end also those under way."""
        while not self.evaluation_plan.is_over:
            results = service.results(LOOK_S)
            self._uncounted += [step for result in results for step in result.steps()]
            while self._uncounted and not self.evaluation_plan.is_over:
                yield [self._uncounted.pop(0)]
            if self._saves_next and not results and service.wait_until_settled(LOOK_S):
                self._save_idle(service)
            if not results and service.queue.ledger.is_over:
                break
        self._drain(service)
        while self._uncounted:
            yield [self._uncounted.pop(0)]

    def _drain(self, service: Service) -> None:
        """Hand out no more work, and wait for the chunks under way: they are in the weights."""
        service.pause()
        while not service.wait_until_settled(LOOK_S):
            self._uncounted += [step for result in service.results(0.0) for step in result.steps()]

    def steps(self, batches: list[Any]) -> list[StepResult]:
        """The result of each step."""
        make = self._train_step if self.strategy.in_step else self._count_step
        return [make(batch) for batch in batches]

    def _train_step(self, batch: Batch) -> StepResult:
        """Synchronous mode: one step, whose parts workers compute."""
        self.heartbeat.at_step(batch.index)
        self.heartbeat.enter("exchange")
        self.faults.reach("step", batch.index)
        with explaining(self.strategy.step.precision):
            result = self._steps.make(batch)
        requests = RankRequests.of(self.heartbeat.wants_stop, self.heartbeat.wants_save())
        result = dataclasses.replace(result, asked=requests)
        self.progress = self.progress.after(result, batch.epoch, batch.step_in_epoch)
        self.heartbeat.collective()
        self.faults.reach("stepped", batch.index)
        return result

    def _count_step(self, chunk_result: ChunkResult) -> StepResult:
        """Asynchronous modes: the step which a worker has made; it is in the weights."""
        done, report = self.progress, chunk_result.report
        self.heartbeat.at_step(done.batch_index)
        self.heartbeat.collective()
        self.faults.reach("step", done.batch_index)
        requests = RankRequests.of(self.heartbeat.wants_stop, self.heartbeat.wants_save())
        tally = self.strategy.step.layout.tally(chunk_result.tally)
        totals = tally.totals(chunk_result.chunk.first)
        if report["updated"]:
            tally.update_norms()
            assert self.service is not None
            self.service.publish({}, self.strategy.statistics())
        epoch = chunk_result.chunk.first // self._per_epoch
        result = StepResult(
            batch_index=done.batch_index,
            epoch=epoch,
            loss=float(report["loss"]),
            samples=totals.samples,
            weight=totals.weight,
            learning_rate=float(report["rate"]),
            updated=bool(report["updated"]),
            grad_norm=report["grad_norm"],
            asked=requests,
            bad=str(report["bad"]),
        )
        at = chunk_result.chunk.first % self._per_epoch
        self.progress = done.after(result, max(epoch, done.epoch), at)
        self.faults.reach("stepped", done.batch_index)
        return result

    @property
    def _per_epoch(self) -> int:
        """Steps of an epoch; raises `RequestError` for data that is read in one order only."""
        return self.task_data.batches.steps_by_number(self.strategy.name)

    # --- the servers ----------------------------------------------------------------------

    def _start_servers(self) -> Service:
        """Start the service, and send the initial or resumed weights to all servers."""
        strategy, job, world = self.strategy, self.job, self.world
        options, done = strategy.context.options, self.progress
        total = job.steps if job.steps is not None else self._per_epoch * self.task.epochs
        every = options["every"] if strategy.pushes_changes else 1
        ledger = Ledger(total, every, strategy.parts, done.batch_index)
        queue = WorkQueue(ledger, strategy.in_step, options["backup"] > 0, options["staleness"])
        if strategy.handed is not None and not strategy.in_step:
            queue.load_state(strategy.handed)
        listener, kind = listen(world), strategy.step.layout.like.dtype
        service = self.service = Service(
            queue, options["servers"], strategy.digest, listener, world.secret, kind, self._report
        )
        service.start()
        self._resources.callback(service.close)
        self.heartbeat.enter("exchange")
        links = self._linked(service, options["patience_s"])
        self._resources.callback(links.close)
        if strategy.step.probe is not None:
            self._check_traced()
        if strategy.step.probe is not None or self.evaluation_plan.is_over:
            service.pause()
        if strategy.in_step:
            self._side = side = SyncScheduler(strategy, links, service)
            self.guard.find = side.find_bad_samples
            side.load(done.batch_index, world.restarts)
            side.publish()
        else:
            self._side = AsyncScheduler(strategy, links)
            self._side.load(done.batch_index, world.restarts)
            service.publish({}, strategy.statistics())
        strategy.side = self._side
        service.welcome(world.restarts)
        return service

    def _check_traced(self) -> None:
        """Raise `RequestError` for tables on servers: a trace cannot have their rows."""
        if self.strategy.tables:
            raise RequestError(
                asked=f"to check --strategy {self.job.strategy}",
                found="tables whose rows are on servers only",
                why="a check compares every weight and gradient whole",
                do="tables=whole in the options of the strategy",
            )

    def _linked(self, service: Service, patience_s: float) -> Links:
        """Connect to all servers, once they have registered."""
        deadline, problem = time.monotonic() + patience_s, "they have not said where they are"
        hello = {"role": "scheduler", "digest": self.strategy.digest}
        while time.monotonic() < deadline:
            addresses = service.wait_for_servers(LOOK_S)
            if addresses is None:
                continue
            links = Links(addresses, self.world.secret, self.strategy.most())
            try:
                return links.open(hello)
            except Disconnected as error:
                links.close()
                problem = str(error)
                time.sleep(LOOK_S)
        raise PeerLost(f"not all servers came within {patience_s:g} s: {problem}")

    def _leave(self, service: Service) -> None:
        """After the last step: fetch weights and optimizer states, and end the service."""
        self._side.take_weights(optimizer=True)
        self._count_bytes(service)
        service.finish()
        self.strategy.side = Side(self.strategy)

    def _count_bytes(self, service: Service) -> None:
        """The bytes of the busiest process: a server's weights, or a worker's gradients.

        Synchronous mode: those of a worker with one part of each step. A worker may have done the
        parts of a late one too, which depends on timing and is not counted.
        """
        workers = [moved for moved in service.sent_by_workers().values() if moved]
        pulled = max(sum(moved["pulled"][s] for moved in workers) for s in range(service.servers))
        pushed = [moved["pushed"] for moved in workers]
        busiest = max(pushed, default=0)
        of_one = sum(pushed) // self.strategy.parts if self.strategy.in_step else busiest
        replies = service.sent_bytes()
        self.comm.sent_bytes["gradients"] += max(pulled, of_one)
        state_bytes = sum(int(moved["kept"]) for moved in workers)
        self.comm.sent_bytes["control"] += replies["sent"] + replies["control"] + state_bytes

    # --- between the steps ----------------------------------------------------------------

    def save_if_due(self, result: StepResult) -> bool:
        """Save if the job asks for it; in asynchronous modes once all workers are idle."""
        if self.strategy.in_step:
            return super().save_if_due(result)
        self._called.add("save_if_due")
        every, done, service = self.job.checkpoint_every, self.progress.batch_index, self.service
        assert service is not None
        due = every is not None and done % every == 0
        if due or result.asked.save or self.evaluation_plan.wants_save(self.progress):
            self._saves_next = True
            service.pause()
        if not result.asked.stop:
            return False
        self._drain(service)
        if self._uncounted:  # each is a step of the job like any other; after the last of them
            return False
        self._save_idle(service, wait=True)
        return True

    def _save_idle(self, service: Service, *, wait: bool = False) -> None:
        """Save while all workers are idle; then resume."""
        self._saves_next = False
        self.strategy.handed = service.queue.state()
        self.save(wait=wait, evaluate=not wait)
        self.heartbeat.enter("exchange")
        service.go_on()

    def finish(self) -> bool:
        if not self.strategy.in_step and self.service is not None:
            self.strategy.handed = self.service.queue.state()
        return super().finish()

    def close(self, *, failed: bool = False) -> None:
        if self.service is not None:
            self.service.finish()
        super().close(failed=failed)
