"""The trainer of the scheduler: the same loop, in which others compute a step.

In step, a step waits for all parts of its batch; workers begin with the next one as soon as servers
have updated, also while this process evaluates or saves. Out of step, a step is what a worker has
brought, in the order in which it came; to save, nothing more is handed out until nobody has
anything, so that the weights of a checkpoint are those of just the batches that it counts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from allranks.errors import PeerLost, RequestError
from allranks.launcher.messages.meeting_point import listen
from allranks.launcher.nodes.channel import Disconnected
from allranks.torch.data.batch import Batch
from allranks.torch.model.precision import KERNELS
from allranks.torch.parameter_server.handing_out import HandingOut
from allranks.torch.parameter_server.leading import LOOK_S, Leading, LeadingInStep
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.service import Brought, Service
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.trainer import Trainer
from allranks.training.progress import RankRequests, StepResult
from allranks.training.work_queue import Ledger


class SchedulerTrainer(Trainer):
    """The leader of a job of workers and servers. It sees no sample, but to evaluate."""

    strategy: ParameterServer
    service: Service | None = None
    _leading: Leading

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.strategy.workers = self.job.ranks
        self._told = more.get("report") or (lambda event, **values: None)
        self._saves_next = False
        self._uncounted: list[Brought] = []

    # --- the loop -------------------------------------------------------------------------

    def calls(self) -> Iterator[list[Any]]:
        """The steps, until all samples are in the weights."""
        service = self._served()
        self.heartbeat.at_step(self.progress.batch_index)
        self.heartbeat.enter("exchange")  # once: to wait and wait is no sign of life
        yield from self._batches() if self.strategy.in_step else self._brought(service)
        self._leave(service)

    def _batches(self) -> Iterator[list[Batch]]:
        """In step: the batches that come next, without their data."""
        last_epoch = 2**31 if self.job.steps is not None else self.task.epochs
        batches = self.task_data.batches
        for batch in batches.plans(self.progress, last_epoch, self.job.steps):
            if self.evaluation_plan.is_over:
                return
            yield [batch]

    def _brought(self, service: Service) -> Iterator[list[Brought]]:
        """Out of step: what workers bring, as it comes; at an early end, what they are at too."""
        while not self.evaluation_plan.is_over:
            found = service.brought(LOOK_S)
            self._uncounted += [one for brought in found for one in brought.steps()]
            while self._uncounted and not self.evaluation_plan.is_over:
                yield [self._uncounted.pop(0)]
            if self._saves_next and not found and service.wait_until_settled(LOOK_S):
                self._save_idle(service)
            if not found and service.handing.ledger.is_over:
                break
        self._take_in(service)
        while self._uncounted:
            yield [self._uncounted.pop(0)]

    def _take_in(self, service: Service) -> None:
        """Hand out nothing more, and wait for what workers are at: the weights have it by then."""
        service.pause()
        while not service.wait_until_idle(LOOK_S):
            pass
        self._uncounted += [one for brought in service.brought(0.0) for one in brought.steps()]

    def steps(self, batches: list[Any]) -> list[StepResult]:
        """What each step was."""
        make = self._made if self.strategy.in_step else self._counted
        return [make(batch) for batch in batches]

    def _made(self, batch: Batch) -> StepResult:
        """In step: one step, of which workers compute the parts."""
        self.heartbeat.at_step(batch.index)
        self.heartbeat.enter("exchange")
        self.faults.reach("step", batch.index)
        with KERNELS:
            result = self._steps.make(batch)
        asked = RankRequests.of(self.heartbeat.wants_stop, self.heartbeat.wants_save())
        result = dataclasses.replace(result, asked=asked)
        self.progress = self.progress.after(result, batch.epoch, batch.step_in_epoch)
        self.heartbeat.collective()
        self.faults.reach("stepped", batch.index)
        return result

    def _counted(self, brought: Brought) -> StepResult:
        """Out of step: what a worker has made of a batch, which is in the weights."""
        done, said = self.progress, brought.said
        self.heartbeat.at_step(done.batch_index)
        self.heartbeat.collective()
        self.faults.reach("step", done.batch_index)
        asked = RankRequests.of(self.heartbeat.wants_stop, self.heartbeat.wants_save())
        tally = self.strategy.step.layout.tally(brought.tally)
        totals = tally.totals(brought.chunk.first)
        if said["updated"]:
            tally.update_norms()
            assert self.service is not None
            self.service.tell({}, self.strategy.statistics())
        epoch = brought.chunk.first // self._per_epoch
        result = StepResult(
            done.batch_index,
            epoch,
            float(said["loss"]),
            totals.samples,
            totals.weight,
            float(said["rate"]),
            updated=bool(said["updated"]),
            grad_norm=said["grad_norm"],
            asked=asked,
            bad=str(said["bad"]),
        )
        at = brought.chunk.first % self._per_epoch
        self.progress = done.after(result, max(epoch, done.epoch), at)
        self.faults.reach("stepped", done.batch_index)
        return result

    @property
    def _per_epoch(self) -> int:
        """Steps of an epoch; raises `RequestError` for data that is read in one order only."""
        return self.task_data.batches.steps_by_number(self.strategy.name)

    # --- the servers ----------------------------------------------------------------------

    def _served(self) -> Service:
        """The service, once all servers have the weights that were resumed, or begun with."""
        strategy, job, world = self.strategy, self.job, self.world
        options, done = strategy.context.options, self.progress
        total = job.steps if job.steps is not None else self._per_epoch * self.task.epochs
        every = options["every"] if strategy.pushes_changes else 1
        ledger = Ledger(total, every, strategy.parts, done.batch_index)
        handing = HandingOut(ledger, strategy.in_step, options["backup"] > 0, options["staleness"])
        handing.ahead = not handing.spares and strategy.step.probe is None
        if strategy.handed is not None and not strategy.in_step:
            handing.load_state(strategy.handed)
        listener, kind = listen(world), strategy.step.layout.like.dtype
        service = self.service = Service(
            handing, options["servers"], strategy.digest, listener, world.secret, kind, self._told
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
            self.guard.find = leading.who
            leading.load(done.batch_index, world.restarts)
            leading.tell({"do": "tell"}, waits=True)  # before anybody pulls
        else:
            self._leading = Leading(strategy, links)
            self._leading.load(done.batch_index, world.restarts)
            service.tell({}, strategy.statistics())
        strategy.side = self._leading
        service.welcome(world.restarts)
        return service

    def _check_traced(self) -> None:
        """Raise `RequestError` for what no trace has: rows that are on servers alone."""
        if self.strategy.tables:
            raise RequestError(
                asked=f"to check --strategy {self.job.strategy}",
                found="tables whose rows lie on servers alone",
                why="a check compares every weight and gradient whole",
                do="tables=whole in the options of the strategy",
            )

    def _linked(self, service: Service, patience_s: float) -> Links:
        """Connections to all servers, once they have said where they are."""
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
        """The last step was made: take all that servers have, and let everybody go."""
        self._leading.take_weights(optimizer=True)
        self._count_bytes(service)
        self._let_go(service)
        self.strategy.side = None

    def _count_bytes(self, service: Service) -> None:
        """What the busiest process has sent: a server its weights, or a worker its gradients.

        In step that worker is one that did a part of each step: who did another one's part, while
        that one was not there yet, the clock says.
        """
        workers = [sent for sent in service.sent_by_workers().values() if sent]
        pulled = max(sum(sent["pulled"][s] for sent in workers) for s in range(service.servers))
        pushed = [sent["pushed"] for sent in workers]
        busiest = max(pushed, default=0)
        of_one = sum(pushed) // self.strategy.parts if self.strategy.in_step else busiest
        own = service.sent_bytes()
        self.comm.sent["gradients"] += max(pulled, of_one)
        kept = sum(int(sent["kept"]) for sent in workers)
        self.comm.sent["control"] += own["sent"] + own["control"] + kept

    # --- between the steps ----------------------------------------------------------------

    def save_if_due(self, result: StepResult) -> bool:
        """Save where the job asks for it; out of step once nobody has anything."""
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
        self._take_in(service)
        if self._uncounted:  # each is a step of the job like any other; after the last of them
            return False
        self._save_idle(service, wait=True)
        return True

    def _save_idle(self, service: Service, *, wait: bool = False) -> None:
        """Save, while no worker has anything; then they go on."""
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
            self._let_go(self.service, failed=failed)
        super().close(failed=failed)

    def _let_go(self, service: Service, *, failed: bool = False) -> None:
        """There is no more work: workers hear of it, those that wait at the servers too."""
        if isinstance(self.strategy.side, LeadingInStep) and not failed:
            with suppress(PeerLost):
                self.strategy.side.call_back()
        service.finish()
