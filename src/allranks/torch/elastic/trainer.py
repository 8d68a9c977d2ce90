"""The trainer of the synchronizer: the usual loop, in which a step is a merge.

Threads answer learners (`service`) from the first call of `calls` on. This thread records merges,
evaluates and saves, while learners go on: it evaluates a copy of the global weights. Progress is
counted in steps of the job, by samples: N chunks of `every` steps are `every` steps. A merge makes
several of them, so an evaluation or a checkpoint follows the first merge that reaches its step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from allranks.launcher.messages import listen
from allranks.strategies.shards import even_sizes, owned_shards
from allranks.torch.elastic.merge import Merged, Merging
from allranks.torch.elastic.service import LearnerService, owes
from allranks.torch.elastic.strategy import Decoupled, FlatModel
from allranks.torch.local_sgd.global_weights import Nesterov
from allranks.torch.trainer import Trainer
from allranks.training.progress import Progress, RankRequests, StepResult
from allranks.training.work_queue import Chunk, Ledger

LOOK_S = 0.2
INNER_S = 20.0
"""How long a checkpoint waits for the inner optimizers; learners do not wait for it."""


class SynchronizerTrainer(Trainer):
    """The leader of a job of learners. It makes no step itself."""

    strategy: Decoupled
    service: LearnerService | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.strategy.learners = self.job.ranks
        self._report = more.get("report") or (lambda event, **values: None)
        self._evaluated_at = self._saved_at = 0
        self._is_saving = False

    # --- the loop -------------------------------------------------------------------------

    def calls(self) -> Iterator[list[Any]]:
        """The merges, until all samples are in the weights."""
        service = self._start_service()
        self._evaluated_at = self._saved_at = self.progress.batch_index
        self.heartbeat.at_step(self.progress.batch_index)
        self.heartbeat.enter("exchange")  # once: to wait and wait is no sign of life
        while not self.evaluation_plan.is_over:
            merges = service.merges(LOOK_S)
            for merged in merges:
                self.heartbeat.collective()
                yield [merged]
                self.heartbeat.enter("exchange")
            if not merges and service.is_done:
                break
        service.is_over = True
        replies = service.sent_bytes()
        self.comm.sent_bytes.update({"gradients": replies["sent"], "control": replies["control"]})

    def steps(self, batches: list[Any]) -> list[StepResult]:
        """The result of each merge: the mean loss of its samples, and the progress of the job."""
        return [self._count_merge(merged) for merged in batches]

    def _count_merge(self, merged: Merged) -> StepResult:
        self.heartbeat.at_step(merged.steps)
        steps = range(self.progress.batch_index, merged.steps)
        for step in steps:
            self.faults.reach("step", step)
        requests = RankRequests.of(self.heartbeat.wants_stop, self.heartbeat.wants_save())
        done, per_epoch = self.progress, self._per_epoch
        epoch = max(0, merged.steps - 1) // per_epoch
        result = StepResult(
            batch_index=max(0, merged.steps - 1),
            epoch=epoch,
            loss=merged.loss / merged.weight if merged.weight else float("nan"),
            samples=merged.samples,
            weight=merged.weight,
            learning_rate=merged.rate,
            updated=True,
            asked=requests,
        )
        known = (done.loss_sum, done.weight_sum) if epoch == done.epoch else (0.0, 0.0)
        self.progress = Progress(
            epoch,
            merged.steps - epoch * per_epoch,
            merged.steps,
            done.samples_seen + merged.samples,
            merged.steps,
            known[0] + merged.loss,
            known[1] + merged.weight,
        )
        for step in steps:
            self.faults.reach("stepped", step)
        return result

    @property
    def _per_epoch(self) -> int:
        """Steps of an epoch; raises `RequestError` for data that is read in one order only."""
        return self.task_data.batches.steps_by_number(self.strategy.name)

    def _start_service(self) -> LearnerService:
        """Start the service, with the resumed state, if any."""
        flat, options = FlatModel(self.strategy.model), self.job.strategy_spec.options
        per_epoch, done = self._per_epoch, self.progress
        steps = self.job.steps
        steps = per_epoch * self.task.epochs if steps is None else steps
        ledger = Ledger(steps, options["every"], self.job.ranks, done.batch_index)
        outer = Nesterov(options["lr"], options["momentum"])
        quorum = options["quorum"] or self.strategy.learners
        parts = flat.fragments(min(options["fragments"], max(1, flat.parameters)))
        merging = Merging(flat.read(), flat.parameters, outer, ledger, quorum, parts)
        if self.strategy.merged is not None:
            merging.load_state(self.strategy.merged)
        self._flat = flat
        listener, secret = listen(self.world), self.world.secret
        grace_s, report = options["grace_s"], self._report
        self.service = LearnerService(
            *(merging, flat, listener, secret, grace_s, report),
            samples_of=partial(self._samples_of, ledger),
            keeps=options["inner"] == "kept",
        )
        inner = (self.strategy.merged or {}).get("inner", {})
        self.service.inner = {k: (saved["chunk"], saved["state"]) for k, saved in inner.items()}
        self.service.resumed = set(inner)
        merging.owing = {k for k in inner if k < self.job.ranks and owes(inner[k]["state"])}
        self.service.start()
        self._resources.callback(self.service.close)
        return self.service

    def _samples_of(self, ledger: Ledger, chunk: Chunk) -> int:
        """The number of samples in a chunk."""
        batches, per_epoch = self.task_data.batches, self._per_epoch
        shards = owned_shards(batches.cutting.shards, ledger.parts, chunk.part)
        samples = 0
        for step in range(chunk.first, chunk.first + chunk.steps):
            remaining = len(batches.source) - step % per_epoch * batches.batch_size  # type: ignore[arg-type]
            sizes = even_sizes(min(remaining, batches.batch_size), batches.cutting.shards)
            samples += sum(sizes[shard] for shard in shards)
        return samples

    # --- between the merges ---------------------------------------------------------------

    def evaluate_if_due(self) -> dict[str, float] | None:
        """The metrics, at the first merge after each step at which the job asks for them."""
        self._called.add("evaluate_if_due")
        every, done = self.job.eval_every, self.progress.batch_index
        if not every:
            return None
        period = self._per_epoch if every == "epoch" else int(every)
        if done // period == self._evaluated_at // period:
            return None
        self._evaluated_at = done
        metrics = self.evaluate()
        self.evaluation_plan.take(metrics, self.progress)
        return metrics

    def save_if_due(self, result: StepResult) -> bool:
        """Save at the first merge after each step at which the job asks for it."""
        self._called.add("save_if_due")
        every, done = self.job.checkpoint_every, self.progress.batch_index
        due = every is not None and done // every != self._saved_at // every
        wanted = result.asked.save or self.evaluation_plan.wants_save(self.progress)
        if due or wanted or result.asked.stop:
            self._saved_at = done
            self.save(wait=result.asked.stop, evaluate=not result.asked.stop)
        return result.asked.stop

    def evaluate(self, data: Any = None) -> dict[str, float]:
        self._load_weights()
        return super().evaluate(data)

    def save(self, *, wait: bool = True, evaluate: bool = True) -> bool:
        """Save the weights, the ledger and the learners' optimizers, consistent with each other.

        Learners go on meanwhile.
        """
        self._load_weights(asks=True)
        merged = self.strategy.merged
        if self.service is not None and merged is not None:
            merged["inner"] = self.service.collect(merged, INNER_S)
        self._is_saving = True
        try:
            return super().save(wait=wait, evaluate=evaluate)
        finally:
            self._is_saving = False

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self._load_weights()
        return super().weights()

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        self._load_weights()
        with super().whole_model() as model:
            yield model

    def state(self) -> dict[str, Any]:
        self._load_weights()
        return super().state()

    def _load_weights(self, *, asks: bool = False) -> None:
        """Load the newest version into the model, with the state to save."""
        if self.service is None or self._is_saving:
            return
        numbers, state = self.service.snapshot(asks=asks)
        self._flat.write(numbers)
        self.strategy.merged = state
        steps = self.service.merging.ledger.steps_done
        if steps > self.progress.batch_index:
            per_epoch = self._per_epoch
            epoch = (steps - 1) // per_epoch
            where = {"epoch": epoch, "step_in_epoch": steps - epoch * per_epoch}
            self.progress = dataclasses.replace(
                self.progress,
                batch_index=steps,
                updates=steps,
                samples_seen=state["samples"],
                **where,
            )

    def close(self, *, failed: bool = False) -> None:
        if self.service is not None:
            self.service.is_over = True
        super().close(failed=failed)
