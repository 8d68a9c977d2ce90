"""The trace of a rank that trains with torch: see `training.record.trace` for what is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.shards import Piece, owned_shards
from allranks.torch.checkpoint.state import is_dtensor, kept_random_streams, local
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.data.collate import copied
from allranks.torch.model.layers import shard_norms
from allranks.torch.model.reals import reals
from allranks.torch.model.weights import content_of
from allranks.torch.step.losses import forward, weighted_losses
from allranks.torch.step.probes import StepProbe
from allranks.torch.step.step import REGULARIZER, SharedStep
from allranks.torch.strategies.base import Strategy
from allranks.torch.strategies.layout import put_whole
from allranks.torch.witness.operators import recorded_operators, storable, write_record
from allranks.torch.witness.recompute import (
    RecomputedPart,
    cut_out,
    dense,
    gradients_of,
    leaving_no_trace,
)
from allranks.training.record import trace

# --- parts ---------------------------------------------------------------------------------------
# The parts of one step, each by itself, from which `check` reconstructs a difference.
#
#     trace/parts/step-SSSSSSSS.json          of each part: rank, micro-batch, shard, samples, sums
#     trace/parts/step-SSSSSSSS.safetensors     NUMBER/losses, weights, gradient/NAME, moments/NAME;
#                                             regularizer/gradient/NAME
#
# Written by one process that cuts its batch as the ranks would. A part is a piece of a shard in a
# micro-batch; it goes through the model alone, before the step runs, and leaves no trace. Sums with
# a fault (`if`) are computed too, if the parts do not yield them: every rank draws the numbers of
# the first; every rank adds a bias; a micro-batch gets the inputs of another one; a weight is used
# twice and summed once.


MOST_BYTES = 2**30
"""For the gradients of all parts; if they need more, nothing is recorded."""


def write_parts(trace: Path, strategy: Strategy, batch: Batch, job: Job) -> None:
    """Write the parts of this step below `trace`; nothing if they cannot be separated."""
    step = strategy.step
    pieces = sum(len(micro.pieces) for micro in batch.micros)
    if step.task.loss_over == "batch":
        return
    if pieces * sum(p.nbytes for p in step.parameters) > MOST_BYTES:
        return
    with leaving_no_trace(step, []), kept_random_streams(step.scope.device):
        try:
            parts_of_step = _Parts(step, batch, job.cut_for)
            rows, tensors = parts_of_step.all()
            document = {"parts": rows, "if": parts_of_step.sums_with_faults(job)}
            tensors |= {f"if/{name}": t for name, t in parts_of_step.by_use().items()}
            tensors |= {f"regularizer/{name}": t for name, t in parts_of_step.regularizer().items()}
        except RequestError:  # data without rows cannot be cut
            return
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_record(trace / "parts", f"step-{batch.index:08d}", document, tensors)


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

    def _part(self, micro: MicroBatch, piece: Piece) -> RecomputedPart:
        whole = RecomputedPart(micro.pieces, micro.data)
        return whole if len(micro.pieces) == 1 else cut_out(whole, piece)

    def _rank_of(self, shard: int) -> int:
        return next(rank for rank, owned in enumerate(self.ranks) if shard in owned)

    def all(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """A row for each part, and the tensors of all."""
        rows: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        before = 0
        for number, (micro, _, part) in enumerate(self.parts):
            (piece,) = part.pieces
            losses, weights = self._losses(part)
            gradients = gradients_of(losses.sum(), self.step.parameters)
            ids = self.batch.ids[before : before + piece.samples].tolist()
            before += piece.samples
            row = {"rank": self._rank_of(piece.shard), "micro": micro, "shard": piece.shard}
            row |= {"samples": piece.samples, "ids": ids, "values": losses.numel()}
            weight = losses.numel() if weights is None else float(weights.sum())
            rows.append({**row, "loss": float(losses.detach().sum()), "weight": weight})
            named = {"losses": losses.detach(), **self._moments()}
            named["weights"] = torch.ones_like(named["losses"]) if weights is None else weights
            named |= self._named(gradients)
            tensors |= {f"{number}/{name}": t.detach().clone() for name, t in named.items()}
        return rows, tensors

    def _moments(self) -> dict[str, Tensor]:
        """The moments of the part for the running statistics of each layer."""
        names = {id(module): name for name, module in self.step.model.named_modules()}
        moments = self.step.scope.moments
        return {
            f"moments/{names[id(norm)]}": moments[norm.index]
            for norm in shard_norms(self.step.model)
            if norm.index in moments and id(norm) in names
        }

    def _losses(
        self,
        part: RecomputedPart,
        input_of: RecomputedPart | None = None,
        drawn: RecomputedPart | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The weighted losses of a part, with the input or the draws of another part if set."""
        step = self.step
        step.scope.moments.clear()
        step.scope.enter(self.batch.index, (drawn or part).pieces, part.samples)
        with step.precision.autocast():
            data = copied(part.data)  # the model may write on it, and goes through it again
            output = forward(step.task, step.model, copied(input_of.data) if input_of else data)
            return weighted_losses(step.task, output, data, part.samples)

    def _named(self, gradients: list[Tensor | None]) -> dict[str, Tensor]:
        pairs = zip(self.step.names, gradients, strict=True)
        return {f"gradient/{name}": g for name, g in pairs if g is not None}

    def regularizer(self) -> dict[str, Tensor]:
        """The gradient of the regularizer, which is added once in a step."""
        step = self.step
        if not step.regularizers.is_there:
            return {}
        step.scope.key(self.batch.index, REGULARIZER)
        value = step.task.regularizer(step.model)
        return {} if value is None else self._named(gradients_of(value, step.parameters))

    # --- with a fault ---------------------------------------------------------------------

    @torch.no_grad()
    def sums_with_faults(self, job: Job) -> dict[str, float]:
        """The sum of the losses of the batch with a fault in it, by the name of the fault."""
        sums = {"one stream": self._sum([self._first_stream(part) for _, _, part in self.parts])}
        for name, drawn in (("stale micro-batch", False), ("stale, with its draws", True)):
            if (stale := self._stale(drawn)) is not None:
                sums[name] = stale
        named = dict(self.step.model.named_parameters())
        chosen = [named[name] for name in job.added_by_each if name in named]
        if chosen:
            with _changed(chosen, float(job.adding)):
                sums["biases"] = self._sum([part for _, _, part in self.parts])
        return sums

    def _sum(self, parts: list[RecomputedPart]) -> float:
        return sum(float(self._losses(part)[0].sum()) for part in parts)

    def _stale(self, drawn: bool) -> float | None:
        """The sum if the last micro-batch uses the data of the one before.

        With `drawn`, layers draw the numbers of that one too, as they would before the mistake.
        """
        last = max(micro for micro, _, _ in self.parts)
        before = {place: part for micro, place, part in self.parts if micro == last - 1}
        total = 0.0
        for micro, place, part in self.parts:
            input_of = before.get(place) if micro == last else part
            if input_of is None or input_of.samples != part.samples:
                return None
            total += float(self._losses(part, input_of, input_of if drawn else part)[0].sum())
        return total

    def _first_stream(self, part: RecomputedPart) -> RecomputedPart:
        """The part with the numbers that the first rank draws for a shard in the same place."""
        (piece,) = part.pieces
        owned = self.ranks[self._rank_of(piece.shard)]
        return replace(part, pieces=(replace(piece, shard=piece.shard - owned.start),))

    def by_use(self) -> dict[str, Tensor]:
        """The gradient of each use of a weight that several layers share."""
        gradients: dict[str, Tensor] = {}
        for name, uses in _uses_of(self.step.model).items():
            shared = getattr(*uses[0])
            copies = [nn.Parameter(shared.detach().clone()) for _ in uses]
            try:
                for (module, attribute), new in zip(uses, copies, strict=True):
                    module._parameters[attribute] = new
                for _, _, part in self.parts:
                    losses, _ = self._losses(part)
                    for number, g in enumerate(gradients_of(losses.sum(), copies)):
                        key = f"{number}/gradient/{name}"
                        if g is not None:
                            gradients[key] = gradients[key] + g if key in gradients else g.clone()
            finally:
                for module, attribute in uses:
                    module._parameters[attribute] = shared
        return gradients


def _uses_of(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """The (module, attribute) of each use of a shared parameter, by its name in the model."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[key]: uses for key, uses in places.items() if len(uses) > 1}


@contextmanager
def _changed(parameters: list[nn.Parameter], factor: float) -> Iterator[None]:
    """Within, these parameters are multiplied by `factor`."""
    saved = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data.mul_(factor)
        yield
    finally:
        for parameter, old in zip(parameters, saved, strict=True):
            parameter.data.copy_(old)


class RankTrace(trace.TraceWriter[Tensor], StepProbe):
    """Writes the trace of one rank, as the probe of the strategy's shared step.

    `steps` is the number of steps to run: as requested, or as the space for tensors allows.
    """

    def __init__(self, folder: Path, rank: int, strategy: Strategy, job: Job) -> None:
        super().__init__(folder, range(rank, rank + 1), job)
        self.strategy = strategy
        self.steps = trace.traced_steps(job, self._bytes_per_step())
        self._passes: list[int] = []
        self._values = 0
        self._squares: dict[str, dict[str, float]] = {}
        self._cut = self._cut_tensors()
        self._recording = ExitStack()
        strategy.step.probe = self

    def begin(self, batch: Batch) -> None:
        """Before the forward passes of a step; the step before is complete."""
        super().begin(batch)
        self.drawn = False
        self._passes, self._values, self._squares = [], 0, {}
        if batch.index == self.job.parts_of and self.job.cut_for:
            write_parts(self.path, self.strategy, batch, self.job)
        if batch.index == self.job.parts_of and self.job.operators:
            folder, model = self.path / trace.OPERATORS, self.strategy.model
            self._recording.enter_context(recorded_operators(folder, self._copies[0], model))

    def losses(self, losses: Tensor) -> None:
        """The weighted losses of a micro-batch: add up their absolute values."""
        self.magnitude = (self.magnitude or 0.0) + float(losses.abs().sum())
        self.drawn = self.drawn or has_drawn(torch.default_generator)
        self._passes.append(losses.shape[0])
        self._values += losses.numel()

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """Within a step, when the gradients of that stage are there."""
        self.drawn = self.drawn or has_drawn(torch.default_generator)
        squares = self._squares.setdefault(stage, {"cut": 0.0, "whole": 0.0})
        for name, gradient in zip(names, tensors, strict=True):
            if gradient is not None:
                whole = dense(gradient)
                part = local(whole)
                kind = "cut" if name in self._cut else "whole"
                squares[kind] += 0.0 if part.is_meta else float(reals(part).double().square().sum())
                full = self.strategy.layout.full(name, whole)
                self.keep(0, f"{stage}/{name}", full.clone())

    def ids(self, batch: Batch) -> list[list[int]]:
        """The samples of this rank, if it counts them."""
        return [batch.ids.tolist() if self.strategy.step.parts.counts_samples else []]

    def facts(self) -> dict[str, Any]:
        """The tensors that are cut, and the settings of the optimizer."""
        optimizer, task = self.strategy.step.optimizer, self.strategy.task
        shown = ("lr", "weight_decay", "momentum", "eps", "betas", "nesterov")
        group = optimizer.param_groups[0] if len(optimizer.param_groups) == 1 else {}
        settings = {n: group[n] for n in shown if isinstance(group.get(n), (int, float))}
        return {
            "cut": self._cut,
            "clip_norm": task.clip_norm,
            "ema": task.ema,
            "optimizer": type(optimizer).__name__,
            "settings": settings,
        }

    def more(self) -> dict[str, Any]:
        """The passes of the step that is over, and the squares of this rank's gradients."""
        self._recording.close()
        passes = {"micro_batches": self._passes, "values": self._values}
        return {**passes, "own_squares": self._squares}

    def whole(self, gradients: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Gradients and state, every tensor whole; every rank calls this.

        Of weights that all ranks hold, each rank records what its forward pass reads, not the parts
        of the ranks that update them.
        """
        with self.strategy.owned():
            tensors = {**gradients[0], **dict(self._state(self.strategy.layout.full))}
        if self.strategy.agreement.weights == "replicated":
            named = self.strategy.model.named_parameters()
            tensors |= {f"weight/{name}": parameter.detach() for name, parameter in named}
        return [tensors]

    def _state(self, shown: Callable[[str, Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights, averages and buffers that a step reads and changes.

        Weights and averages are `shown` by the layout: `to_global`, or `full` on every rank.
        """
        model, average = self.strategy.model, self.strategy.step.average
        averages = {} if average is None else average.state()
        for kind, named in (("weight", dict(model.named_parameters())), ("average", averages)):
            for name, tensor in named.items():
                yield f"{kind}/{name}", shown(name, tensor.detach())
        for name, buffer in model.named_buffers():
            yield f"buffer/{name}", buffer.detach()

    def _bytes_per_step(self) -> int:
        step, strategy = self.strategy.step, self.strategy
        kinds = 1 if self.strategy.task.clip_norm is None else 2
        pairs = zip(step.names, step.parameters, strict=True)
        with strategy.owned():
            layout = strategy.layout
            trained = sum(layout.full_like(name, p.detach()).nbytes for name, p in pairs)
            state = sum(tensor.nbytes for _, tensor in self._state(layout.to_global))
        return kinds * trained + state

    def _cut_tensors(self) -> dict[str, int]:
        """The weights of which this rank holds a part, and the dimension that is cut."""
        dimensions: dict[str, int] = {}
        with self.strategy.owned():
            for name, parameter in self.strategy.model.named_parameters():
                saved: Any = self.strategy.layout.to_global(name, parameter.detach())
                if is_dtensor(saved):
                    sizes = saved.device_mesh.shape
                    for place, size in zip(saved.placements, sizes, strict=True):
                        if place.is_shard() and size > 1:
                            dimensions[name] = place.dim
        return dimensions

    @staticmethod
    def digest(tensor: Tensor) -> str:
        """The start of a SHA-256 of its bytes."""
        return hashlib.sha256(content_of(tensor)).hexdigest()[:16]

    @staticmethod
    def store(tensors: Mapping[str, Tensor], path: Path) -> None:
        """Write copies of tensors, those of 16 bits in 32."""
        save_file({name: storable(tensor) for name, tensor in tensors.items()}, path)

    @torch.no_grad()
    def take_over(self, path: Path) -> None:
        """Set weights, their average and buffers; every rank calls this."""
        tensors = load_file(path)
        with self.strategy.owned(writes=True):
            for name, tensor in self._state(self.strategy.layout.to_global):
                if name in tensors:  # `check` reports what the other run does not have
                    put_whole(tensor, tensors[name])


def has_drawn(generator: torch.Generator) -> bool:
    """Whether numbers were drawn since the generator was seeded last."""
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    return not torch.equal(fresh.get_state(), generator.get_state())
