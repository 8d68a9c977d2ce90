"""One rank of a job of the torch engine. Started by the launcher, by name: see `rank_program`."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import profile

import allranks.torch.accelerator as accelerator
from allranks.job.config import threads_per_rank
from allranks.job.job import Job
from allranks.job.place import Placed
from allranks.job.run_folder import JsonLines
from allranks.launcher.world import World
from allranks.strategies.cards.learners import SYNCHRONIZER
from allranks.strategies.cards.parameter_server import SCHEDULER, SERVER
from allranks.strategies.roles import EVALUATOR, LEARNER, WORKER
from allranks.torch.accelerator import peak_bytes, synchronize
from allranks.torch.elastic.learner import learn
from allranks.torch.elastic.trainer import SynchronizerTrainer
from allranks.torch.keras.task import torch_task
from allranks.torch.machine import check_devices, facts
from allranks.torch.model.placement import RecordPlacement, update_by_nothing
from allranks.torch.model.weights import WeightsFile, weights_sha256
from allranks.torch.parameter_server.scheduler import SchedulerTrainer
from allranks.torch.parameter_server.server import ServedTrainer, evaluate_checkpoints, serve
from allranks.torch.parameter_server.worker import work
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.regroup import compare, hand_over, leave, make_room, take_over
from allranks.torch.shared_memory.backend import backend_record
from allranks.torch.state_stream import StateReceiver
from allranks.torch.task import Task
from allranks.torch.trainer import Trainer
from allranks.torch.witness.digests import StateDigests
from allranks.torch.witness.replay import ReplayTrainer
from allranks.torch.witness.trace import RankTrace
from allranks.training.callback import Callback
from allranks.training.engine.regroup import Handover
from allranks.training.keras_task import Task as KerasTask
from allranks.training.progress import StepResult
from allranks.training.rank_program import RankProgram, Role
from allranks.training.record.digests import StateDigester
from allranks.training.record.logs import Keeping
from allranks.training.task_fields import task_of

# --- measuring -----------------------------------------------------------------------------------
# Measures a step in one process, and the size of the model, for `--strategy auto`.
#
# The job is one rank with the share of the batch that each rank of the real job will have. It
# trains a few steps as any job does, and discards the results.


WARM_STEPS = 2
LEAST_STEPS = 5
ENOUGH_S = 1.5


def measure_step(task: Task, job: Job) -> dict[str, Any]:
    """Seconds of the median step, what is trained, bytes of buffers, cores. Alone."""
    with Trainer(task, job) as trainer:
        model = trainer.strategy.model
        shapes = [list(p.shape) for p in model.parameters() if p.requires_grad]
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        times = [time.perf_counter()]
        for batch in trainer.batches():
            trainer.step(batch)
            trainer.settle()
            synchronize({trainer.device})
            times.append(time.perf_counter())
            measured = len(times) - 1 - WARM_STEPS
            if measured >= LEAST_STEPS and times[-1] - times[WARM_STEPS] >= ENOUGH_S:
                break
    steps = [after - before for before, after in pairwise(times)]
    measured_steps = steps[WARM_STEPS:] or steps
    return {
        "step_s": statistics.median(measured_steps),
        "steps": len(measured_steps),
        "parameters": sum(map(math.prod, shapes)),
        "shapes": shapes,
        "buffer_bytes": buffers,
        "cores": len(os.sched_getaffinity(0)),
    }


# --- profiling -----------------------------------------------------------------------------------
# `--profile`: where a few steps of rank 0 spend their time, as a Chrome trace in the run folder.
#
# torch's profiler sees the operators of this process, and the kernels of its GPU. The first steps
# are left out: they allocate, and choose kernels. What is written is read by
# https://ui.perfetto.dev, or by chrome://tracing. It changes no result; while it looks on, steps
# are slower.


AFTER, STEPS = 2, 3
PLACE = "profile/rank-000.json"


class Profiling(Callback):
    """Profiles `STEPS` steps after the first `AFTER` of this start; `tell` hears where it is."""

    def __init__(self, run_dir: Path, tell: Callable[..., None]) -> None:
        self.path, self.tell = run_dir / PLACE, tell
        self._steps = self._first = self._last = 0
        self._profile: profile | None = None

    def on_step(self, trainer: Any, batch: Any, result: StepResult) -> None:
        """A step is done, and the next one follows."""
        self._steps += 1
        self._last = trainer.progress.batch_index
        if self._steps == AFTER:
            self._profile = profile(activities=accelerator.activities(trainer.device))
            self._profile.start()
            self._first = self._last + 1
        elif self._steps == AFTER + STEPS:
            self._write()

    def on_end(self, trainer: Any) -> None:
        """A training that is shorter is profiled as far as it came."""
        self._write()

    def _write(self) -> None:
        if self._profile is None:
            return
        done, self._profile = self._profile, None
        done.stop()
        if self._last >= self._first:
            self.path.parent.mkdir(exist_ok=True)
            done.export_chrome_trace(str(self.path))
            self.tell("profiled", path=str(self.path), first=self._first, last=self._last)


# --- gauges --------------------------------------------------------------------------------------
# What the gauges of a rank's device show while it trains: an event `gauges` every few seconds.
#
# They are those that torch has for its device: how busy it is in percent, degrees Celsius, watts,
# and bytes in use by all processes. For NVIDIA torch asks the driver (NVML), through a package that
# is not always installed; what cannot be asked is `null`. A processor has none, and no event.


EVERY_S = 10.0
GAUGES = {
    "busy_percent": ("utilization", 1.0),
    "celsius": ("temperature", 1.0),
    "watts": ("power_draw", 1e-3),  # torch says milliwatts
    "used_bytes": ("device_memory_used", 1.0),
}


def gauges_of(device: torch.device) -> dict[str, float | None]:
    """What each gauge shows now; `None` where it cannot be asked. Takes about a millisecond."""
    module = accelerator.module_of(device)
    values: dict[str, float | None] = {}
    for name, (function, factor) in GAUGES.items():
        try:
            values[name] = factor * float(getattr(module, function)(device))
        except Exception:  # an observer must not end a training, and NVML has its own errors
            values[name] = None  # its backend has none, its package is missing, or it refuses
    return values


class RecordGauges(Callback):
    """Looks at the gauges after a step, if some seconds have passed; `report` writes the event."""

    def __init__(self, report: Callable[..., None], every_s: float = EVERY_S) -> None:
        self._report, self._every_s, self._last = report, every_s, 0.0
        self._shows_any = True

    def on_step(self, trainer: Any, batch: Any, result: StepResult) -> None:
        """Write the gauges if they are due; never again for a device that shows none."""
        now = time.monotonic()
        if not self._shows_any or now - self._last < self._every_s:
            return
        self._last = now
        if not accelerator.is_accelerator(trainer.device):
            self._shows_any = False
            return
        gauges = gauges_of(trainer.device)
        self._shows_any = any(value is not None for value in gauges.values())
        self._report("gauges", step=trainer.progress.batch_index, **gauges)


FLOAT64_BYTES = 8


def _load_task(job: Job) -> Task:
    """The task of a job, in torch's form if it is Keras'; raises `RequestError`."""
    seed_generators(job.seed)  # a fork inherits or reseeds them, each in another way
    task: Any = task_of(job, Task, KerasTask)
    return torch_task(task, job.precision)


def _led(job: Job) -> Job:
    """The job as a process sees it that another one leads: who leads evaluates and saves."""
    alone = dataclasses.replace(job, run_dir="", checkpoint_every=None, resume="")
    return dataclasses.replace(alone, eval_every="", early_stop="", until="", best="")


def _learn(job: Job, world: World, events: JsonLines) -> None:
    """Be a learner of `job`; its checkpoints are the synchronizer's."""
    with Trainer(_load_task(job), _led(job), world=world) as trainer:
        learn(trainer, job, world, events)


def _work(job: Job, world: World, events: JsonLines) -> None:
    """Be a worker of `job`."""
    with ServedTrainer(_load_task(job), _led(job), world=world) as trainer:
        work(trainer, job, world, events)


def _serve(job: Job, world: World, events: JsonLines) -> None:
    """Be a server of `job`."""
    with ServedTrainer(_load_task(job), _led(job), world=world) as trainer:
        serve(trainer, world, events)


def _evaluate(job: Job, world: World, events: JsonLines) -> None:
    """Evaluate the checkpoints of `job`, as one process would."""
    alone = dataclasses.replace(_led(job), strategy="single", ranks=1, nodes=1)
    with Trainer(_load_task(job), alone, world=world) as trainer:
        evaluate_checkpoints(trainer, job, world, events)


LEADERS: Mapping[str, type[Trainer]] = {
    SYNCHRONIZER: SynchronizerTrainer,
    SCHEDULER: SchedulerTrainer,
}


class TorchRank(RankProgram[Trainer]):
    """A rank that trains with torch."""

    roles: ClassVar[Mapping[str, Role]] = {
        LEARNER: _learn,
        WORKER: _work,
        SERVER: _serve,
        EVALUATOR: _evaluate,
    }
    set_threads = staticmethod(torch.set_num_threads)
    facts = staticmethod(facts)

    load_task = staticmethod(_load_task)
    make_room, take_over = staticmethod(make_room), staticmethod(take_over)
    compare = staticmethod(compare)

    @staticmethod
    def check_machine(job: Job) -> None:
        """Raise `RequestError` without a device for each rank of this node."""
        check_devices(job, job.ranks if job.nodes == 1 else 1)  # each rank looks for its own

    @staticmethod
    def weight_bytes(task: Task) -> int | None:
        """The size of the model in float64, from its shapes alone."""
        try:
            with torch.device("meta"):
                model = task.model()
        except Exception:  # it reads files, or looks at its weights
            return None
        return FLOAT64_BYTES * sum(t.numel() for t in (*model.parameters(), *model.buffers()))

    @classmethod
    def measure(cls, argument: dict[str, Any]) -> int:
        """Train a few steps alone, and write the event `measured` with what a step takes."""

        def measured(job: Job) -> dict[str, Any]:
            cls.set_threads(threads_per_rank(job, 1))
            return measure_step(cls.load_task(job), job)

        return cls._write_event(argument, "measured", measured)

    @classmethod
    def surroundings(cls, argument: dict[str, Any]) -> int:
        """Write the event `surroundings`: the facts of machine, program and data. Alone."""

        def known(job: Job) -> dict[str, Any]:
            cls.set_threads(threads_per_rank(job, 1))
            with Trainer(cls.load_task(job), job) as trainer:
                trainer.rehearse()
                return {"machine": facts(job), "data": trainer.task_data.opened_data.facts}

        return cls._write_event(argument, "surroundings", known)

    def make_trainer(self, task: Task, **more: Any) -> Trainer:
        """The trainer, with what traces it where the job asks for that."""
        kind = ReplayTrainer if self.job.last_step is not None else Trainer
        trainer = LEADERS.get(self.world.role, kind)(task, self.job, world=self.world, **more)
        if self.job.trace:
            folder = self.record.run_dir / "trace"
            trace = RankTrace(folder, self.world.rank, trainer.strategy, self.job)
            trainer.callbacks.insert(0, trace)
            trainer.job = dataclasses.replace(trainer.job, steps=trace.steps)
        return trainer

    def callbacks(self) -> list[Callback]:
        """The callbacks of the steps: the record, the placement after an update, the profiler."""
        run_dir = self.record.run_dir
        gauges = RecordGauges(self.record.events.event)
        callbacks: list[Callback] = [self.record, RecordPlacement(run_dir), gauges]
        if self.job.profile and self.world.is_leader:
            callbacks.append(Profiling(run_dir, self.record.events.event))
        return callbacks

    def placement(self, trainer: Trainer) -> Iterable[Placed]:
        """What this rank holds, with what an update has made the optimizer keep."""
        step = trainer.strategy.step
        with trainer.strategy.owned():
            update_by_nothing(step.parameters, step.optimizer, step.sparse.positions)
        return trainer.strategy.placement(updated=True)

    def save_weights(self, trainer: Trainer, keeping: Keeping) -> None:
        """`weights.safetensors`, and `average.safetensors` where there is a moving average.

        Whole weights are put together by all ranks that hold parts of them.
        """
        trainer.witness.compare_replicas()  # what differs between ranks is never saved
        self._write("weights.safetensors", trainer, keeping)
        average = trainer.strategy.step.average
        if average is not None:
            with average.in_place():
                self._write("average.safetensors", trainer, keeping)

    def _write(self, name: str, trainer: Trainer, keeping: Keeping) -> None:
        weights = trainer.weights()
        if self.world.is_leader:
            file = WeightsFile(trainer.strategy.model, trainer.strategy.layout.full_like)
            keeping.whole(name, lambda paths: file.write(paths, weights))
        for _ in weights:
            pass

    @staticmethod
    def sha256(weights: Iterator[tuple[str, Tensor]]) -> str:
        """The digest of all weights, held one at a time."""
        return weights_sha256(weights)

    def leave_group(self, trainer: Trainer, *, planned: bool) -> Handover:
        """Close the trainer; sends nothing."""
        before = hand_over(trainer)
        leave(trainer, planned=planned)
        return before

    def receiver(self, trainer: Trainer, before: Handover) -> StateReceiver:
        """What receives the state while this rank waits for its first group."""
        on = self.world, trainer.heartbeat, self.record.events.event
        return StateReceiver(trainer.strategy, before.state, *on)

    def digester(self, trainer: Trainer) -> StateDigester | None:
        """The digests of the strategy's state."""
        return StateDigests(trainer.strategy)

    def device_peak_bytes(self, trainer: Trainer) -> int | None:
        """The peak that the allocator of the rank's device has counted."""
        return peak_bytes(trainer.device)

    def figures(self, trainer: Trainer, samples_per_s: float | None) -> dict[str, Any]:
        """Figures of communication and computation, and the report of the witness."""
        dealt = trainer.strategy.dealt
        return {
            "flops_per_sample": trainer.meter.flops_per_sample,
            "mfu": trainer.meter.utilisation(samples_per_s, self.world.size),
            "sent_bytes": {kind: round(sent) for kind, sent in trainer.comm.sent_bytes.items()},
            "card_bytes_per_step": trainer.strategy.promised_bytes(),
            "model_notes": trainer.model_notes,
            "shares": None if dealt is None else list(dealt.counts),
            "backend": backend_record(trainer.comm.of_torch),
            "bitwise": self.job.bitwise,
            "witness": trainer.witness.testimony.to_data(),
            "audits": trainer.audits,
        }


describe, main, place = TorchRank.describe, TorchRank.main, TorchRank.place
measure, weigh = TorchRank.measure, TorchRank.weigh
surroundings = TorchRank.surroundings
