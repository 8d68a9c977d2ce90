"""The trainer: one training of a task, on the ranks of this job, step by step.

`allranks train` is the short loop `fit` over it; a custom loop in a script or a notebook uses the
same object, and can do all that the command does:

    with Trainer(task) as trainer:
        for batch in trainer.batches():
            result = trainer.step(batch)
        print(trainer.evaluate())
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.checkpoint.commit import Alone
from allranks.checkpoint.format import nothing
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.launcher.world import Visible, World, tasks_not_started
from allranks.strategies.audits import check_audit
from allranks.torch.batchnorm.across_ranks import whole_norm
from allranks.torch.build import BuiltModel, build_model, build_strategy, job_for, whole_copy
from allranks.torch.checkpoint.saving import Saving, contents_of, digest_of_state
from allranks.torch.checkpoint.spare import LiveParts, SpareState
from allranks.torch.checkpoint.state import copied, random_streams, set_random_streams
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.join import join
from allranks.torch.comm.rank_sync import AT_THE_END, EVALUATE, WHOLE_MODEL
from allranks.torch.data.batch import Batch
from allranks.torch.data.dealing import Dealer
from allranks.torch.data.evaluate import evaluating
from allranks.torch.data.task_data import TaskData
from allranks.torch.keras.task import torch_task
from allranks.torch.limits import check_limits
from allranks.torch.machine import device_of, flip_one_bit, notes_on_sharing, notes_on_torch
from allranks.torch.model.activation_checkpointing import CACHE_IS_OFF, with_caches
from allranks.torch.model.compiling import compile_passes
from allranks.torch.model.flops import FlopsMeter, peak_of
from allranks.torch.model.initialising import initialise
from allranks.torch.model.layers import Scope
from allranks.torch.model.placement import notes_on
from allranks.torch.model.precision import explain, explaining, set_kernels
from allranks.torch.optimizers.made import with_recipe
from allranks.torch.shared_memory.backend import notes_on_backend
from allranks.torch.state_stream import StateSender
from allranks.torch.step.bad_step import guard_of
from allranks.torch.step.deferred_results import notes_on_update
from allranks.torch.step.in_flight import steps_of
from allranks.torch.step.trainable import check_no_scheduler
from allranks.torch.step.user_buffers import written_in_forward
from allranks.torch.task import Task, task_of_parts
from allranks.torch.witness.audit import Auditor, flipper, with_wrong_samples
from allranks.torch.witness.replicas import verify
from allranks.torch.witness.witness import Witness, say_what_matters
from allranks.training.callback import Callback, around_evaluation
from allranks.training.engine.regroup import Handover, Spare
from allranks.training.engine.saved_job import CallbackStates
from allranks.training.engine.trainer import (
    EngineTrainer,
    StopAgreement,
    scheduled_steps,
    warn_ignored,
)
from allranks.training.keras_task import Task as KerasTask
from allranks.training.progress import Progress, RankRequests, StepResult
from allranks.training.schedules import schedule_of
from allranks.training.task_fields import check_task

NO_CONTEXT = nullcontext()

# --- loop ----------------------------------------------------------------------------------------
# What goes wrong in a loop of one's own over a `Trainer`, and what there is to say then.


def check_own_loop(job: Job, ranks: int) -> None:
    """Raise `RequestError` for what only `allranks train` and `launch` do with a job."""
    if job.ranks not in (1, ranks):
        raise RequestError(
            asked=f"Trainer(task, Job(ranks={job.ranks}))",
            found=f"{ranks} rank{'s' * (ranks > 1)} (WORLD_SIZE)",
            why="a Trainer is one rank: it joins those that were started, and starts none",
            do=f"torchrun --nproc-per-node {job.ranks} SCRIPT, or "
            f"allranks.launch(task, ranks={job.ranks})",
        )
    refused = {
        "devices": (
            "which devices a process sees is decided before it is started, by its launcher",
            f"{Visible.VARIABLE}={job.devices} python SCRIPT, or "
            f"allranks.launch(task, devices={job.devices!r})",
        ),
        "micro_batch_trial": (
            "the trial starts all ranks again, which their launcher does",
            'Job(micro_batch=16), or allranks.launch(task, micro_batch="auto")',
        ),
        "elastic": (
            "another group of ranks has another trainer, which the loop of allranks makes",
            f"allranks.launch(task, elastic={job.elastic!r})",
        ),
        "log": (
            "these files are written by the loop of `allranks train` and allranks.launch",
            "write what step(batch) returns, on the leader: trainer.world.is_leader",
        ),
    }
    for option, (why, do) in refused.items():
        if value := getattr(job, option):
            raise RequestError(
                asked=f"Trainer(task, Job({option}={value!r}))",
                found="a loop of one's own",
                why=why,
                do=do,
            )


def tell_alone() -> None:
    """Warn of a process that trains alone in a job of Slurm which asked for several tasks."""
    if (tasks := tasks_not_started(os.environ)) > 1:
        warnings.warn(
            f"this process trains alone, and this job of Slurm asked for {tasks} tasks: "
            "`srun python SCRIPT` starts one process for each",
            stacklevel=3,
        )


def no_batch(value: Any) -> RequestError:
    """The error for a batch that does not come from `trainer.batches()`."""
    return RequestError(
        asked="step(batch)",
        found=f"a {type(value).__name__} for a batch",
        why="which samples a step uses, and which rank has which of them, is decided by the engine",
        do="for batch in trainer.batches(): trainer.step(batch); "
        "the data is what train_data() gives",
    )


# --- resources -----------------------------------------------------------------------------------
# The resources of a training in its process: groups, threads, swapped layers, switches.


class ResourceStack(ExitStack):
    """Releases resources in reverse order, all of them, even if one of them raises.

    `has_failed` says whether this rank has, and then waits for no other.
    """

    has_failed = False

    def on_leave(self, leave: Callable[..., None]) -> None:
        """Call `leave(failed=…)` at the end, for a resource that is shared with other ranks."""
        self.push(lambda kind, error, tb: leave(failed=self.has_failed or error is not None))


class Trainer(EngineTrainer[Batch]):
    """Trains `task` as `job` says, on the ranks that the environment describes (or `world`).

    Every rank makes one and calls the same methods in the same order. The constructor joins the
    ranks, builds the model and broadcasts it once. Raises `RequestError` if the job cannot be
    trained. `report(event, **values)` is called for checkpoints, also from another thread, and for
    findings of the witness. `fit` calls `callbacks` before those of the task.
    """

    task: Task
    comm: Comm
    built: BuiltModel
    task_data: TaskData
    _saving: Saving | None = None
    _dealer: Dealer | None = None
    _auditor: Auditor | None = None
    stream: StateSender | None = None

    def __init__(
        self,
        task: Task | KerasTask,
        job: Job | None = None,
        *,
        world: World | None = None,
        report: Callable[..., None] = say_what_matters,
        callbacks: Sequence[Callback] = (),
        before: Handover | None = None,
    ) -> None:
        self.world = World.from_environment() if world is None else world
        if world is None:
            tell_alone()
        if world is None and job is not None:
            check_own_loop(job, self.world.size)
        job = job_for(job or Job(), self.world)
        if world is None and job.audit:
            check_audit(job.audit, job.audit_every, job.strategy_spec, job.elastic)
        check_task(task, type(task).__name__)
        self.task = task = with_recipe(torch_task(task, job.precision), job)
        self.device = device_of(job, self.world)
        super().__init__(task, job, self.world, callbacks, before)
        self._before = before
        self.meter = FlopsMeter(job, peak_of(job, self.device))
        self._resources = ResourceStack()
        try:
            self._set_up(report)
        except BaseException as error:
            if hasattr(self, "comm"):  # it has joined the others
                self.comm.add_reason_of_loss(error)
            self._resources.has_failed = True
            self._resources.close()
            raise
        self._before = None
        if job.elastic and not self.strategy.agreement.cuts_state:
            self.stream = StateSender(self.strategy, self.world, self.heartbeat, report)
            self._resources.callback(self.stream.close)

    @classmethod
    def from_parts(
        cls,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Optimizer],
        *,
        loss: Callable[[Any, Any], Tensor],
        train_data: Any,
        job: Job | None = None,
        **fields: Any,
    ) -> Self:
        """Create a trainer from an existing model; `fields` are those of `Task`.

        `loss(output, batch)` returns one value per sample; `make_optimizer(model)` the optimizer.
        """
        return cls(task_of_parts(model, make_optimizer, loss, train_data, fields), job)

    # --- the loop -------------------------------------------------------------------------

    def _next_batch(self, upcoming: Iterator[Batch]) -> Batch | None:
        if self._dealer is not None:
            self._dealer.before_batch(self.task_data, self.progress)
        if self.spare is not None and self.comm.size > 1:
            self.refresh_spare()
        if self.stream is not None:
            self.stream.after_step(self.progress.batch_index)
        if not self.witness.observes:
            return next(upcoming, None)
        self.witness.before_reading(self.task_data.batches)
        batch = next(upcoming, None)
        self.witness.after_reading(self.task_data.batches)
        return batch

    def _end_batches(self) -> None:
        self.settle()
        if self.strategy.finish():
            self.evaluation_plan.forget()

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on one global batch; all ranks call this.

        The card of the strategy says what is communicated.
        """
        if not isinstance(batch, Batch):
            raise no_batch(batch)
        self.heartbeat.at_step(batch.index)
        self.heartbeat.enter("compute")
        if self.faults.faults:
            self.faults.reach("step", batch.index, batch.own_samples)
            if self.faults.wrong_samples:
                batch = with_wrong_samples(batch)
        step, steps, witness = self.strategy.step, self._steps, self.witness
        if not steps.progress.batch_index and self.task.overrides("initialise"):
            with explaining(step.precision):
                initialise(self.strategy, batch)
        step.requests = RankRequests.of(self.heartbeat.wants_stop, self.heartbeat.wants_save())
        if self._saving is not None and step.rates.are_set_by_others():
            self._saving.look_at_rates()
        is_witnessed = witness.observes or batch.index % witness.every == 0
        if is_witnessed:
            witness.before_step(batch, self.task_data.opened, self.settle)
        is_audited = self._auditor is not None and batch.audited is not None
        if self._auditor is not None and is_audited:
            self.settle()
            self._auditor.before_step(batch, self.task_data.opened)
        try:
            with self.meter.watching(batch.own_samples) if self.meter.waits else NO_CONTEXT:
                result = steps.make(batch, ahead=not (witness.observes or is_audited))
        except RuntimeError as error:
            explain(error, step.precision)
            raise
        if len(step.user_buffers.written) != len(self.user_buffers):
            self.user_buffers = sorted(step.user_buffers.written)
            if self.job.bitwise:
                raise written_in_forward(self.user_buffers)
        if batch.sizes is None and not result.taken:  # a stream has ended, on all ranks alike
            self.task_data.batches.exhausted = True
            steps.progress = steps.progress.at_epoch(steps.progress.epoch + 1)
            return result
        steps.progress = done = steps.progress.after(result, batch.epoch, batch.step_in_epoch)
        self.last_result, self.unheard, self.callbacks_called = result, (batch, result), 0
        if self._dealer is not None:
            self._dealer.after_step(done)
        if is_witnessed:
            witness.after_step()
        every = self.job.verify_every
        if every is not None and done.batch_index % every == 0:
            verify(self.strategy.learner)
        if self.faults.faults:
            self.faults.reach("stepped", batch.index)
        return result

    @property
    def audits(self) -> dict[str, int] | None:
        """Counts of shards that were computed again, every so many steps; `None` without."""
        auditor, every = self._auditor, self.task_data.audit_every
        return None if auditor is None else {**auditor.counts, "every": every}

    def largest_pass(self, batch: Batch) -> int:
        """The samples of the largest pass of this rank through the model for `batch`."""
        return max(micro.samples for micro in batch.to_read)

    def smaller_micro_batch(self, batch: Batch) -> int | None:
        """As in `EngineTrainer`; also `None` if a layer needs whole shards, as BatchNorm does."""
        smaller = super().smaller_micro_batch(batch)
        try:
            check_limits(self.task, replace(self.job, micro_batch=smaller), self.strategy)
        except RequestError:
            return None
        return smaller

    @property
    def progress(self) -> Progress:
        """How far the training is; reading the numbers of an unread step waits for them."""
        return self._steps.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self._steps.progress = progress

    def settle(self) -> None:
        """Read the unread step: afterwards the weights are those of the last step.

        Every rank calls this. Does nothing on a CPU.
        """
        self._steps.settle()

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """The metrics over `data` (the task's own if `None`), exact; every rank calls this."""
        before = self.heartbeat.enter("evaluate")
        self.faults.reach("evaluate")
        self.settle()
        if self.strategy.agreement.is_one_training:
            self.comm.meet(EVALUATE)
        precision = self.strategy.step.precision
        with around_evaluation(self), self.strategy.evaluated_weights(), explaining(precision):
            metrics = self.task_data.evaluate(data)
        self.heartbeat.enter(before)
        return metrics

    def rehearse(self) -> None:
        """Open the data and evaluate a few samples, so that errors show before the first update."""
        before = self.heartbeat.enter("data")
        with explaining(self.strategy.step.precision):
            self.task_data.rehearse()
        self.heartbeat.enter(before)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, whole, by name in sorted order; every rank calls this.

        Of an optimizer with two modes they are copies of those that it evaluates.
        """
        self.settle()
        if self.strategy.two_modes is None:
            return self.strategy.full_state()
        return self._evaluated_weights()

    def _evaluated_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.strategy.evaluated_weights():
            for name, tensor in self.strategy.full_state():
                yield name, tensor.clone()

    @property
    def model(self) -> nn.Module:
        """The model as this rank trains it: this rank's part where ranks hold parts of it."""
        return self.strategy.model

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """The whole model in evaluation mode, with the weights that an evaluation has.

        Every rank enters this, and leaves it before the next step; within, each may use the model
        by itself (`generate`, `save_pretrained`). Where every rank has all weights this is the
        model that trains, and no weight is sent. Where ranks hold parts (`fsdp`, `hsdp`, `tensor`,
        `expert`, `branches`, pipelines, `mesh`) each rank calls `model()` of the task and fills the
        result with all weights, which are gathered one by one: it needs memory for a whole model,
        and what is written into it changes no training.
        """
        before = self.heartbeat.enter("evaluate")
        self.settle()
        strategy, size = self.strategy, self.comm.size
        if strategy.agreement.is_one_training:
            self.comm.meet(WHOLE_MODEL)
        is_cut = strategy.agreement.weights in ("sharded", "staged") and size > 1
        with ExitStack() as stack:
            stack.enter_context(strategy.evaluated_weights())
            model = strategy.model
            if is_cut or self._scope.served:
                weights, on = strategy.full_state(), strategy.context.precision
                model = whole_copy(self.task, self.job, self.built, weights, on)
                stack.close()  # the model that trains has its own weights again
            stack.enter_context(with_caches(self.built.caching))
            stack.enter_context(evaluating(self.task, model))
            yield model
        self.heartbeat.enter(before)

    def state(self) -> dict[str, Any]:
        """All that the rest depends on: weights, optimizer, progress; every rank calls this."""
        check_no_scheduler(self.strategy.step.optimizer, "the state of a training")
        self.settle()
        state = {"strategy": self.strategy.state(), "own": self.strategy.own_state()}
        random = {"ranks": self.comm.size, **random_streams(self.device)}
        return {**copied(state), "random": random, **copied(self._other_state())}

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state` returned, on any number of ranks; all call this."""
        _ = self.task_data.batches
        self._steps.begin_anew()
        self.strategy.load_state(copied(state["strategy"]))
        self._load_other_state(state)
        if state["random"]["ranks"] == self.comm.size:
            set_random_streams(state["random"], self.device)
            self.strategy.load_own_state(state.get("own", {}))

    @property
    def spare(self) -> SpareState | None:
        """The copies of parts of the state in memory, with `--spare-state`."""
        return None if self._saving is None else self._saving.spare

    def refresh_spare(self) -> None:
        """Copy the state as it is now between the ranks, unless all have it; all call this."""
        spare, step, group = self.spare, self.progress.batch_index, self.world.group
        if self._saving is None or spare is None or spare.is_at(step, group):
            return
        self.settle()
        before = self.heartbeat.enter("save")
        self._saving.refresh_spare(self.world.number, group, step, self._other_state())
        self.heartbeat.enter(before)

    def load_spare(self, spare: Spare, live: LiveParts | None) -> None:
        """Resume from what the ranks have in memory, as from a checkpoint; all call this."""
        before = self.heartbeat.enter("save")
        assert self._saving is not None
        self._saving.load_spare(spare, live, self._load_other_state)
        self.heartbeat.enter(before)

    @property
    def shard_seconds(self) -> float:
        """What a shard took this rank lately, with `--share auto`; 0 if that was not measured."""
        return 0.0 if self._dealer is None else self._dealer.seconds

    @property
    def saving(self) -> Saving | None:
        """What saves checkpoints; `None` without a run folder."""
        return self._saving

    def callback_states(self) -> dict[str, Any]:
        """The states of the callbacks of this rank. No communication."""
        return self._callback_states.of_this_rank()

    def load_group_state(self, state: dict[str, Any], *, with_callbacks: bool) -> None:
        """Load a state of this group (`regroup`), which this rank may hold itself."""
        self._steps.begin_anew()
        self.strategy.load_state(state["strategy"])
        self.load_course(state)
        if with_callbacks:
            self._callback_states.load_state(state)
            self._callback_states.begin()  # those of an evaluation may follow at once

    def _other_state(self) -> dict[str, Any]:
        return {**super()._other_state(), **self.task_data.streams(self.progress)}

    def _load_other_state(self, state: dict[str, Any]) -> None:
        super()._load_other_state(state)
        self.task_data.load_streams(self.progress, state.get("streams") or None)

    def close(self, *, failed: bool = False) -> None:
        """Leave the other ranks, and give model and process back as they were.

        A rank that has `failed` waits for no other: they stand in a collective for it.
        """
        self._resources.has_failed = failed
        self._resources.close()

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        failed = True
        self.comm.add_reason_of_loss(error)
        try:
            if error is None:
                self.settle()
                warn_ignored(self.job, self._called, self.progress)
                if not self._came_to_an_end:
                    self.comm.leave_barrier()
                elif self.strategy.agreement.lockstep:
                    self.comm.meet(AT_THE_END)
                failed = False
        finally:
            self.close(failed=failed)

    # --- how it is put together -----------------------------------------------------------

    def _set_up(self, report: Callable[..., None]) -> None:
        """Join the ranks, and set up the training; resources are released in reverse order."""
        resources, task, job = self._resources, self.task, self.job
        resources.callback(set_kernels(job))
        self.comm = join(
            self.world,
            self.device,
            self.heartbeat,
            job.backend,
            share_device=job.share_device,
            glance=(lambda: self.look_at_group(self.heartbeat.step)) if job.elastic else None,
        )
        resources.on_leave(self.comm.leave)
        self._scope = Scope(job.seed, self.device)
        self.strategy = build_strategy(task, job, self.comm, self._scope)
        resources.on_leave(self.strategy.leave)
        self.built = self._place_model()
        step, plan = self.strategy.step, self.evaluation_plan
        written = task.as_written.schedule
        step.rates.schedule = schedule_of(written, partial(scheduled_steps, self))
        if task.overrides("plateau"):
            step.rates.factor = lambda: plan.rate_factor
        if job.share:
            seconds = 0.0 if self._before is None else self._before.shard_seconds
            of_job = self.strategy, job, self.heartbeat
            self._dealer = Dealer(*of_job, self.world.number, report, seconds)
        self._steps = steps_of(self.strategy, job)
        check_limits(task, job, self.strategy)
        if whole := whole_norm(task, self.strategy.data, self._scope, self.built.swapped):
            resources.on_leave(whole.leave)
        self.model_notes = notes_on(self.strategy.model, task) + list(task.notes)
        self.model_notes += [CACHE_IS_OFF] * bool(self.built.caching)
        self.model_notes += notes_on_backend(self.comm.of_torch, job.backend) + notes_on_torch()
        self.model_notes += notes_on_update(step.optimizer, self.device)
        self.model_notes += notes_on_sharing(job)
        self.guard = guard_of(self.strategy.learner, job, self.world.rank)
        self.faults.corrupt = lambda: flip_one_bit(step.parameters[0])
        self.faults.leave_out = self.comm.skip_next_collective
        self.faults.poison = step.poison_next
        self.faults.flip = flipper(self.strategy)
        opened = None if self._before is None else self._before.data
        self.task_data = TaskData(task, job, self.strategy, opened)
        resources.callback(self.task_data.close)
        self.witness = Witness(self.strategy.learner, job, report, self.world)
        self._watch = self.witness
        if job.audit:
            self._auditor = Auditor(self.strategy, job, report, self.world.number)
            self.model_notes += self._auditor.notes
        if job.run_dir:
            self._saving = self._open_saving(report)
            resources.on_leave(self._saving.checkpointer.close)
        self._ending = StopAgreement(self.comm, self.strategy.agreement.lockstep)
        self._loss_scale = step.loss_scale
        kept_by = partial(contents_of, model=self.strategy.model)
        ranks = self.comm if self.strategy.agreement.is_one_training else Alone(self.comm.rank)
        self._callback_states = CallbackStates(
            self.callbacks, ranks, digest_of_state, kept_by, report
        )

    def _open_saving(self, report: Callable[..., None]) -> Saving:
        """What saves checkpoints, with the copies in memory that a group before has made."""
        reach = self.faults.reach if self.faults.faults else nothing
        spare = SpareState() if self.job.spare_state else None
        spare = spare if self._before is None else self._before.spare
        of_job = self.task, self.job, self.strategy, self.world.attempt
        return Saving(*of_job, reach, report, spare)

    def _place_model(self) -> BuiltModel:
        """Build the model, and set the strategy up; in a later group with those of the last one."""
        before: BuiltModel | None = None if self._before is None else self._before.built
        optimizer = None if self._before is None else self._before.optimizer
        on_close = self._resources.callback
        built = build_model(
            self.task, self.job, self._scope, self.strategy, self.world, on_close, before
        )
        self.strategy.compares_groups = self.world.group == 0  # a new rank's are as they were made
        make = self.task.optimizer if optimizer is None else lambda model: optimizer[0].optimizer
        self.strategy.setup(built.model, make)
        if optimizer is not None:
            self.strategy.step.rates, self.strategy.initial_set = optimizer
        on_close(self.strategy.close)
        if self.job.compile:
            on_close(compile_passes(self.task, self.job, self.strategy))
        return built
