"""The trace of a training: everything that two runs can differ in, step by step, for `check`.

    trace/rank-RRR.jsonl              samples, loss, weight, rate; a digest of every tensor
    trace/tensors/step-SSSSSSSS.safetensors    the tensors themselves, written by the leader
    trace/tensors/rank-RRR/step-…     those of other ranks, of the step that the job's `parts_of` is
    trace/parts/step-…                what the parts of its batch give one by one
    trace/operators/rank-RRR…         the operators of that step, if the job asks for them

Stages, in the order in which a step makes them: `gradient` (summed over all ranks, divided,
regularizer added), `clipped gradient`, `weight` (after the update), `average` (of the weights,
where there is one), `buffer`. Step -1 is the state before the first step. What callbacks change
after a step belongs to that step. With a replay, weights and buffers before each step are those of
another trace, so that differences cannot add up. The row of step -1 says what else a cause is found
by (`facts`).

An engine derives from `TraceWriter` and writes how it reads and sets its tensors. A process with
several copies of the model, each on a device of its own, writes a file of rows for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.training.callback import Callback
from allranks.training.progress import StepResult

START = -1
OPERATORS = "operators"
FEWEST_STEPS = 3  # traced, however large the model is
MOVED = ("weight/", "average/")

T = TypeVar("T")


def tensors_path(trace: Path, step: int, rank: int = 0) -> Path:
    """Where the tensors of a rank of one step are; step -1 is before the first."""
    name = "start" if step == START else f"step-{step:08d}"
    folder = trace / "tensors"
    return (folder / f"rank-{rank:03d}" if rank else folder) / f"{name}.safetensors"


def traced_steps(job: Job, bytes_per_step: int) -> int | None:
    """How many steps are made: as asked, or as many as the space for tensors allows."""
    if job.parts_of is not None:
        return max(job.parts_of, 0) + 1
    if not job.trace_bytes or job.steps is None:
        return job.steps
    return min(job.steps, max(FEWEST_STEPS, job.trace_bytes // max(1, bytes_per_step)))


class TraceWriter(Callback, ABC, Generic[T]):
    """Writes the trace of one process, which holds the `copies` of the model.

    The engine calls `begin` before each step, and `keep` for each gradient within it; it sets
    `magnitude`, how large the losses of the step are, whatever they add up to, and `drawn`, whether
    something drew random numbers out of its sight (`None`: unknown).
    """

    def __init__(self, folder: Path, copies: range, job: Job) -> None:
        self.path, self.job = folder, job
        self.replay = Path(job.replay) if job.replay else None
        (folder / "tensors").mkdir(parents=True, exist_ok=True)
        self.magnitude: float | None = None
        self.drawn: bool | None = None
        self._copies = copies
        self._files = [JsonLines(folder / f"rank-{copy:03d}.jsonl") for copy in copies]
        self._gradients: list[dict[str, T]] = [{} for _ in copies]
        self._row: dict[str, Any] | None = {"step": START}
        self._ids: Sequence[list[int]] = ()
        self._keeps_moved = self.replay is None or job.precision == "fp64"

    # --- what an engine writes ------------------------------------------------------------

    @abstractmethod
    def ids(self, batch: Any) -> Sequence[list[int]]:
        """The samples of each copy in a batch, by number."""

    def facts(self) -> dict[str, Any]:
        """What a cause is found by beside numbers and tensors, before the first step."""
        return {}

    def more(self) -> dict[str, Any]:
        """What else the row of the step that is over says."""
        return {}

    @abstractmethod
    def whole(self, gradients: list[dict[str, T]]) -> list[dict[str, T]]:
        """Of each copy its gradients and its state, by stage/name, every tensor whole."""

    @staticmethod
    @abstractmethod
    def digest(tensor: T) -> str:
        """A short text that is another one where a bit is."""

    @staticmethod
    @abstractmethod
    def store(tensors: Mapping[str, T], path: Path) -> None:
        """Write tensors to a file, in types that NumPy has too."""

    @abstractmethod
    def take_over(self, path: Path) -> None:
        """Set weights and buffers to those in a file, on every copy."""

    # --- what all share -------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        """Before the forward passes of a step: what came before is complete."""
        self._write()
        if self.replay is not None:
            self.take_over(tensors_path(self.replay, batch.index - 1))
        self.magnitude = None

    def keep(self, copy: int, name: str, gradient: T) -> None:
        """Within a step: a gradient of one copy, under its stage/name."""
        self._gradients[copy][name] = gradient

    def on_step(self, trainer: Any, batch: Any, result: StepResult) -> None:
        """After the step."""
        self._ids = self.ids(batch)
        self._row = {
            "step": batch.index,
            "loss": result.loss,
            "magnitude": self.magnitude,
            "samples": result.samples,
            "weight": result.weight,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "overflow": result.overflow,
            "draws": self.drawn,
            "loss_scale": result.loss_scale,
            **self.more(),
        }

    def on_end(self, trainer: Any) -> None:
        """No step follows. What is evaluated after a replay is what the other run evaluated."""
        last = START if self._row is None else self._row["step"]
        self._write()
        if self.replay is not None:
            self.take_over(tensors_path(self.replay, last))
        for file in self._files:
            file.close()

    def _write(self) -> None:
        """Write the step that is over, with the state that it and all callbacks have left."""
        row, self._row = self._row, None
        if row is None:
            return
        step = row["step"]
        named = self.whole(self._gradients)
        self._gradients = [{} for _ in self._files]
        for copy, (file, tensors) in enumerate(zip(self._files, named, strict=True)):
            details = {"facts": self.facts()} if step == START else {"ids": self._ids[copy]}
            digests = {name: self.digest(tensor) for name, tensor in tensors.items()}
            file.row({**row, **details, "digests": digests})
            rank = self._copies[copy]
            if rank == 0 or step == self.job.parts_of:
                path = tensors_path(self.path, step, rank)
                path.parent.mkdir(exist_ok=True)
                self.store({n: t for n, t in tensors.items() if self._is_kept(n, step)}, path)

    def _is_kept(self, name: str, step: int) -> bool:
        """Whether a tensor is in the files; nobody reads the weights of a replay in 32 bits."""
        return not name.startswith(MOVED) or step == START or self._keeps_moved
