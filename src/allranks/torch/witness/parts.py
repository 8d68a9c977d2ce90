"""The parts of one step, each by itself: what `check` puts a difference together from.

    trace/parts/step-SSSSSSSS.json            of each part: rank, micro-batch, shard, samples, sums
    trace/parts/step-SSSSSSSS.safetensors     NUMBER/losses, weights, gradient/NAME, moments/NAME;
                                            regularizer/gradient/NAME

Written by one process that cuts its batch as the ranks would. A part is a piece of a shard in a
micro-batch; it goes through the model alone, before the step is made, and leaves no trace. What the
batch would give with a fault in it (`if`) is computed too, where that cannot be put together: every
rank drawing the numbers of the first, every rank adding a bias, a micro-batch that goes through
after the first layers of another one, a weight that is used twice and summed once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.shards import Piece, owned_shards
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.data.collate import copied
from allranks.torch.model.layers import shard_norms
from allranks.torch.state import kept_random_streams
from allranks.torch.step.losses import forward, weighted_losses
from allranks.torch.step.step import REGULARIZER, SharedStep
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.recomputed import Part, cut_out, leaving_no_trace

MOST_BYTES = 2**30
"""Of the gradients of all parts; of more nothing is recorded."""


def write_parts(trace: Path, strategy: Strategy, batch: Batch, job: Job) -> None:
    """Write the parts of this step below `trace`; nothing where they cannot be told apart."""
    step = strategy.step
    pieces = sum(len(micro.pieces) for micro in batch.micros)
    if step.task.loss_over == "batch":
        return
    if pieces * sum(p.nbytes for p in step.parameters) > MOST_BYTES:
        return
    with leaving_no_trace(step, []), kept_random_streams(step.scope.device):
        try:
            found = _Parts(step, batch, job.cut_for)
            rows, tensors = found.all()
            told = {"parts": rows, "if": found.otherwise(job)}
            tensors |= {f"if/{name}": t for name, t in found.by_use().items()}
            tensors |= {f"regularizer/{name}": t for name, t in found.regularizer().items()}
        except RequestError:  # what has no rows cannot be cut
            return
    (trace / "parts").mkdir(exist_ok=True)
    name = f"step-{batch.index:08d}"
    save_file({n: t.contiguous() for n, t in tensors.items()}, trace / f"parts/{name}.safetensors")
    (trace / f"parts/{name}.json").write_text(json.dumps(told))


class _Parts:
    """Passes over the parts of one batch."""

    def __init__(self, step: SharedStep, batch: Batch, ranks: int) -> None:
        self.step, self.batch = step, batch
        self.ranks = [owned_shards(step.task.shards, ranks, rank) for rank in range(ranks)]
        self.parts = [
            (number, micro.pieces.index(piece), self._part(micro, piece))
            for number, micro in enumerate(batch.micros)
            for piece in micro.pieces
        ]

    def _part(self, micro: MicroBatch, piece: Piece) -> Part:
        whole = Part(micro.pieces, micro.data)
        return whole if len(micro.pieces) == 1 else cut_out(whole, piece)

    def _rank_of(self, shard: int) -> int:
        return next(rank for rank, own in enumerate(self.ranks) if shard in own)

    def all(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """A row for each part, and the tensors of all."""
        rows: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        before = 0
        for number, (micro, _, part) in enumerate(self.parts):
            (piece,) = part.pieces
            losses, weights = self._losses(part)
            gradients = self._gradients(losses, self.step.parameters)
            ids = self.batch.ids[before : before + piece.samples].tolist()
            before += piece.samples
            row = {"rank": self._rank_of(piece.shard), "micro": micro, "shard": piece.shard}
            row |= {"samples": piece.samples, "ids": ids, "values": losses.numel()}
            weight = losses.numel() if weights is None else float(weights.sum())
            rows.append({**row, "loss": float(losses.detach().sum()), "weight": weight})
            found = {"losses": losses.detach(), **self._moments()}
            found["weights"] = torch.ones_like(found["losses"]) if weights is None else weights
            pairs = zip(self.step.names, gradients, strict=True)
            found |= {f"gradient/{name}": g for name, g in pairs if g is not None}
            tensors |= {f"{number}/{name}": t.detach().clone() for name, t in found.items()}
        return rows, tensors

    def _moments(self) -> dict[str, Tensor]:
        """What the part has left for the running statistics of each layer."""
        names = {id(module): name for name, module in self.step.model.named_modules()}
        moments = self.step.scope.moments
        return {
            f"moments/{names[id(norm)]}": moments[norm.index]
            for norm in shard_norms(self.step.model)
            if norm.index in moments and id(norm) in names
        }

    def _losses(
        self, part: Part, given: Part | None = None, drawn: Part | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The weighted losses of a part; the model is `given` another one, `drawn` for another."""
        step = self.step
        step.scope.moments.clear()
        step.scope.enter(self.batch.index, (drawn or part).pieces, part.samples)
        with step.precision.autocast():
            data = copied(part.data)  # the model may write on it, and goes through it again
            output = forward(step.task, step.model, copied(given.data) if given else data)
            return weighted_losses(step.task, output, data, part.samples)

    @staticmethod
    def _gradients(losses: Tensor, of: list[Any]) -> list[Tensor | None]:
        total = losses.sum()
        if not total.requires_grad:
            return [None] * len(of)
        found = torch.autograd.grad(total, of, allow_unused=True)
        return [g.to_dense() if g is not None and g.is_sparse else g for g in found]

    def regularizer(self) -> dict[str, Tensor]:
        """The gradient of what is added once in a step, beside the parts."""
        step = self.step
        if not step.regularizers.is_there:
            return {}
        step.scope.key(self.batch.index, REGULARIZER)
        value = step.task.regularizer(step.model)
        if value is None or not value.requires_grad:
            return {}
        found = torch.autograd.grad(value, step.parameters, allow_unused=True)
        pairs = zip(step.names, found, strict=True)
        return {f"gradient/{name}": g for name, g in pairs if g is not None}

    # --- with a fault ---------------------------------------------------------------------

    @torch.no_grad()
    def otherwise(self, job: Job) -> dict[str, float]:
        """The sum of the losses of the batch with a fault in it, by the name of the fault."""
        found = {"one stream": self._sum([self._first_stream(part) for _, _, part in self.parts])}
        for name, drawn in (("stale micro-batch", False), ("stale, with its draws", True)):
            if (stale := self._stale(drawn)) is not None:
                found[name] = stale
        named = dict(self.step.model.named_parameters())
        chosen = [named[name] for name in job.added_by_each if name in named]
        if chosen:
            with _changed(chosen, float(job.adding)):
                found["biases"] = self._sum([part for _, _, part in self.parts])
        return found

    def _sum(self, parts: list[Part]) -> float:
        return sum(float(self._losses(part)[0].sum()) for part in parts)

    def _stale(self, drawn: bool) -> float | None:
        """The sum if the last micro-batch goes through with the data of the one before.

        What layers draw is `drawn` for that one too, where they come before the mistake.
        """
        last = max(micro for micro, _, _ in self.parts)
        before = {place: part for micro, place, part in self.parts if micro == last - 1}
        total = 0.0
        for micro, place, part in self.parts:
            given = before.get(place) if micro == last else part
            if given is None or given.samples != part.samples:
                return None
            total += float(self._losses(part, given, given if drawn else part)[0].sum())
        return total

    def _first_stream(self, part: Part) -> Part:
        """The part with the numbers that the first rank draws for a shard in the same place."""
        (piece,) = part.pieces
        own = self.ranks[self._rank_of(piece.shard)]
        return replace(part, pieces=(replace(piece, shard=piece.shard - own.start),))

    def by_use(self) -> dict[str, Tensor]:
        """Of each weight that several layers share the gradient that every use of it gives."""
        found: dict[str, Tensor] = {}
        for name, uses in _uses_of(self.step.model).items():
            kept = getattr(*uses[0])
            copies = [nn.Parameter(kept.detach().clone()) for _ in uses]
            try:
                for (module, own), new in zip(uses, copies, strict=True):
                    module._parameters[own] = new
                for _, _, part in self.parts:
                    losses, _ = self._losses(part)
                    for number, g in enumerate(self._gradients(losses, copies)):
                        key = f"{number}/gradient/{name}"
                        if g is not None:
                            found[key] = found[key] + g if key in found else g.clone()
            finally:
                for module, own in uses:
                    module._parameters[own] = kept
        return found


def _uses_of(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """The places of every parameter that has several, by its name in the model."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, own))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[key]: found for key, found in places.items() if len(found) > 1}


@contextmanager
def _changed(parameters: list[nn.Parameter], factor: float) -> Iterator[None]:
    """Within, these are times `factor`."""
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data.mul_(factor)
        yield
    finally:
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.data.copy_(old)
