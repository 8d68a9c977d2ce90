"""The trace of a training: everything that two runs can differ in, step by step, for `check`.

    trace/rank-RRR.jsonl              samples, loss, weight, rate; a digest of every tensor
    trace/tensors/step-SSSSSSSS.safetensors    the tensors themselves, written by the leader
    trace/tensors/rank-RRR/step-…     those of other ranks, of the step that the job's `parts_of` is
    trace/parts/step-…                what the parts of its batch give one by one (`parts`)

Stages, in the order in which a step makes them: `gradient` (summed over all ranks, divided,
regularizer added), `clipped gradient`, `weight` (after the update), `average` (of the weights,
where there is one), `buffer`. Step -1 is the state before the first step. What callbacks change
after a step belongs to that step. With a replay, weights and buffers before each step are those of
another trace, so that differences cannot add up. The row of step -1 says what else a cause is found
by (`facts`): which tensors are cut, and how the optimizer is set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.torch.checkpoint.tree import is_dtensor, local
from allranks.torch.data.batch import Batch
from allranks.torch.model.reals import reals
from allranks.torch.state import put_whole
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.parts import write_parts
from allranks.training.callback import Callback
from allranks.training.progress import StepResult

START = -1
FEWEST_STEPS = 3  # traced, however large the model is


def tensors_path(trace: Path, step: int, rank: int = 0) -> Path:
    """Where the tensors of a rank of one step are; step -1 is before the first."""
    name = "start" if step == START else f"step-{step:08d}"
    folder = trace / "tensors"
    return (folder / f"rank-{rank:03d}" if rank else folder) / f"{name}.safetensors"


class Trace(Callback):
    """Writes the trace of one rank. It is the probe of the strategy's shared step.

    `steps` is how many the job is to make: as asked, or as many as the space for tensors allows.
    """

    def __init__(self, trace: Path, rank: int, strategy: Strategy, job: Job) -> None:
        self.path, self.rank, self.strategy, self.job = trace, rank, strategy, job
        self.replay = Path(job.replay) if job.replay else None
        (trace / "tensors").mkdir(parents=True, exist_ok=True)
        self._rows = JsonLines(trace / f"rank-{rank:03d}.jsonl")
        self._gradients: dict[str, Tensor] = {}
        self._magnitude: float | None = None
        self._drawn = False
        self._passes: list[int] = []
        self._values = 0
        self._squares: dict[str, dict[str, float]] = {}
        self._cut = self._cut_tensors()
        self._row: dict[str, Any] | None = {"step": START, "facts": self._facts()}
        self._in_float64 = job.precision == "fp64"
        self.steps = job.steps
        if job.trace_bytes and job.steps is not None:
            fitting = job.trace_bytes // self._bytes_per_step()
            self.steps = min(job.steps, max(FEWEST_STEPS, fitting))
        if job.parts_of is not None:
            self.steps = max(job.parts_of, 0) + 1
        strategy.step.probe = self

    def begin(self, batch: Batch) -> None:
        """Before the forward passes of a step: what came before is complete."""
        self._write()
        if self.replay is not None:
            self._take_over(batch.index - 1, self.replay)
        self._magnitude, self._drawn = None, False
        self._passes, self._values, self._squares = [], 0, {}
        if batch.index == self.job.parts_of and self.job.cut_for:
            write_parts(self.path, self.strategy, batch, self.job)

    def losses(self, losses: Tensor) -> None:
        """The weighted losses of a micro-batch: how large they are, whatever they add up to."""
        self._magnitude = (self._magnitude or 0.0) + float(losses.abs().sum())
        self._drawn |= _was_drawn_from(torch.default_generator)
        self._passes.append(losses.shape[0])
        self._values += losses.numel()

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """Within a step, when the gradients of that stage are there."""
        self._drawn |= _was_drawn_from(torch.default_generator)
        squares = self._squares.setdefault(stage, {"cut": 0.0, "whole": 0.0})
        for name, gradient in zip(names, tensors, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                own = local(dense.detach())
                kind = "cut" if name in self._cut else "whole"
                squares[kind] += 0.0 if own.is_meta else float(reals(own).double().square().sum())
                full = self.strategy.full(name, dense.detach())
                self._gradients[f"{stage}/{name}"] = full.clone()

    def on_step(self, trainer: Any, batch: Batch, result: StepResult) -> None:
        """After the step."""
        self._row = {
            "step": batch.index,
            "ids": batch.ids.tolist() if self.strategy.step.parts.counts_samples else [],
            "loss": result.loss,
            "magnitude": self._magnitude,
            "samples": result.samples,
            "weight": result.weight,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "overflow": result.overflow,
            "draws": self._drawn,
            "micro_batches": self._passes,
            "values": self._values,
            "loss_scale": result.loss_scale,
            "own_squares": self._squares,
        }

    def on_end(self, trainer: Any) -> None:
        """No step follows. What is evaluated after a replay is what the other run evaluated."""
        last = START if self._row is None else self._row["step"]
        self._write()
        if self.replay is not None:
            self._take_over(last, self.replay)
        self._rows.close()

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """All that a step starts from and changes, but what the optimizer keeps; as it is saved."""
        for kind, name, tensor in self._held():
            saved = tensor if kind == "buffer" else self.strategy.as_saved(name, tensor)
            yield f"{kind}/{name}", saved

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """The same, every tensor whole; every rank calls this."""
        for kind, name, tensor in self._held():
            full = tensor if kind == "buffer" else self.strategy.full(name, tensor)
            yield f"{kind}/{name}", full

    def _held(self) -> Iterator[tuple[str, str, Tensor]]:
        """What kind each is, its name, and what this rank holds of it."""
        strategy = self.strategy
        model, average = strategy.model, strategy.step.average
        for kind, named in (
            ("weight", dict(model.named_parameters())),
            ("average", {} if average is None else average.state()),
        ):
            for name, tensor in named.items():
                yield kind, name, tensor.detach()
        for name, tensor in model.named_buffers():
            yield "buffer", name, tensor.detach()

    def _bytes_per_step(self) -> int:
        step, strategy = self.strategy.step, self.strategy
        kinds = 1 if self.strategy.task.clip_norm is None else 2
        pairs = zip(step.names, step.parameters, strict=True)
        with strategy.owned():
            trained = sum(strategy.as_saved(name, p.detach()).nbytes for name, p in pairs)
            state = sum(tensor.nbytes for _, tensor in self._state())
        return max(1, kinds * trained + state)

    def _write(self) -> None:
        """Write the step that is over, with the state that it and all callbacks have left."""
        row, self._row = self._row, None
        if row is None:
            return
        with self.strategy.owned():
            tensors = {**self._gradients, **dict(self._whole())}
        self._gradients = {}
        row["digests"] = {name: _digest(tensor) for name, tensor in tensors.items()}
        self._rows.row(row)
        if self.rank == 0 or row["step"] == self.job.parts_of:
            path = tensors_path(self.path, row["step"], self.rank)
            path.parent.mkdir(exist_ok=True)
            kept = {n: _storable(t) for n, t in tensors.items() if self._is_kept(n, row["step"])}
            save_file(kept, path)

    def _cut_tensors(self) -> dict[str, int]:
        """Of which weights this rank holds a part, and along which dimension they are cut."""
        found: dict[str, int] = {}
        with self.strategy.owned():
            for name, parameter in self.strategy.model.named_parameters():
                saved: Any = self.strategy.as_saved(name, parameter.detach())
                if is_dtensor(saved):
                    sizes = saved.device_mesh.shape
                    for place, size in zip(saved.placements, sizes, strict=True):
                        if place.is_shard() and size > 1:
                            found[name] = place.dim
        return found

    def _facts(self) -> dict[str, Any]:
        """What a cause is found by, beside numbers and tensors."""
        optimizer, task = self.strategy.step.optimizer, self.strategy.task
        told = ("lr", "weight_decay", "momentum", "eps", "betas", "nesterov")
        group = optimizer.param_groups[0] if len(optimizer.param_groups) == 1 else {}
        settings = {name: group[name] for name in told if isinstance(group.get(name), (int, float))}
        return {
            "cut": self._cut,
            "clip_norm": task.clip_norm,
            "ema": task.ema,
            "optimizer": type(optimizer).__name__,
            "settings": settings,
        }

    def _is_kept(self, name: str, step: int) -> bool:
        """Whether a tensor is in the files; nobody reads the weights of a replay in 32 bits."""
        moved = name.startswith(("weight/", "average/"))
        return not moved or step == START or self.replay is None or self._in_float64

    @torch.no_grad()
    def _take_over(self, step: int, trace: Path) -> None:
        tensors = load_file(tensors_path(trace, step))
        with self.strategy.owned(writes=True):
            for name, tensor in self._state():
                if name in tensors:  # what the other run does not have is what `check` will say
                    put_whole(tensor, tensors[name])


def _was_drawn_from(generator: torch.Generator) -> bool:
    """Whether numbers were drawn since the generator was seeded last."""
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    return not torch.equal(fresh.get_state(), generator.get_state())


def _storable(tensor: Tensor) -> Tensor:
    """A copy on its own, in a type that NumPy has too."""
    real = reals(tensor.resolve_neg())
    short = real.dtype in (torch.bfloat16, torch.float16)
    return real.to("cpu", torch.float32 if short else real.dtype, copy=True).contiguous()


def _digest(tensor: Tensor) -> str:
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]
