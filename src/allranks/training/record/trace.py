"""The trace of a training: everything that two runs can differ in, step by step, for `check`.

    trace/rank-RRR.jsonl              samples, loss, weight, rate; a digest of every tensor
    trace/tensors/step-SSSSSSSS.safetensors    the tensors themselves, written by the leader

Stages, in the order in which a step makes them: `gradient` (summed over all ranks, divided,
regularizer added), `clipped gradient`, `weight` (after the update), `average` (of the weights,
where there is one), `buffer`. Step -1 is the state before the first step. What callbacks change
after a step belongs to that step. With a replay, weights and buffers before each step are those of
another trace, so that differences cannot add up.

An engine derives from `Trace` and writes how it reads and sets its tensors. A process with several
copies of the model, each on a device of its own, writes a file of rows for each.
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
FEWEST_STEPS = 3  # traced, however large the model is
MOVED = ("weight/", "average/")

T = TypeVar("T")


def tensors_path(trace: Path, step: int) -> Path:
    """Where the leader's tensors of one step are; step -1 is before the first."""
    name = "start" if step == START else f"step-{step:08d}"
    return trace / "tensors" / f"{name}.safetensors"


def traced_steps(job: Job, bytes_per_step: int) -> int | None:
    """How many steps are made: as asked, or as many as the space for tensors allows."""
    if not job.trace_bytes or job.steps is None:
        return job.steps
    return min(job.steps, max(FEWEST_STEPS, job.trace_bytes // max(1, bytes_per_step)))


class Trace(Callback, ABC, Generic[T]):
    """Writes the trace of one process, which holds the `copies` of the model.

    The engine calls `begin` before each step, and `keep` for each gradient within it; it sets
    `magnitude`, how large the losses of the step are, whatever they add up to, and `drawn`, whether
    something drew random numbers out of its sight (`None`: unknown).
    """

    def __init__(self, folder: Path, copies: range, job: Job) -> None:
        self.path = folder
        self.replay = Path(job.replay) if job.replay else None
        (folder / "tensors").mkdir(parents=True, exist_ok=True)
        self.magnitude: float | None = None
        self.drawn: bool | None = None
        self._leads = copies.start == 0
        self._files = [JsonLines(folder / f"rank-{copy:03d}.jsonl") for copy in copies]
        self._gradients: list[dict[str, T]] = [{} for _ in copies]
        self._row: dict[str, Any] | None = {"step": START}
        self._ids: Sequence[list[int]] = ()
        self._keeps_moved = self.replay is None or job.precision == "fp64"

    # --- what an engine writes ------------------------------------------------------------

    @abstractmethod
    def ids(self, batch: Any) -> Sequence[list[int]]:
        """The samples of each copy in a batch, by number."""

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
        found = self.whole(self._gradients)
        self._gradients = [{} for _ in self._files]
        for copy, (file, tensors) in enumerate(zip(self._files, found, strict=True)):
            own = {} if row["step"] == START else {"ids": self._ids[copy]}
            digests = {name: self.digest(tensor) for name, tensor in tensors.items()}
            file.row({**row, **own, "digests": digests})
        if self._leads:
            kept = {n: t for n, t in found[0].items() if self._is_kept(n, row["step"])}
            self.store(kept, tensors_path(self.path, row["step"]))

    def _is_kept(self, name: str, step: int) -> bool:
        """Whether a tensor is in the files; nobody reads the weights of a replay in 32 bits."""
        return not name.startswith(MOVED) or step == START or self._keeps_moved
