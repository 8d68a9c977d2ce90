"""Saving one training with TensorFlow and going on with it: what is saved, what must be as it was.

The trainer decides when; `checkpointer` knows how it gets to the disk and back. All of a state is
held by every rank, so a checkpoint goes on under any number of ranks.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from allranks.checkpoint.array_snapshot import ArrayCopies
from allranks.checkpoint.checkpointer import Checkpointer
from allranks.checkpoint.writers import LeaderAlone
from allranks.job.job import Job
from allranks.job.loaded import program_facts
from allranks.tensorflow.comm import Comm
from allranks.tensorflow.state import State
from allranks.training.keras_task import Task
from allranks.training.resume_checks import (
    about_of,
    changes_since,
    check_not_asked_for,
    sources_for,
)

DECIDES_BITS = ("tensorflow", "keras", "instructions", "threads", "device")
INSTRUCTIONS = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "sve",
)
"""Of a processor, those that TensorFlow chooses its kernels by."""


class Saving:
    """The checkpoints of one training, in the run folder of its job. Every rank makes one."""

    def __init__(
        self,
        task: Task,
        job: Job,
        comm: Comm,
        state: State,
        attempt: int,
        reach: Callable[[str, int], None],
        report: Callable[..., None],
    ) -> None:
        self.task, self.job, self.comm, self.state = task, job, comm, state
        self.report = report
        self.checkpointer = Checkpointer(
            sources_for(job)[0],
            LeaderAlone(comm),
            ArrayCopies(),
            keep=job.keep,
            best=job.best,
            attempt=attempt,
            reach=reach,
            report=report,
        )

    def save(self, step: int, rest: dict[str, Any], metrics: dict[str, float]) -> None:
        """Save the variables and the `rest` of the training; a thread of the leader goes on."""
        about = about_of(self.task, self.job, rest["progress"], facts(self.job), metrics)
        self.checkpointer.save(step, {**self.state.arrays(), **rest}, None, about)

    def prepare(self, rest: dict[str, Any]) -> None:
        """Nothing: the first save takes the memory that all use."""

    def load(self) -> dict[str, Any] | None:
        """Take up the newest good checkpoint; returns its state with its `step`, `None` without one.

        That of this run folder if it has one, else that of `job.resume`. Raises `RequestError` if
        the job is another one.
        """
        loaded = self.checkpointer.load(sources_for(self.job))
        if loaded is None:
            check_not_asked_for(self.job)
            return None
        changes = changes_since(loaded, self.task, self.job, facts(self.job), DECIDES_BITS)
        if self.comm.rank == 0:
            self.report(
                "resumed",
                step=loaded.step,
                path=str(loaded.path),
                ranks_were=loaded.manifest.ranks,
                changes=changes.job,
                differs=changes.facts,
                random_streams_restored="random" in loaded.common,
            )
        self.state.load(loaded.common)
        return {**loaded.common, "step": loaded.step}


def facts(job: Job) -> dict[str, Any]:
    """What decides which bits come out, beside the job; recorded with every checkpoint."""
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "instructions": instructions(),
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "device": job.device,
        **program_facts(job.program),
    }


def instructions() -> str:
    """The instructions of this processor that matter, as one text."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    line = next((x for x in text.splitlines() if x.lower().startswith(("flags", "features"))), "")
    found = set(line.partition(":")[2].split())
    return " ".join([platform.machine(), *(name for name in INSTRUCTIONS if name in found)])
