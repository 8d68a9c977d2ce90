"""Two traces side by side: the first difference, its step, its tensor, its size. Reads files only.

The order of comparison within a step is the order in which a step makes things, so that the first
difference is the nearest to its cause: samples, weight, loss, gradient, clipped gradient, rate,
weights, buffers; then whether the ranks of the candidate agree with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from allranks.record import read_rows

Array = NDArray[Any]
START = -1
STAGES = ("gradient", "clipped gradient", "weight", "buffer")
SMALL = 1e-3  # a tensor counts as at least this part of the norm of all tensors of its stage


@dataclass(frozen=True)
class Tolerance:
    """What still counts as equal: norm-relative for tensors, relative for numbers.

    `stages` are compared; `exact` asks for equal bits.
    """

    tensors: float
    numbers: float
    stages: tuple[str, ...] = STAGES
    exact: bool = False


@dataclass(frozen=True)
class Difference:
    """One difference: where, and how large. `hint` says what usually looks like this."""

    step: int
    stage: str
    tensor: str | None
    size: float | None
    found: str
    hint: str

    def __str__(self) -> str:
        where = "before the first step" if self.step == START else f"at step {self.step}"
        tensor = f", tensor {self.tensor!r}" if self.tensor else ""
        return f"{self.stage} differs {where}{tensor}: {self.found}\nlooks like: {self.hint}"


@dataclass(frozen=True)
class Comparison:
    """What came out: the first difference, if any, and the largest size that counted as equal."""

    first: Difference | None
    steps: int
    largest: float
    largest_at: str
    passed_over: tuple[str, ...] = ()
    """Tensors whose weights were not compared: their gradient is nothing but rounding."""


class Trace:
    """The trace of one run: rows and tensors by step, of all of its ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(path.glob("rank-*.jsonl"))
        self.ranks = [{int(row["step"]): row for row in read_rows(file)} for file in files]

    @property
    def steps(self) -> list[int]:
        return sorted(self.ranks[0])

    def tensors(self, step: int) -> dict[str, Array]:
        """The leader's tensors of one step, by stage/name."""
        name = "start" if step == START else f"step-{step:08d}"
        return dict(load_file(self.path / "tensors" / f"{name}.safetensors"))


def compare(reference: Trace, candidate: Trace, tolerance: Tolerance) -> Comparison:
    """The first difference between a run of one process and one of any number of ranks."""
    largest, largest_at, compared = 0.0, "nothing", 0
    passed_over: set[str] = set()

    def found(first: Difference | None) -> Comparison:
        return Comparison(first, compared, largest, largest_at, tuple(sorted(passed_over)))

    for step in reference.steps:
        if step not in candidate.ranks[0]:
            return found(_ended(step, "the candidate ended before", "lost samples"))
        noise = set() if tolerance.exact else _rounding_only(reference.tensors(step), tolerance)
        passed_over |= noise
        for difference in _differences(reference, candidate, step, tolerance):
            if difference.stage == "weight" and difference.tensor in noise:
                continue
            if not _within(difference, tolerance):
                return found(difference)
            assert difference.size is not None
            if difference.size > largest:
                largest = difference.size
                largest_at = f"{difference.stage} {difference.tensor} at step {step}"
        compared += step != START
    extra = sorted(set(candidate.ranks[0]) - set(reference.steps))
    if extra:
        return found(_ended(extra[0], "the reference ended before", "repeated samples"))
    return found(None)


def _ended(step: int, found: str, hint: str) -> Difference:
    return Difference(step, "number of steps", None, None, found, hint)


def _rounding_only(tensors: dict[str, Array], tolerance: Tolerance) -> set[str]:
    """Parameters whose gradient is zero but for rounding, as of a bias before BatchNorm.

    An optimizer such as AdamW makes steps of that rounding, so their weights prove nothing.
    """
    prefix = "gradient/"
    norms = {n.removeprefix(prefix): _norm(t) for n, t in tensors.items() if n.startswith(prefix)}
    limit = tolerance.tensors * float(np.sqrt(sum(norm**2 for norm in norms.values())))
    return {name for name, norm in norms.items() if 0 < norm <= limit}


def _within(difference: Difference, tolerance: Tolerance) -> bool:
    limit = tolerance.tensors if difference.tensor is not None else tolerance.numbers
    return difference.size is not None and difference.size <= (0.0 if tolerance.exact else limit)


def _differences(
    reference: Trace, candidate: Trace, step: int, tolerance: Tolerance
) -> Iterator[Difference]:
    """Everything that differs in one step, however little, in the order of the step."""
    rows, wanted = [rank[step] for rank in candidate.ranks], reference.ranks[0][step]
    if step != START:
        ids = [number for row in rows for number in row["ids"]]
        if ids != wanted["ids"]:
            yield _samples(step, ids, wanted["ids"])
        for stage in ("samples", "weight", "loss"):
            yield from _number(step, stage, rows[0][stage], wanted[stage])
    ours, theirs = candidate.tensors(step), reference.tensors(step)
    for stage in STAGES:
        if stage in tolerance.stages or step == START:
            yield from _tensors(step, stage, ours, theirs, len(rows), tolerance)
        if stage == "clipped gradient" and step != START:
            yield from _number(
                step, "learning rate", rows[0]["learning_rate"], wanted["learning_rate"]
            )
    for rank, row in enumerate(rows[1:], start=1):
        for name, digest in rows[0]["digests"].items():
            if row["digests"].get(name) != digest:
                stage, _, tensor = name.partition("/")
                found = f"rank {rank} does not hold what rank 0 holds"
                yield Difference(step, stage, tensor, float("inf"), found, "a replica that drifts")


def _samples(step: int, ids: list[int], wanted: list[int]) -> Difference:
    missing, extra = set(wanted) - set(ids), set(ids) - set(wanted)
    found = f"{len(missing)} samples missing, {len(extra)} not of this batch"
    hint = "a sampler that shares the data out wrongly"
    if len(ids) != len(set(ids)):
        found, hint = (
            f"{len(ids) - len(set(ids))} samples twice, {found}",
            "ranks read the same data",
        )
    elif not missing and not extra:
        found, hint = "the same samples in another order", "shards in another order"
    return Difference(step, "samples", None, None, found, hint)


def _number(step: int, stage: str, found: Any, wanted: Any) -> Iterator[Difference]:
    if found == wanted:
        return
    ours, theirs = float(found), float(wanted)
    size = abs(ours - theirs) / max(abs(theirs), 1e-30)
    hint = "samples counted twice or lost" if stage != "loss" else "other random numbers or weights"
    if stage == "learning rate":
        hint = "a schedule that is stepped by each rank"
    yield Difference(step, stage, None, size, f"{ours!r}, not {theirs!r}", hint)


def _tensors(
    step: int,
    stage: str,
    ours: dict[str, Array],
    theirs: dict[str, Array],
    ranks: int,
    tolerance: Tolerance,
) -> Iterator[Difference]:
    prefix = stage + "/"
    wanted = {name: t for name, t in theirs.items() if name.startswith(prefix)}
    total = float(np.sqrt(sum(_norm(tensor) ** 2 for tensor in wanted.values())))
    sizes = {}
    for name in sorted(wanted.keys() | {n for n in ours if n.startswith(prefix)}):
        if name not in ours or name not in wanted:
            which = "candidate" if name not in ours else "reference"
            found = f"the {which} has none"
            hint = "a parameter that some ranks do not use"
            yield Difference(step, stage, name.removeprefix(prefix), float("inf"), found, hint)
            continue
        a, b = ours[name], wanted[name]
        if a.tobytes() != b.tobytes():
            scale = max(_norm(b), SMALL * total, 1e-30)
            sizes[name] = _norm(a.astype(np.float64) - b.astype(np.float64)) / scale
    beyond = sum(size > (0.0 if tolerance.exact else tolerance.tensors) for size in sizes.values())
    for name, size in sizes.items():
        a, b = ours[name], wanted[name]
        found = f"relative difference {size:.2e} ({beyond} of {len(wanted)} tensors differ)"
        hint = _hint(stage, a, b, ranks, everywhere=beyond == len(wanted))
        yield Difference(step, stage, name.removeprefix(prefix), size, found, hint)


def _hint(stage: str, ours: Array, theirs: Array, ranks: int, everywhere: bool) -> str:
    if stage == "buffer":
        return "BatchNorm statistics of one rank only, or updated more than once"
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    norms = _norm(a) * _norm(b)
    if stage == "weight" or norms == 0:
        return "an update that was lost, or made with another gradient"
    ratio, cosine = float(a @ b) / _norm(b) ** 2, float(a @ b) / norms
    if cosine > 1 - 1e-6:
        for factor, name in (
            (ranks, "a sum where the mean is wanted"),
            (1 / ranks, "divided twice"),
        ):
            if ranks > 1 and abs(ratio / factor - 1) < 1e-3:
                return f"{name} (every value times {ratio:.4g})"
        return f"scaled by {ratio:.6g}: a weight, a clip or a norm of one rank"
    if everywhere:
        return "a mean of means with uneven counts, or gradients changed before they were summed"
    return "some parameters not summed, or sent before they were finished"


def _norm(tensor: Array) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64).ravel()))
