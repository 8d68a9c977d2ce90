"""The trace of a rank that trains with torch: see `training.record.trace` for what is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from allranks.job.job import Job
from allranks.torch.checkpoint.tree import is_dtensor, local
from allranks.torch.data.batch import Batch
from allranks.torch.model.reals import reals
from allranks.torch.state import put_whole
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.parts import write_parts
from allranks.training.record import trace


class Trace(trace.Trace[Tensor]):
    """Writes the trace of one rank. It is the probe of the strategy's shared step.

    `steps` is how many the job is to make: as asked, or as many as the space for tensors allows.
    """

    def __init__(self, folder: Path, rank: int, strategy: Strategy, job: Job) -> None:
        super().__init__(folder, range(rank, rank + 1), job)
        self.strategy = strategy
        self.steps = trace.traced_steps(job, self._bytes_per_step())
        self._passes: list[int] = []
        self._values = 0
        self._squares: dict[str, dict[str, float]] = {}
        self._cut = self._cut_tensors()
        strategy.step.probe = self

    def begin(self, batch: Batch) -> None:
        """Before the forward passes of a step: what came before is complete."""
        super().begin(batch)
        self.drawn = False
        self._passes, self._values, self._squares = [], 0, {}
        if batch.index == self.job.parts_of and self.job.cut_for:
            write_parts(self.path, self.strategy, batch, self.job)

    def losses(self, losses: Tensor) -> None:
        """The weighted losses of a micro-batch: how large they are, whatever they add up to."""
        self.magnitude = (self.magnitude or 0.0) + float(losses.abs().sum())
        self.drawn = self.drawn or _was_drawn_from(torch.default_generator)
        self._passes.append(losses.shape[0])
        self._values += losses.numel()

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """Within a step, when the gradients of that stage are there."""
        self.drawn = self.drawn or _was_drawn_from(torch.default_generator)
        squares = self._squares.setdefault(stage, {"cut": 0.0, "whole": 0.0})
        for name, gradient in zip(names, tensors, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                own = local(dense.detach())
                kind = "cut" if name in self._cut else "whole"
                squares[kind] += 0.0 if own.is_meta else float(reals(own).double().square().sum())
                full = self.strategy.full(name, dense.detach())
                self.keep(0, f"{stage}/{name}", full.clone())

    def ids(self, batch: Batch) -> list[list[int]]:
        """The samples of this rank, where it counts them."""
        return [batch.ids.tolist() if self.strategy.step.parts.counts_samples else []]

    def facts(self) -> dict[str, Any]:
        """Which tensors are cut, and how the optimizer is set."""
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

    def more(self) -> dict[str, Any]:
        """The passes of the step that is over, and the squares of this rank's gradients."""
        passes = {"micro_batches": self._passes, "values": self._values}
        return {**passes, "own_squares": self._squares}

    def whole(self, gradients: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Gradients and state, every tensor whole; every rank calls this.

        Of weights that all ranks hold, each rank says what forward would find, and not what those
        have that update them.
        """
        with self.strategy.owned():
            found = {**gradients[0], **dict(self._whole())}
        if self.strategy.agreement.weights == "replicated":
            named = self.strategy.model.named_parameters()
            found |= {f"weight/{name}": parameter.detach() for name, parameter in named}
        return [found]

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
        return kinds * trained + state

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

    @staticmethod
    def digest(tensor: Tensor) -> str:
        """The start of a SHA-256 of its bytes."""
        flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        return hashlib.sha256(flat.numpy().data).hexdigest()[:16]

    @staticmethod
    def store(tensors: Mapping[str, Tensor], path: Path) -> None:
        """Write copies of tensors, those of 16 bits in 32."""
        save_file({name: _storable(tensor) for name, tensor in tensors.items()}, path)

    @torch.no_grad()
    def take_over(self, path: Path) -> None:
        """Set weights, their average and buffers; every rank calls this."""
        tensors = load_file(path)
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
