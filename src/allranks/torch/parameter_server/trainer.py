"""The trainer of the scheduler: the usual loop, in which workers compute the steps.

Synchronous mode: a step waits for all parts of its batch. Workers begin the next one once servers
have updated, also while this process evaluates or saves. Asynchronous modes: each finished batch of
a worker is a step, in order of arrival. Before a save no more work is handed out until all workers
are idle, so that a checkpoint has the updates of exactly the batches it counts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from allranks.errors import PeerLost, RequestError
from allranks.launcher.messages.meeting_point import listen
from allranks.launcher.nodes.channel import Disconnected
from allranks.torch.data.batch import Batch
from allranks.torch.model.precision import KERNELS
from allranks.torch.parameter_server.handing_out import HandingOut
from allranks.torch.parameter_server.leading import Leading, LeadingInStep
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.service import ChunkResult, Service
from allranks.torch.parameter_server.strategy import ParameterServer, Side
from allranks.torch.trainer import Trainer
from allranks.training.progress import RankRequests, StepResult
from allranks.training.work_queue import Ledger

LOOK_S = 0.2


class SchedulerTrainer(Trainer):
    """The leader of a job of workers and servers. It reads samples only to evaluate."""

    strategy: ParameterServer
    service: Service | None = None
    _leading: Leading

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
            if not results and service.handing.ledger.is_over:
                break
        self._drain(service)
        while self._uncounted:
            yield [self._uncounted.pop(0)]

    def _drain(self, service: Service) -> None:
        """Hand out no more work, and wait for the chunks under way: they are in the weights."""
        service.pause()
        while not service.wait_until_idle(LOOK_S):
            pass
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
        with KERNELS:
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
            done.batch_index,
            epoch,
            float(report["loss"]),
            totals.samples,
            totals.weight,
            float(report["rate"]),
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
        handing = HandingOut(ledger, strategy.in_step, options["backup"] > 0, options["staleness"])
        if strategy.handed is not None and not strategy.in_step:
            handing.load_state(strategy.handed)
        listener, kind = listen(world), strategy.step.layout.like.dtype
        service = self.service = Service(
            handing, options["servers"], strategy.digest, listener, world.secret, kind, self._report
        )
        service.start()
        self._resources.on_close(service.close)
        self.heartbeat.enter("exchange")
        links = self._linked(service, options["patience_s"])
        self._resources.on_close(links.close)
        if strategy.step.probe is not None:
            self._check_traced()
        if strategy.step.probe is not None or self.evaluation_plan.is_over:
            service.pause()
        if strategy.in_step:
            self._leading = leading = LeadingInStep(strategy, links, service)
            self.guard.find = leading.find_bad_samples
            leading.load(done.batch_index, world.restarts)
            leading.publish()
        else:
            self._leading = Leading(strategy, links)
            self._leading.load(done.batch_index, world.restarts)
            service.publish({}, strategy.statistics())
        strategy.side = self._leading
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
        self._leading.take_weights(optimizer=True)
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
        self.strategy.handed = service.handing.state()
        self.save(wait=wait, evaluate=not wait)
        self.heartbeat.enter("exchange")
        service.go_on()

    def finish(self) -> bool:
        if not self.strategy.in_step and self.service is not None:
            self.strategy.handed = self.service.handing.state()
        return super().finish()

    def close(self, *, failed: bool = False) -> None:
        if self.service is not None:
            self.service.finish()
        super().close(failed=failed)
