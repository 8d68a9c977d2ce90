"""The trainer of a replay: it ends after the job's `last_step`, and stops there to be looked at.

`allranks replay RUN --step 412 --pdb` opens Python's debugger in `stand`, whose arguments are what
there is to look at. `--before` stops when the batch is read and nothing of the step is computed,
`--after` when the step is over and all callbacks were called. `allranks bisect` has it recorded.
"""

from __future__ import annotations

import code
import importlib.util
import pdb
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allranks.catalog import load
from allranks.torch.data.batch import Batch
from allranks.torch.trainer import Trainer
from allranks.torch.witness.step_record import StepRecord
from allranks.training.progress import StepResult

SAVE = "save"  # followed by the path of the script
SAVED_STEP = "allranks.torch.witness.saved_step:SavedStep"
"""Loaded only if it is asked for: it imports the compiler of torch."""
BANNER = "step {step}, {where} it is made. There are: {names}"


class ReplayTrainer(Trainer):
    """Makes the steps of a run again, up to one of them."""

    _at: Batch | None = None
    _saved: Any = None
    _record: StepRecord | None = None

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """The batches up to that of the last step."""
        return super().batches(epochs, self.job.last_step if steps is None else steps)

    def step(self, batch: Batch) -> StepResult:
        """One step; the last one may be looked at before."""
        if batch.index + 1 == self.job.last_step:
            self._at = batch
            if self.job.look.endswith(":before"):
                self._look(batch, "before")
            kind, _, path = self.job.look.partition(":")
            if kind == SAVE:
                about = (self.job.program, self.task.shards)
                self._saved = load(SAVED_STEP)(Path(path), self.strategy.step, batch, *about)
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
        if self._saved is not None and self.last_result is not None:
            self._saved.write(self.last_result.loss)
        return super().finish()

    def _look(self, batch: Batch, where: str) -> None:
        step = self.strategy.step
        gradients = {
            name: parameter.grad
            for name, parameter in zip(step.names, step.parameters, strict=True)
            if where == "after" and parameter.grad is not None
        }
        names: dict[str, Any] = {
            "batch": batch,
            "data": [micro.data for micro in batch.micros],
            "model": self.model,
            "gradients": gradients,
            "optimizer": step.optimizer,
            "generators": {"torch": torch.default_generator, "numpy": np.random, "python": random},
            "trainer": self,
        }
        banner = BANNER.format(step=batch.index + 1, where=where, names=", ".join(names))
        if self.job.look.startswith("pdb"):
            stand(banner, **names)
        else:
            shell(banner, names)


def stand(
    banner: str,
    *,
    batch: Batch,
    data: list[Any],
    model: Any,
    gradients: dict[str, Any],
    optimizer: Any,
    generators: dict[str, Any],
    trainer: Trainer,
) -> None:
    """Stop in Python's debugger; `c` goes on. `up` and `step` lead into the loop of the training.

    `data` are the samples of each pass, `gradients` those of the update, by name.
    """
    debugger = pdb.Pdb(nosigint=True)
    debugger.message(banner)
    debugger.set_trace()


def shell(banner: str, names: dict[str, Any]) -> None:
    """Stop in IPython, or in Python's shell if it is not installed; the end of input goes on."""
    if importlib.util.find_spec("IPython") is not None:
        ipython: Any = importlib.import_module("IPython")
        ipython.embed(user_ns=names, banner1=f"{banner}\n", colors="neutral")
    else:
        code.interact(banner, local=names, exitmsg="")
