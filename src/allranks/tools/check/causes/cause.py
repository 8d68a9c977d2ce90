"""A cause: a pattern of differences, with the repair that must make them vanish.

A pattern reads the evidence and yields accounts: the fault in words, and the job's numbers with
the fault undone. An account is confirmed if its repaired numbers equal those of one process, for
the whole stage within the tolerance of the look. Other accounts are not reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from allranks.strategies.mesh import REPLICATE, SHARD, Mesh
from allranks.tools.check.compare import Difference, RecordedTrace, Tolerance, of_stage
from allranks.tools.check.sizes import (
    Array,
    norm,
    number_difference,
    tensor_difference,
    usual_sizes,
)
from allranks.training.record.trace import START

# --- evidence ------------------------------------------------------------------------------------
# The evidence for a cause: both traces of the step that differs, and the parts of its batch.
#
# Read from files alone. `right` is one process, `ours` the job on its ranks. The parts come from
# one process (`torch.witness.parts`): their sums over a rank are what that rank should contribute.


Tensors = Mapping[str, Array]
SAMPLE_WEIGHT = "sample weight"
"""The sum of what samples weigh, which a difference calls `weight` as it does tensors."""
NUMBERS = {
    "samples": "samples",
    SAMPLE_WEIGHT: "weight",
    "loss": "loss",
    "learning rate": "learning_rate",
    "gradient norm": "grad_norm",
}
"""What a number of each stage is called in the rows of a trace."""


@dataclass(frozen=True)
class ShardPart:
    """A piece of a shard in a micro-batch, by itself: sums over its samples, and its gradients."""

    rank: int
    micro: int
    shard: int
    samples: int
    values: int
    loss: float
    weight: float
    tensors: Tensors = field(repr=False)

    def gradient(self, name: str) -> Array | float:
        """The gradient of the sum of its losses; 0 of a weight that it does not use."""
        return self.tensors.get(f"gradient/{name}", 0.0)


@dataclass(frozen=True)
class BatchParts:
    """All parts of a batch, and the gradient of the regularizer, which is added once.

    `otherwise` has the loss of the batch with a fault, `by_use` gradients with one.
    """

    each: tuple[ShardPart, ...]
    regularizer: Tensors
    otherwise: Mapping[str, float]
    by_use: Mapping[str, tuple[Array, ...]]

    @property
    def weight(self) -> float:
        return math.fsum(part.weight for part in self.each)

    def groups(self, key: Callable[[ShardPart], int]) -> dict[int, tuple[ShardPart, ...]]:
        """The parts by rank or by micro-batch."""
        by_key: dict[int, list[ShardPart]] = {}
        for part in self.each:
            by_key.setdefault(key(part), []).append(part)
        return {number: tuple(parts) for number, parts in by_key.items()}

    @cached_property
    def by_rank(self) -> dict[int, tuple[ShardPart, ...]]:
        return self.groups(lambda part: part.rank)

    @cached_property
    def by_micro(self) -> dict[int, tuple[ShardPart, ...]]:
        return self.groups(lambda part: part.micro)


def read_parts(trace: Path, step: int) -> BatchParts | None:
    """The recorded parts of a step; `None` if the run could not separate them."""
    path = trace / "parts" / f"step-{step:08d}"
    if not path.with_suffix(".json").exists():
        return None
    record = json.loads(path.with_suffix(".json").read_text())
    tensors = load_file(path.with_suffix(".safetensors"))
    each = []
    for number, row in enumerate(record["parts"]):
        known = {name: row[name] for name in ShardPart.__dataclass_fields__ if name in row}
        each.append(ShardPart(**known, tensors=of_stage(tensors, str(number))))
    uses: dict[str, list[Array]] = {}
    for use, gradient in sorted(of_stage(tensors, "if").items()):
        if name := use.partition("/gradient/")[2]:
            uses.setdefault(name, []).append(gradient)
    by_use = {name: tuple(gradients) for name, gradients in uses.items()}
    added = of_stage(tensors, "regularizer/gradient")
    return BatchParts(tuple(each), added, record["if"], by_use)


@dataclass(frozen=True)
class Evidence:
    """One difference, and all that is known of its step.

    `tensors_of_ranks` are those of every rank of the job, `facts` what its leader recorded before
    the first step; `mesh` arranges its ranks.
    """

    first: Difference
    tolerance: Tolerance
    mesh: Mesh
    right: RecordedTrace
    ours: RecordedTrace
    tensors_of_ranks: tuple[Tensors, ...]
    parts: BatchParts | None
    facts: Mapping[str, Any]
    cut: RecordedTrace | None = None
    """One process whose batch is cut as the ranks cut theirs."""

    @property
    def step(self) -> int:
        return self.first.step

    @property
    def stage(self) -> str:
        is_sum = self.first.stage == "weight" and self.first.tensor is None
        return SAMPLE_WEIGHT if is_sum else self.first.stage

    @property
    def ranks(self) -> int:
        return len(self.ours.ranks)

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh along which there are several ranks."""
        return {name: size for name, size in self.mesh.axes if size > 1}

    def wanted(self, stage: str, step: int | None = None) -> dict[str, Array]:
        """The tensors of a stage in one process, of the step that differs or another one."""
        return of_stage(self.right.tensors(self.step if step is None else step), stage)

    def actual(self, stage: str, rank: int = 0) -> dict[str, Array]:
        """Those of a rank of the job."""
        if rank >= len(self.tensors_of_ranks):
            return {}
        return of_stage(self.tensors_of_ranks[rank], stage)

    def before(self, stage: str) -> dict[str, Array]:
        """The tensors of a stage as the step began with them, equal in both."""
        return {} if self.step == START else self.wanted(stage, self.step - 1)

    def row(self, rank: int = 0) -> Mapping[str, Any]:
        """What a rank of the job recorded of the step."""
        return self.ours.ranks[rank][self.step]

    @property
    def wanted_row(self) -> Mapping[str, Any]:
        return self.right.ranks[0][self.step]

    def words_of(self, axis: str) -> str:
        """The ranks along an axis, in words."""
        size = self.axes[axis]
        if axis in (REPLICATE, SHARD) and len(self.axes) == 1:
            return f"the {size} ranks"
        return f"the {size} ranks along {axis!r}"

    @cached_property
    def scales(self) -> dict[str, float]:
        """The scale by which each tensor's difference is divided."""
        start = {} if self.step == START else of_stage(self.right.start, self.stage)
        how = self.tolerance.small, self.tolerance.floor
        return usual_sizes(self.stage, self.wanted(self.stage), start, *how)

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """The tensors of the stage that differ from one process on any rank."""
        ranks = range(max(1, len(self.tensors_of_ranks)))
        each = [self.beyond(self.actual(self.stage, rank)) for rank in ranks]
        return tuple(sorted({name for names in each for name in names}))

    @property
    def is_comparable(self) -> bool:
        """Whether everything that differs exists on both sides, with one shape, and is finite."""
        if self.stage in NUMBERS:
            rows = self.row(), self.wanted_row
            return all(isinstance(row.get(NUMBERS[self.stage]), (int, float)) for row in rows)
        ours, wanted = self.actual(self.stage), self.wanted(self.stage)
        return bool(self.differing) and all(
            name in ours
            and name in wanted
            and ours[name].shape == wanted[name].shape
            and np.isfinite(ours[name]).all()
            and np.isfinite(wanted[name]).all()
            for name in self.differing
        )

    def size(self, name: str, tensor: Array) -> float:
        """How far a tensor of the stage is from that of one process."""
        wanted = self.wanted(self.stage)
        if name not in wanted:
            return math.inf
        return tensor_difference(tensor, wanted[name]) / self.scales[name]

    def size_now(self, name: str) -> float:
        """How far a tensor of the stage is from that of one process, on any rank."""
        each = [self.actual(self.stage, rank) for rank in range(max(1, len(self.tensors_of_ranks)))]
        return max((self.size(name, ours[name]) for ours in each if name in ours), default=math.inf)

    def beyond(self, tensors: Tensors) -> list[str]:
        """Those of some tensors of the stage that differ from one process."""
        return [n for n, tensor in tensors.items() if not self.size(n, tensor) <= self.limit(n)]

    def limit(self, name: str) -> float:
        """How far a tensor of the stage may be off."""
        return max(self.tolerance.tensors, self.tolerance.noise.get(f"{self.stage}/{name}", 0.0))

    @cached_property
    def ratio(self) -> float | None:
        """The factor between the tensors that differ and those of one process."""
        ours, wanted = self.actual(self.stage), self.wanted(self.stage)
        dot = square = 0.0
        for name in self.differing:
            a, b = ours[name].astype(np.float64).ravel(), wanted[name].astype(np.float64).ravel()
            dot, square = dot + float(a @ b), square + float(b @ b)
        return dot / square if square else None

    # --- what the parts should add up to ---------------------------------------------------

    def sum_of(
        self, parts: Iterable[ShardPart], name: str, weights: Iterable[float]
    ) -> Array | float:
        """The sum of the parts' gradients, each times its weight."""
        total: Array | float = 0.0
        for part, weight in zip(parts, weights, strict=False):  # `repeat` has no end
            total = total + weight * part.gradient(name)
        return total

    @cached_property
    def usable(self) -> BatchParts | None:
        """The parts, if they add up to the gradient of one process; else `None`."""
        if self.parts is None or self.step == START or self.parts.weight <= 0:
            return None
        wanted = self.wanted("gradient")
        squares = math.fsum(norm(tensor) ** 2 for tensor in wanted.values())
        for name, tensor in wanted.items():
            added = self._mean(name) + self.regularizer_gradient(name)
            off = norm(np.asarray(tensor - added)) / max(math.sqrt(squares), 1e-300)
            if not off <= max(self.tolerance.tensors, 1e-9):
                return None
        return self.parts

    def _mean(self, name: str) -> Array | float:
        parts = self.parts
        assert parts is not None
        return self.sum_of(parts.each, name, repeat(1 / parts.weight))

    def regularizer_gradient(self, name: str) -> Array | float:
        """What the regularizer adds to the mean of the parts' gradients."""
        return 0.0 if self.parts is None else self.parts.regularizer.get(name, 0.0)


NUMBER = ""
"""The name under which a repaired number stands."""
VANISHED = 1 / 20
"""The largest part of a difference that may remain after its repair."""


@dataclass(frozen=True)
class Account:
    """A possible explanation: `repaired` are the job's numbers with the fault undone.

    These are tensors by name, or one number under `NUMBER`. `ratio` is the factor by which values
    are wrong, `ranks` show the fault, `tensors` have it (empty: all that differ).
    """

    says: str
    repaired: Mapping[str, Array | float]
    ratio: float | None = None
    ranks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    limit: float | None = None
    """The tolerance of the repaired numbers, if it is not that of the look."""


Pattern = Callable[[Evidence], Iterator[Account]]


@dataclass(frozen=True)
class Cause:
    """One row of the table: the stages that show it first, its pattern, and what to do."""

    name: str
    stages: tuple[str, ...]
    pattern: Pattern
    do: str


class CauseTable(list[Cause]):
    """The causes of one file, in the order in which they are tried.

    The more specific explanation of the same numbers comes first.
    """

    def row(self, name: str, *stages: str, do: str) -> Callable[[Pattern], Pattern]:
        """Add the pattern below as a row: the stages that show it first, and what to do."""

        def add(pattern: Pattern) -> Pattern:
            self.append(Cause(name, stages, pattern, do))
            return pattern

        return add


@dataclass(frozen=True)
class ConfirmedCause:
    """A cause that was confirmed; `residual` is the largest difference once it is undone."""

    cause: str
    says: str
    do: str
    ratio: float | None
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    residual: float
    limit: float
    or_else: tuple[str, ...] = field(default=())
    """Other causes that explain the same numbers as well."""

    def to_data(self) -> dict[str, Any]:
        """As a mapping that JSON can carry."""
        return {
            "name": self.cause,
            "says": self.says,
            "confirmed": True,
            "evidence": {
                "ratio": self.ratio,
                "ranks": list(self.ranks),
                "tensors": list(self.tensors),
                "left_after_repair": self.residual,
                "tolerance": self.limit,
            },
            "or_else": list(self.or_else),
            "do": self.do,
        }

    def __str__(self) -> str:
        lines = [f"cause: {self.says}"]
        lines += [f"    or: {other}" for other in self.or_else]
        residual = f"what is left is {self.residual:.1e}, and {self.limit:.1e} is allowed"
        return "\n".join([*lines, f"confirmed: undone in the trace, {residual}", f"do: {self.do}"])


def confirmed(cause: Cause, account: Account, evidence: Evidence) -> ConfirmedCause | None:
    """The cause, if this repair makes the difference vanish.

    What remains must be within the tolerance of the look, and a small part of the difference: a
    tolerance of 16 bits is wide enough for half of a difference.
    """
    if NUMBER in account.repaired:
        tensors: tuple[str, ...] = account.tensors
        key, floor = NUMBERS[evidence.stage], evidence.tolerance.floor
        wanted, before = evidence.wanted_row[key], evidence.row()[key]
        residuals = [number_difference(float(account.repaired[NUMBER]), wanted, floor)]
        was = [number_difference(before, wanted, floor)]
        limits = [evidence.tolerance.limit(evidence.first)]
    else:
        tensors = account.tensors or evidence.differing
        if not tensors or not set(tensors) <= account.repaired.keys():
            return None
        residuals = [evidence.size(name, np.asarray(account.repaired[name])) for name in tensors]
        was = [evidence.size_now(name) for name in tensors]
        limits = [evidence.limit(name) for name in tensors]
    if account.limit is None:
        limits = [min(limit, VANISHED * size) for limit, size in zip(limits, was, strict=True)]
    else:
        limits = [account.limit] * len(limits)
    if not all(size <= limit for size, limit in zip(residuals, limits, strict=True)):
        return None
    shown = account.ratio, account.ranks, tuple(tensors)
    return ConfirmedCause(cause.name, account.says, cause.do, *shown, max(residuals), max(limits))
