"""The trainer of a replay: it ends after the job's `last_step`, and stops there to be looked at.

`allranks replay RUN --step 412 --pdb` opens Python's debugger in `_look`, whose variables are what
there is to look at. `--before` stops when the batch is read and nothing of the step is computed,
`--after` when the step is over and all callbacks were called. `allranks bisect` has it recorded.
"""

from __future__ import annotations

import code
import importlib.util
import pdb
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allranks.catalog import load
from allranks.errors import RequestError
from allranks.torch.data.batch import Batch
from allranks.torch.trainer import Trainer
from allranks.torch.witness.step_record import StepRecord
from allranks.training.progress import StepResult

SAVE = "save"  # followed by the path of the script
SAVED_STEP = "allranks.torch.witness.saved_step:SavedStep"
"""Loaded only if it is asked for: it imports the compiler of torch."""
BANNER = "{subject}, {where} it is made. There are: {names}"


class ReplayTrainer(Trainer):
    """Makes the steps of a run again, up to one of them."""

    _at: Batch | None = None
    _saved: Any = None
    _record: StepRecord | None = None

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """The batches up to that of the last step; that one is no step if one shard is asked for.

        Raises `RequestError` if there is no such shard.
        """
        shard, last, count = self.job.only_shard, self.job.last_step, self.task.shards
        if shard is not None and shard >= count:
            raise _no_pass(shard, f"{count} shards", "they count from 0", f"0 to {count - 1}")
        if shard is not None and self.task.loss_over == "batch":
            why = "it knows the outputs of all shards"
            raise _no_pass(shard, "a loss over the whole batch", why, "leave --only-shard out")
        for batch in super().batches(epochs, last if steps is None else steps):
            if shard is None or batch.index + 1 != last:
                yield batch
            else:
                self._make_shard(batch, shard)
                break

    def _make_shard(self, batch: Batch, shard: int) -> None:
        """Make the pass of one shard alone, and look at it; there is no update.

        Its gradients are as the step would add them to those of other shards.
        """
        leaf = batch.leaves[shard]
        if not leaf.micros:
            problem = f"step {batch.index + 1}, in which it has no sample"
            why = "the batch is a short one, the last of an epoch"
            raise _no_pass(shard, problem, why, "another shard, or another step")
        start = sum(micro.samples for before in batch.leaves[:shard] for micro in before.micros)
        samples = sum(micro.samples for micro in leaf.micros)
        batch = replace(batch, leaves=(leaf,), ids=batch.ids[start : start + samples])
        self.settle()
        self._begin_look(batch)
        tally, step = self.strategy.recompute(batch), self.strategy.step
        for parameter in step.parameters:
            if parameter.grad is not None:
                parameter.grad += 0  # a step adds it to zeros: 0 + -0.0 is 0.0
        if self._saved is not None:
            loss, weight = tally.tensor[:2].tolist()
            self._saved.gradients("gradient", step.names, [p.grad for p in step.parameters])
            self._saved.write(loss / weight)
        if self.job.look.endswith(":after"):
            self._look(batch, "after")

    def _begin_look(self, batch: Batch) -> None:
        """Look at what the last step begins with, and prepare to save it."""
        if self.job.look.endswith(":before"):
            self._look(batch, "before")
        kind, _, path = self.job.look.partition(":")
        if kind == SAVE:
            about = (self.job.program, self.task.shards, self.job.only_shard)
            self._saved = load(SAVED_STEP)(Path(path), self.strategy.step, batch, *about)

    def step(self, batch: Batch) -> StepResult:
        """One step; the last one may be looked at before."""
        if batch.index + 1 == self.job.last_step:
            self._at = batch
            self._begin_look(batch)
            if self.job.look == "record":
                assert self.job.run_dir
                self._record = StepRecord(Path(self.job.run_dir), self.world.rank, self.strategy)
        result = super().step(batch)
        if self._record is not None:
            self.settle()
            self._record.end()
        return result

    def finish(self) -> bool:
        """The last step is over, and its callbacks were called."""
        if self._record is not None:
            self._record.write()
        if self._at is not None and self.job.look.endswith(":after"):
            self.settle()
            self._look(self._at, "after")
        if self._saved is not None and self._at is not None and self.last_result is not None:
            self._saved.write(self.last_result.loss)
        return super().finish()

    def _look(self, batch: Batch, where: str) -> None:
        """Stop in Python's debugger, where `c` goes on, or in a shell, with the names below.

        `data` are the samples of each pass, `gradients` those of the update, by name. `up` leads
        into the loop of the training.
        """
        trainer, step, model = self, self.strategy.step, self.model
        optimizer, data = step.optimizer, [micro.data for micro in batch.micros]
        pairs = zip(step.names, step.parameters, strict=True)
        gradients = {n: p.grad for n, p in pairs if where == "after" and p.grad is not None}
        generators = {"torch": torch.default_generator, "numpy": np.random, "python": random}
        names: dict[str, Any] = {
            **{"batch": batch, "data": data, "model": model, "gradients": gradients},
            **{"optimizer": optimizer, "generators": generators, "trainer": trainer},
        }
        shard, number = self.job.only_shard, batch.index + 1
        subject = f"step {number}" if shard is None else f"shard {shard} of step {number}"
        banner = BANNER.format(subject=subject, where=where, names=", ".join(names))
        if self.job.look.startswith("pdb"):
            debugger = pdb.Pdb(nosigint=True)
            debugger.message(banner)
            debugger.set_trace()
        else:
            shell(banner, names)


def _no_pass(shard: int, problem: str, why: str, do: str) -> RequestError:
    return RequestError(asked=f"--only-shard {shard}", found=problem, why=why, do=do)


def shell(banner: str, names: dict[str, Any]) -> None:
    """Stop in IPython, or in Python's shell if it is not installed; the end of input goes on."""
    if importlib.util.find_spec("IPython") is not None:
        ipython: Any = importlib.import_module("IPython")
        ipython.embed(user_ns=names, banner1=f"{banner}\n", colors="neutral")
    else:
        code.interact(banner, local=names, exitmsg="")
