"""The trace of a training: everything that two runs can differ in, step by step, for `check`.

    trace/rank-RRR.jsonl              samples, loss, weight, rate; a digest of every tensor
    trace/tensors/step-SSSSSSSS.safetensors    the tensors themselves, written by the leader

Stages, in the order in which a step makes them: `gradient` (summed over all ranks, divided,
regularizer added), `clipped gradient`, `weight` (after the update), `buffer`. Step -1 is the
state before the first step. With a replay, weights and buffers before each step are those of
another trace, so that differences cannot add up.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allranks.on_torch.data import Batch
from allranks.on_torch.step import SharedStep
from allranks.on_torch.strategies.base import Strategy
from allranks.record import JsonLines
from allranks.training.progress import StepResult

START = -1


def tensors_path(trace: Path, step: int) -> Path:
    """Where the leader's tensors of one step are; step -1 is before the first."""
    name = "start" if step == START else f"step-{step:08d}"
    return trace / "tensors" / f"{name}.safetensors"


class Trace:
    """Writes the trace of one rank. It is the probe of the strategy's shared step."""

    def __init__(self, trace: Path, rank: int, strategy: Strategy, replay: str) -> None:
        self.path, self.rank, self.strategy = trace, rank, strategy
        self.replay = Path(replay) if replay else None
        (trace / "tensors").mkdir(parents=True, exist_ok=True)
        self._rows = JsonLines(trace / f"rank-{rank:03d}.jsonl")
        self._tensors: dict[str, Tensor] = {}
        strategy.step.probe = self
        self._write({"step": START})

    def begin(self, batch: Batch) -> None:
        """Before the forward passes of a step."""
        if self.replay is not None:
            self._take_over(batch.index - 1, self.replay)

    def gradients(self, stage: str, step: SharedStep) -> None:
        """Within a step, when the gradients of that stage are there."""
        for name, parameter in zip(step.names, step.parameters, strict=True):
            if parameter.grad is not None:
                self._tensors[f"{stage}/{name}"] = parameter.grad.detach().clone()

    def finished(self, batch: Batch, result: StepResult) -> None:
        """After the step."""
        self._write(
            {
                "step": batch.index,
                "ids": batch.ids.tolist(),
                "loss": result.loss,
                "samples": result.samples,
                "weight": result.weight,
                "learning_rate": result.learning_rate,
                "grad_norm": result.grad_norm,
            }
        )

    def close(self) -> None:
        self._rows.close()

    def _write(self, row: dict[str, Any]) -> None:
        model = self.strategy.model
        for kind, named in (
            ("weight", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in named:
                self._tensors[f"{kind}/{name}"] = tensor.detach().clone()
        row["digests"] = {name: _digest(tensor) for name, tensor in self._tensors.items()}
        self._rows.row(row)
        if self.rank == 0:
            whole = {name: t.contiguous().cpu() for name, t in self._tensors.items()}
            save_file(whole, tensors_path(self.path, row["step"]))
        self._tensors = {}

    @torch.no_grad()
    def _take_over(self, step: int, trace: Path) -> None:
        tensors = load_file(tensors_path(trace, step))
        model = self.strategy.model
        for kind, named in (
            ("weight", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in named:
                tensor.copy_(tensors[f"{kind}/{name}"])


def _digest(tensor: Tensor) -> str:
    flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]
