"""The record of one rank: its events, and of the leader the metrics, the logs, the summary."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from allranks.job.job import Job
from allranks.job.limits import logs_of
from allranks.job.run_folder import JsonLines, rank_events_path, read_rows
from allranks.launcher.heartbeat import Group
from allranks.launcher.world import World
from allranks.training.callback import Callback
from allranks.training.engine.regroup import Agreed
from allranks.training.engine.trainer import EngineTrainer
from allranks.training.progress import StepResult
from allranks.training.record.digests import DigestLog, RunDigests
from allranks.training.record.logs import (
    METRICS,
    End,
    Keeping,
    Logs,
    evaluations_before,
    open_logs,
    open_metrics,
    row_of,
)
from allranks.training.record.phases import NAME as PHASES
from allranks.training.record.phases import PhaseRecord

LOOK_EVERY_S = 1.0


class RankRecord(Callback):
    """What one rank of `job` writes down while it trains."""

    def __init__(self, job: Job, world: World, events: JsonLines) -> None:
        self.job, self.world, self.events = job, world, events
        self.run_dir = Path(job.run_dir)
        self.keeping = Keeping(self.run_dir, events.event)
        self.resumed_from: int | None = None
        self._metrics: JsonLines | None = None
        self._logs = Logs()
        self._began_at = self._last_step_at = 0.0
        self._first_step = True
        self._unread: list[StepResult] = []
        self._speaks = self._trains_apart = False
        self._seen_before = 0
        self.updates_before = 0
        self._phases: PhaseRecord | None = None
        self._members: tuple[int, ...] = tuple(range(world.size)) if world.group >= 0 else ()
        self._group: dict[str, Any] | None = None  # that formed, and has made no step
        self.groups = 0
        self._last_row = -1
        self._reached_s: float | None = None
        self.digests: RunDigests | None = None
        self._looked_at = time.monotonic()

    def open(self, trainer: EngineTrainer[Any], resumed_from: int | None) -> None:
        """Before the first step: the leader's files, without what came after the checkpoint."""
        agreement = trainer.job.strategy_spec.card.agreement
        self._trains_apart = not agreement.is_one_training
        self._speaks = self.world.is_leader or self._trains_apart
        self.resumed_from = resumed_from
        self._seen_before = trainer.progress.samples_seen
        if self.world.is_leader:
            self._open_files(trainer.progress.batch_index)
            if self.job.elastic or (self.job.bitwise and self.digests is not None):
                self.events.event("data", data=trainer.task_data.opened_data.facts)

    def _open_files(self, step: int) -> None:
        self._metrics = open_metrics(self.run_dir, step)
        self._logs = open_logs(self.job, step)

    def follow_group(
        self, trainer: EngineTrainer[Any], world: World, group: Group, agreed: Agreed
    ) -> None:
        """Another group trains now: whoever leads it writes the files, each step once.

        A new leader also writes the last evaluation, if the leader before was lost too early.
        """
        self._write()
        was, self.world = self.world, world
        self._speaks, self.groups = world.is_leader, group.number
        lost = [rank for rank in self._members if rank not in group.members]
        joined = [group.members[rank] for rank in agreed.new]
        self._group = {"number": group.number, "members": list(group.members)}
        self._group |= {"lost": lost, "joined": joined, "steps_again": agreed.steps_again}
        if agreed.behind and agreed.is_streamed:
            self._group["streamed"] = True
        if agreed.loaded_from:
            lost_parts = {"parts_lost": list(agreed.parts_lost)}
            self._group |= {"loaded_from": agreed.loaded_from, **lost_parts}
        if not world.is_leader or agreed.loaded_from:
            self._hand_over()
        if not world.is_leader:
            return
        step, row = agreed.position.step, agreed.position.row
        if not was.is_leader or self._metrics is None:
            self._open_files(step)
            metrics = trainer.evaluation_plan.metrics_of(trainer.progress)
            if metrics is not None and step not in evaluations_before(self.run_dir, step):
                self._write_evaluation(trainer, metrics)
            rows = read_rows(self.run_dir / METRICS)
            self._last_row = max((int(written["step"]) for written in rows), default=-1)
        if row is not None and self._last_row < row["step"] < step:
            self._write_row(row)

    def digest_log(self) -> DigestLog | None:
        """The file of digests, if this rank writes it; of what it has by now."""
        if not self.world.is_leader:
            return None
        return DigestLog(self.run_dir, self.events.event, compares=self.job.bitwise)

    def join(self, trainer: EngineTrainer[Any]) -> None:
        """This rank is new in a group that has trained before."""
        self._seen_before = trainer.progress.samples_seen
        self.updates_before = trainer.progress.updates
        self.begin()

    def leave(self) -> None:
        """The others train on without this rank, and with its files."""
        self._write()
        self._hand_over()

    def _hand_over(self) -> None:
        """The files of the leader are another rank's from now on; each row is in them."""
        if self._metrics is not None:
            self._metrics.hand_over()
            self._logs.fail()
        self._metrics, self._logs = None, Logs()

    def begin(self) -> None:
        """The time of the training counts from here."""
        self._began_at = self._last_step_at = time.perf_counter()

    def on_start(self, trainer: EngineTrainer[Any]) -> None:
        """Watch the phases of the steps, if the job asks for that."""
        if PHASES in logs_of(self.job) and self._phases is None:
            world = self.world
            watched = (world.number, world.attempt, trainer.heartbeat)
            self._phases = PhaseRecord(self.run_dir, *watched)

    def close(self, end: End) -> None:
        """Close all files but the events; rows that do not fit are saved in another folder."""
        self._write()
        if self._metrics is not None:
            self._metrics.flush()
        self._look()
        if self._phases is not None:
            self._phases.close()
        if self._metrics is not None:
            self.keeping.keep_rows(METRICS, self._metrics.close_with_unwritten())
            self._metrics = None
        self.keeping.incomplete += self._logs.close(end)
        path = rank_events_path(self.run_dir, self.world.number)
        self.keeping.keep_rows(path.name, self.events.take_waiting())

    def fail(self) -> None:
        """After a failure: flush the logs, without waiting for an unread step."""
        self._logs.fail()

    def on_save(self, trainer: EngineTrainer[Any]) -> None:
        """Before a save: write all metrics up to this step."""
        self._write()
        if self._metrics is not None:
            self._metrics.flush()
        self._logs.flush()
        if self.digests is not None:
            self.digests.before_save()

    def on_evaluation(self, trainer: EngineTrainer[Any], metrics: dict[str, float]) -> None:
        """Record an evaluation on the way: the leader's, or each rank's own."""
        self._write()
        step = trainer.progress.batch_index
        if trainer.evaluation_plan.reached_at == step and self.resumed_from is None:
            self._reached_s = time.perf_counter() - self._began_at
        self._write_evaluation(trainer, metrics)

    def _write_evaluation(self, trainer: EngineTrainer[Any], metrics: dict[str, float]) -> None:
        step, best = trainer.progress.batch_index, trainer.evaluation_plan.is_best
        if self._speaks:
            self.events.event("evaluated", step=step, metrics=metrics, best=best)
        self._logs.evaluation(step, metrics)

    def on_step(self, trainer: EngineTrainer[Any], batch: Any, result: StepResult) -> None:
        """Record a step, and the one before it if that was unread, without waiting."""
        self._write()
        before, self._last_step_at = self._last_step_at, time.perf_counter()
        if self._group is not None:
            if self.world.is_leader:
                stood_s = self._last_step_at - before
                self.events.event("group", step=result.batch_index, **self._group, stood_s=stood_s)
            self._members, self._group = tuple(self._group["members"]), None
        if self._first_step:
            self._first_step = False
            total = trainer.total_steps
            self.events.event("training", step=result.batch_index, total_steps=total)
        if self._phases is not None:
            self._phases.on_step(result.batch_index)
        self._unread.append(result)
        if result.is_read:
            self._write()

    def _write(self) -> None:
        for result in self._unread:
            if self.job.elastic and result.batch_index <= self._last_row:
                continue  # its callbacks are called again, in another group
            self._write_row(row_of(result))
        self._unread.clear()
        if time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self._look()

    def _write_row(self, row: dict[str, Any]) -> None:
        """Write the row of a step, and the event of a bad one, where they are this rank's."""
        if "bad" in row and self._speaks:
            self.events.event("bad_step", **{n: row[n] for n in ("step", "bad", "culprits")})
        if self._metrics is None:
            return
        self._metrics.row(row)
        self._logs.row(row)
        self._last_row = int(row["step"])
        if self.job.elastic:  # another rank may have to go on with this file
            self._metrics.flush()

    def _look(self) -> None:
        """Whether the files of this rank are still there."""
        self._looked_at = time.monotonic()
        self.events.flush()
        for file in (self.events, *([] if self._metrics is None else [self._metrics])):
            if file.was_removed:
                file.was_removed = False
                self.keeping.removed(file.path.name)

    def samples_per_s(self, trainer: EngineTrainer[Any]) -> float | None:
        """The samples of all ranks in a second, up to the last step; every rank calls this."""
        samples = max(0, trainer.progress.samples_seen - self._seen_before)
        if self._trains_apart:  # each rank has counted its own
            samples = sum(map(int, trainer.comm.gather_texts(str(samples))))
        return samples / (self._last_step_at - self._began_at) if samples else None

    def summary(
        self, trainer: EngineTrainer[Any], evaluation: dict[str, float], sha256: str | None
    ) -> dict[str, Any]:
        """What the event `done` says of a training, whatever engine made it."""
        return {
            "world_size": trainer.job.ranks,
            "nodes": self.job.nodes,
            "strategy": self.job.strategy,
            "steps": trainer.progress.updates,
            "train_loss": trainer.progress.mean_loss,
            "eval": evaluation,
            "samples_per_s": self.samples_per_s(trainer),
            "flops_per_sample": None,
            "mfu": None,
            "weights_sha256": sha256,
            "restarts": 0,
            "groups": self.groups,
            "steps_again": trainer.steps_again,
            "micro_batch": self.job.micro_batch,
            "resumed_from_step": self.resumed_from,
            "sent_bytes": None,
            "card_bytes_per_step": None,
            "ended_early": trainer.evaluation_plan.is_over,
            "until": self._until(trainer),
            "user_randomness": trainer.built.swapped["user_randomness"],
            "user_buffers": trainer.user_buffers,
            **self.keeping.to_data(),
        }

    def _until(self, trainer: EngineTrainer[Any]) -> dict[str, Any] | None:
        """When `--until` was reached, in seconds since the first step began.

        Evaluations until then are in it. A training that was resumed does not know the seconds.
        """
        if not self.job.until:
            return None
        step = trainer.evaluation_plan.reached_at
        return {"asked": self.job.until, "step": step, "seconds": self._reached_s}
