"""Saving one training with TensorFlow and resuming it: what is saved, what must be as it was.

The trainer decides when; `checkpointer` knows how it gets to the disk and back. All of a state is
held by every rank, so a checkpoint resumes on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from allranks.checkpoint.array_snapshot import ArrayCopies, flatten
from allranks.checkpoint.checkpointer import Checkpointer, LeaderAlone, Loaded
from allranks.checkpoint.commit import Ranks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.program import program_facts
from allranks.tensorflow.build import (
    names_of,
    set_values,
    set_weights,
    streams_of,
    unique_names,
    values_of,
)
from allranks.tensorflow.strategies.base import BuiltKerasModel
from allranks.training.engine.saved_job import SavedTraining
from allranks.training.keras_task import Task

# --- state ---------------------------------------------------------------------------------------
# The state of a training as arrays by name: the variables of the model, and of its optimizer.


class KerasVariables:
    """Reads and sets the variables of what was built."""

    def __init__(self, built: BuiltKerasModel) -> None:
        self._built = built
        rate = built.optimizer._learning_rate  # the task makes it, so it stands apart
        self._kept = unique_names(v for v in built.optimizer.variables if v is not rate)
        self._streams = streams_of(built.model)

    def arrays(self) -> dict[str, Any]:
        """What a checkpoint holds of model and optimizer; the same on every rank."""
        made_rate, optimizer = self._built.made_rate, self._built.optimizer
        now = None if made_rate is None else float(optimizer.learning_rate.numpy())
        return {
            "model": values_of(names_of(self._built.model)),
            "streams": values_of(self._streams),
            "optimizer": values_of(self._kept),
            "optimizer_kind": type(optimizer).__name__,
            "rate": {"made": made_rate, "now": now},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `arrays` returned; raises `RequestError` if it is another program's.

        The learning rate goes on from where it was, unless the task now makes another one.
        """
        optimizer = self._built.optimizer
        if state["optimizer_kind"] != type(optimizer).__name__:
            raise RequestError(
                asked="to resume from a checkpoint",
                found=f"{state['optimizer_kind']} in it, {type(optimizer).__name__} in the task",
                why="what one optimizer remembers means nothing to another",
                do="resume with the program as it was, or start anew in another folder",
            )
        set_weights(self._built.model, state["model"])
        set_values(self._streams, state["streams"], "the random streams of the model")
        set_values(self._kept, state["optimizer"], "the state of the optimizer")
        rate = state["rate"]
        if rate["made"] is not None and rate["made"] == self._built.made_rate:
            optimizer.learning_rate = rate["now"]


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


class TensorFlowSaving(SavedTraining):
    """The checkpoints of one training with TensorFlow, which the leader writes.

    The first save takes the memory that all use.
    """

    deciding = DECIDES_BITS

    def __init__(
        self,
        task: Task,
        job: Job,
        comm: Ranks,
        state: KerasVariables,
        attempt: int,
        reach: Callable[[str, int], None],
        report: Callable[..., None],
    ) -> None:
        super().__init__(task, job, attempt, reach, report)
        self.comm, self.state = comm, state
        writers, own_folder = LeaderAlone(comm), self.sources[0]
        self.checkpointer = Checkpointer(own_folder, writers, ArrayCopies(), **self.rules)

    @staticmethod
    def facts(job: Job) -> dict[str, Any]:
        return facts(job)

    def save(self, step: int, other_state: dict[str, Any], metrics: dict[str, float]) -> None:
        if other := sorted(other_state.get("callbacks_of_rank") or {}):
            raise RequestError(
                asked=f"a checkpoint of the state of the callback {other[0]}",
                found="another one on each rank",
                why="a checkpoint of this engine holds what all ranks have alike",
                do="let its state_dict() return the same on all ranks",
            )
        state = {**self.state.arrays(), **other_state}
        self.checkpointer.save(step, state, None, self.about(other_state, metrics))

    def load(self, load_other_state: Callable[[dict[str, Any]], None]) -> int | None:
        def take(loaded: Loaded) -> None:
            self.state.load(loaded.common)
            load_other_state({**loaded.common, "step": loaded.step})

        return self.load_newest(self.comm.rank, take)


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
    flags = set(line.partition(":")[2].split())
    return " ".join([platform.machine(), *(name for name in INSTRUCTIONS if name in flags)])


def digest_of_state(state: Any, name: str) -> str:
    """A digest of the state of a callback; raises `RequestError` for what cannot be saved."""
    skeleton, arrays = flatten(state, f"callbacks/{name}")
    digest = hashlib.blake2b(json.dumps(skeleton).encode(), digest_size=16)
    for path, array in arrays.items():
        digest.update(f"{path} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
