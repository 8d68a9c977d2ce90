"""Two traces side by side: the first difference, its step, its tensor, its size. Reads files only.

The order of comparison within a step is the order in which a step makes things, so that the first
difference is the nearest to its cause: samples, weight, loss, gradient and its norm, clipped
gradient, rate, weights, their average, buffers; with each tensor whether the ranks of the candidate
agree with each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from allranks.job.run_folder import read_rows
from allranks.tools.check.sizes import (
    Array,
    Rounding,
    norm,
    number_difference,
    tensor_difference,
    usual_sizes,
)
from allranks.training.record.trace import START, tensors_path

STAGES = ("gradient", "clipped gradient", "weight", "average", "buffer")
MOVED = ("weight", "average")  # by the optimizer, from gradients that may be rounding only
SMALL = 1e-3  # a tensor counts as at least this part of what is usual in its stage
NORM = 1e-6  # the length of a gradient is summed in another order where it lies in other pieces


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that counts as equal: norm-relative for tensors, relative for numbers.

    `stages` are compared; `exact` requires equal bits. `small` and `floor` set the scale to which a
    tensor's difference is relative (`sizes.usual_sizes`); `noise` allows more for single tensors.
    """

    tensors: float
    numbers: float
    stages: tuple[str, ...] = STAGES
    exact: bool = False
    small: float = SMALL
    floor: float = 0.0
    lengths: float = 0.0
    """How far the length of a gradient may be off: in 32 bits it adds up millions of squares."""
    skips_alike: bool = True
    """Whether both must skip the same steps for their loss scale."""
    noise: Mapping[str, float] = field(default_factory=dict)

    def limit(self, difference: Difference) -> float:
        """How large this difference may be."""
        if self.exact:
            return NORM if difference.stage == "gradient norm" else 0.0
        if difference.tensor is None:
            is_length = difference.stage == "gradient norm"
            return max(self.numbers, self.lengths) if is_length else self.numbers
        return max(self.tensors, self.noise.get(difference.name, 0.0))


@dataclass(frozen=True)
class Difference:
    """One difference: where, and how large. `hint` names the usual reason."""

    step: int
    stage: str
    tensor: str | None
    size: float | None
    text: str
    hint: str

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.tensor}"

    @property
    def where(self) -> str:
        """Which stage differs, in which step and tensor, and by how much."""
        where = "before the first step" if self.step == START else f"at step {self.step}"
        tensor = f", tensor {self.tensor!r}" if self.tensor else ""
        return f"{self.stage} differs {where}{tensor}: {self.text}"

    def __str__(self) -> str:
        return f"{self.where}\nlooks like: {self.hint}"


@dataclass(frozen=True)
class Comparison:
    """The first difference, if any, and the largest difference that counted as equal."""

    first: Difference | None
    steps: int
    largest: float
    largest_at: str
    passed_over: tuple[str, ...] = ()
    """Weights that were not compared: their gradient is nothing but rounding."""


class RecordedTrace:
    """The trace of one run: rows and tensors by step, of all of its ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(path.glob("rank-*.jsonl"))
        self.ranks = [{int(row["step"]): row for row in read_rows(file)} for file in files]
        self.tensors = lru_cache(2)(self._tensors)
        self._start: dict[str, Array] | None = None

    @property
    def steps(self) -> list[int]:
        return sorted(self.ranks[0])

    @property
    def start(self) -> dict[str, Array]:
        """The leader's tensors before the first step."""
        if self._start is None:
            self._start = self._tensors(START)
        return self._start

    @property
    def draws(self) -> bool:
        """Whether forward or loss drew from torch's own generator in any step."""
        return any(row.get("draws") for rank in self.ranks for row in rank.values())

    def _tensors(self, step: int) -> dict[str, Array]:
        """The leader's tensors of one step, by stage/name."""
        return dict(load_file(tensors_path(self.path, step)))


def compare(reference: RecordedTrace, candidate: RecordedTrace, tolerance: Tolerance) -> Comparison:
    """The first difference between a run of one process and one of any number of ranks."""
    walk = _Walk(reference, candidate, tolerance)
    largest, largest_at, compared = 0.0, "nothing", 0

    def comparison(first: Difference | None) -> Comparison:
        return Comparison(first, compared, largest, largest_at, walk.rounding.in_words())

    for step in reference.steps:
        if step not in candidate.ranks[0]:
            return comparison(_ended(step, "the candidate ended before", "lost samples"))
        for difference in walk.differences(step):
            size = math.inf if difference.size is None else difference.size
            if not size <= tolerance.limit(difference):
                return comparison(difference)
            if size > largest:
                largest = size
                where = " ".join(filter(None, (difference.stage, difference.tensor)))
                largest_at = f"{where} at step {step}"
        compared += step != START
    extra = sorted(set(candidate.ranks[0]) - set(reference.steps))
    if extra:
        return comparison(_ended(extra[0], "the reference ended before", "repeated samples"))
    return comparison(None)


def noise_between(
    reference: RecordedTrace, candidate: RecordedTrace, tolerance: Tolerance
) -> dict[str, float]:
    """How far rounding moves each tensor, by stage/name: the largest of all steps of both traces.

    In a tensor of few numbers rounding cancels by chance, so that more is taken for it: four times
    what is found for a single number, less the more numbers there are.
    """
    walk, noise = _Walk(reference, candidate, tolerance), dict[str, float]()
    for step in set(reference.steps) & set(candidate.ranks[0]):
        tensors = reference.tensors(step)
        for difference in walk.differences(step):
            name, size = difference.name, difference.size
            if name in tensors and size is not None and math.isfinite(size):
                by_chance = 1 + 3 / math.sqrt(max(1, tensors[name].size))
                noise[name] = max(by_chance * size, noise.get(name, 0.0))
    return noise


def _ended(step: int, text: str, hint: str) -> Difference:
    return Difference(step, "number of steps", None, None, text, hint)


class _Walk:
    """Goes through the steps of two traces in order."""

    def __init__(
        self, reference: RecordedTrace, candidate: RecordedTrace, tolerance: Tolerance
    ) -> None:
        self.reference, self.candidate, self.tolerance = reference, candidate, tolerance
        self.rounding = Rounding()
        self.typical_loss = max(map(_magnitude, reference.ranks[0].values()))

    def differences(self, step: int) -> Iterator[Difference]:
        """All differences of one step, of any size, in the order in which the step computes."""
        rows = [rank[step] for rank in self.candidate.ranks if step in rank]
        wanted = self.reference.ranks[0][step]
        skipped = False
        if step != START:
            yield from self._numbers(step, rows, wanted)
            skipped = bool(wanted["overflow"] or rows[0]["overflow"]) and not self.tolerance.exact
        if skipped:  # nothing of such a step is left to compare
            return
        if all(row["digests"] == wanted["digests"] for row in rows):
            yield from self._rate(step, rows, wanted)
        else:
            yield from self._stages(step, rows, wanted)

    def _numbers(
        self, step: int, rows: list[dict[str, Any]], wanted: dict[str, Any]
    ) -> Iterator[Difference]:
        ids = [number for row in rows for number in row["ids"]]
        if ids != wanted["ids"]:
            yield Difference(step, "samples", None, None, *samples_in_words(ids, wanted["ids"]))
        for stage in ("samples", "weight"):
            yield from _number(step, stage, rows[0][stage], wanted[stage], 0.0, rows[0])
        eps = 1e-6 * self.typical_loss  # if losses begin at 1, one of 1e-16 is zero
        scale = max(_magnitude(wanted), eps, self.tolerance.floor**2)
        yield from _number(step, "loss", rows[0]["loss"], wanted["loss"], scale, rows[0])
        if self.tolerance.skips_alike:
            flags = float(rows[0]["overflow"]), float(wanted["overflow"])
            yield from _number(step, "overflow", *flags, 0.0, rows[0])

    def _stages(
        self, step: int, rows: list[dict[str, Any]], wanted: dict[str, Any]
    ) -> Iterator[Difference]:
        ours, theirs = self.candidate.tensors(step), self.reference.tensors(step)
        if "weight" in self.tolerance.stages and not self.tolerance.exact:
            limit, floor = self.tolerance.tensors, self.tolerance.floor
            gradients = of_stage(ours, "gradient"), of_stage(theirs, "gradient")
            self.rounding.add(*gradients, limit, floor)
        for stage in STAGES:
            if stage in self.tolerance.stages or step == START:
                both = of_stage(ours, stage), of_stage(theirs, stage)
                yield from self._tensors(step, stage, *both, rows)
            if stage == "gradient" and step != START and stage in self.tolerance.stages:
                norms = rows[0]["grad_norm"], wanted["grad_norm"]
                yield from _number(step, "gradient norm", *norms, self.tolerance.floor, rows[0])
            if stage == "clipped gradient":
                yield from self._rate(step, rows, wanted)

    def _rate(
        self, step: int, rows: list[dict[str, Any]], wanted: dict[str, Any]
    ) -> Iterator[Difference]:
        if step != START and self.tolerance.skips_alike:  # a schedule counts updates
            rates = rows[0]["learning_rate"], wanted["learning_rate"]
            yield from _number(step, "learning rate", *rates, 0.0, rows[0])

    def _tensors(
        self,
        step: int,
        stage: str,
        ours: dict[str, Array],
        theirs: dict[str, Array],
        rows: list[dict[str, Any]],
    ) -> Iterator[Difference]:
        drifting = _drifting(stage, rows)
        sizes = self._sizes(step, stage, ours, theirs)
        beyond = sum(size > self.tolerance.tensors for size in sizes.values())
        for name in sorted({*ours, *theirs, *drifting}):
            if name not in ours or name not in theirs:
                which = "candidate" if name not in ours else "reference"
                hint = "a parameter that some ranks do not use, or one that is trained in one run"
                yield Difference(step, stage, name, math.inf, f"the {which} has none", hint)
                continue
            drifts = ""
            if name in drifting:
                drifts = f"rank {drifting[name]} does not hold what rank 0 holds"
            if name in sizes:
                size, everywhere = sizes[name], beyond == len(theirs)
                text = f"relative difference {size:.2e} ({beyond} of {len(theirs)} tensors differ)"
                hint = self._hint(step, stage, name, ours[name], theirs[name], everywhere)
                if drifts and stage != "buffer":
                    text, hint = f"{text}, and {drifts}", HINTS_OF_DRIFTS[_base(stage)]
                yield Difference(step, stage, name, size, text, hint)
            if drifts:
                hint = hint_of_buffer(name) if stage == "buffer" else HINTS_OF_DRIFTS[_base(stage)]
                yield Difference(step, stage, name, math.inf, drifts, hint)

    def _sizes(
        self, step: int, stage: str, ours: dict[str, Array], theirs: dict[str, Array]
    ) -> dict[str, float]:
        """The relative difference of each tensor whose bits are not equal."""
        start = {} if step == START else of_stage(self.reference.start, stage)
        scales = usual_sizes(stage, theirs, start, self.tolerance.small, self.tolerance.floor)
        sizes = {}
        for name in sorted(ours.keys() & theirs.keys()):
            a, b = ours[name], theirs[name]
            if a.tobytes() == b.tobytes():
                continue
            mask = self.rounding.mask(name) if stage in MOVED else None
            size = tensor_difference(a, b, mask if a.shape == b.shape else None) / scales[name]
            if size or (self.tolerance.exact and mask is None):
                sizes[name] = size or math.ulp(0.0)  # other bits, as of a zero with a sign
        return sizes

    def _hint(self, step: int, stage: str, name: str, a: Array, b: Array, everywhere: bool) -> str:
        if stage == "buffer":
            return hint_of_buffer(name)
        if stage in MOVED:
            before = None
            if step != START:
                before = self.reference.tensors(step - 1).get(f"{stage}/{name}")
            return hint_of_update(stage, a, b, before)
        return hint_of_gradient(a, b, len(self.candidate.ranks), everywhere)


def _magnitude(row: Mapping[str, Any]) -> float:
    """The mean magnitude of the losses of a step, whose sum may cancel."""
    sizes = [0.0]
    with_weight = float(row.get("weight") or 0.0)
    if row.get("magnitude") is not None and with_weight > 0:
        sizes.append(float(row["magnitude"]) / with_weight)
    if "loss" in row:
        sizes.append(abs(float(row["loss"])))
    return max(size for size in sizes if math.isfinite(size))


def of_stage(tensors: Mapping[str, Array], stage: str) -> dict[str, Array]:
    """The tensors of a stage, of those by stage/name."""
    prefix = stage + "/"
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _base(stage: str) -> str:
    return "gradient" if "gradient" in stage else stage


def _drifting(stage: str, rows: list[dict[str, Any]]) -> dict[str, int]:
    """Tensors that are unequal among the candidate's ranks, each with the first unequal rank."""
    ranks: dict[str, int] = {}
    prefix = stage + "/"
    for rank, row in enumerate(rows[1:], start=1):
        for name in rows[0]["digests"].keys() | row["digests"].keys():
            other = row["digests"].get(name) != rows[0]["digests"].get(name)
            if other and name.startswith(prefix):
                ranks.setdefault(name.removeprefix(prefix), rank)
    return ranks


def _number(
    step: int, stage: str, actual: Any, wanted: Any, scale: float, row: Mapping[str, Any]
) -> Iterator[Difference]:
    size = number_difference(actual, wanted, scale)
    if size:
        hint = hint_of_number(stage, row)
        yield Difference(step, stage, None, size, f"{actual!r}, not {wanted!r}", hint)


# --- tolerances ----------------------------------------------------------------------------------
# What still counts as equal in each precision.
#
# * fp64: legitimate reordering of sums stays below 1e-13, real faults are above 1e-8.
# * others, `CLOSE`: against one process that cuts its batches as the ranks do. The arithmetic of
#   each part is the same then, and only the order of the sums over the parts differs, in 32 bits:
#   bf16 hides no more than fp32.
# * others, `coarse`: against one process with the whole batch at once. Only rounding in that
#   precision may differ, relative to all gradients together.
# * bits: nothing may differ.


STEP_TENSORS = ("gradient", "clipped gradient", "buffer")
FP64 = Tolerance(tensors=1e-10, numbers=1e-10, floor=1e-5)
BITS = Tolerance(tensors=0.0, numbers=0.0, exact=True)
CLOSE = Tolerance(1e-5, 1e-5, STEP_TENSORS, floor=1e-3, lengths=1e-2)
UNIT = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
CEILING = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 5e-2, "bf16": 2e-1}
NOISE_FACTOR = 10.0


def coarse(precision: str) -> Tolerance:
    """For two runs of which one passes the whole batch through the model at once."""
    ceiling = CEILING[precision]
    wide = dataclasses.replace(CLOSE, tensors=ceiling, numbers=ceiling)
    return dataclasses.replace(wide, small=1.0, skips_alike=False)


def close(precision: str, noise: Mapping[str, float]) -> Tolerance:
    """For two runs that cut their batches alike; `noise` is their distance from the whole batch.

    Where gradients cancel, sums in another order differ by more than usual. Cutting a batch shows
    by how much, in units of its precision; sums are made in units of fp32.
    """
    factor = NOISE_FACTOR * UNIT["fp32"] / UNIT[precision]
    allowed = {name: factor * size for name, size in noise.items()}
    return dataclasses.replace(CLOSE, noise=allowed)


# --- hints ---------------------------------------------------------------------------------------
# The usual reason for a difference: one line for each kind that has been met.


BATCHNORM = ("running_mean", "running_var", "num_batches_tracked")
BATCHNORM_OF_KERAS = ("moving_mean", "moving_variance")
HINTS_OF_NUMBERS = {
    "samples": "samples counted twice or lost",
    "learning rate": "a schedule that is stepped by each rank",
    "gradient norm": "a norm of one rank, or taken at another moment",
    "overflow": "one run skipped this step: its gradient, or its loss scale, is another",
}
HINTS_OF_DRIFTS = {
    "gradient": "a gradient that is not summed over the ranks: zero_grad() in forward or loss, a "
    "layer unfrozen on the way, or a hook that acts on one rank",
    "weight": "each rank updates by itself: an optimizer or callback that draws or counts on its "
    "own, or a weight that the model writes in forward",
    "average": "each rank averages by itself",
}
MEAN_OF_MEANS = (
    "a mean of means with uneven counts, or gradients changed before they were summed (a hook, a "
    "function that scales by its batch)"
)


def hint_of_number(stage: str, row: Mapping[str, Any]) -> str:
    """For a number of a step; `row` is the candidate's record of that step."""
    if stage == "weight":
        return (
            "the number of loss values follows how the batch is cut, as with padding and no "
            "weight(batch); or weights counted twice or lost"
        )
    if stage != "loss":
        return HINTS_OF_NUMBERS.get(stage, "an evaluation of other weights, or of other samples")
    hint = "other random numbers, or samples that depend on each other: the weights are the same"
    if row.get("draws"):
        hint += "; forward or loss draws from torch's generator in a way that is not keyed "
        hint += "(torch.poisson, C++, or by function where ranks hold stages or parts), so the "
        hint += "numbers follow the micro-batch"
    return hint


def hint_of_buffer(tensor: str) -> str:
    """For a buffer: those of BatchNorm are the engine's, the others the model's own."""
    if tensor.rpartition(".")[2] == BATCHNORM[2]:
        return "BatchNorm counted a step more than once, or not at all"
    if tensor.rpartition(".")[2] in BATCHNORM or tensor.endswith(BATCHNORM_OF_KERAS):
        return "BatchNorm statistics of one rank only, or updated more than once"
    return "a buffer that the model writes itself: it follows the samples that a rank sees"


def hint_of_update(stage: str, ours: Array, theirs: Array, before: Array | None) -> str:
    """For a weight or its average: the gradients of the step were equal.

    `before` is `None` for the first weights.
    """
    if before is None and stage == "weight":
        return (
            "other first weights: written in optimizer(model), by a hook or a thread, or drawn "
            "from a generator that is not torch's"
        )
    if before is not None and before.shape == theirs.shape and stage == "weight":
        if np.array_equal(ours, before):
            return "an update that was lost: the weight is as it was"
        if np.array_equal(theirs, before):
            return "an update that one process does not make"
    if stage == "average":
        return "an average that was taken at another moment, or with another decay"
    return (
        "an update made with another gradient, or by an optimizer or callback that draws or "
        "counts on its own"
    )


def hint_of_gradient(ours: Array, theirs: Array, ranks: int, everywhere: bool) -> str:
    """For a gradient: a factor, or something less regular."""
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return "values that are not finite in one of the two runs"
    norms = norm(a) * norm(b)
    if norms == 0:
        return "a gradient that was lost, or that one process does not have"
    ratio, cosine = float(a @ b) / norm(b) ** 2, float(a @ b) / norms
    if cosine > 1 - 1e-6:
        for factor, name in (
            (ranks, "a sum where the mean is wanted"),
            (1 / ranks, "divided twice"),
        ):
            if ranks > 1 and abs(ratio / factor - 1) < 1e-3:
                return f"{name} (every value times {ratio:.4g})"
        return f"scaled by {ratio:.6g}: a weight, a clip or a norm of one rank"
    return (
        MEAN_OF_MEANS
        if everywhere
        else "some parameters not summed, or sent before they were finished"
    )


def samples_in_words(ids: list[int], wanted: list[int]) -> tuple[str, str]:
    """How the samples of a step differ, and the hint."""
    missing, extra = set(wanted) - set(ids), set(ids) - set(wanted)
    text = f"{len(missing)} samples missing, {len(extra)} not of this batch"
    if len(ids) != len(set(ids)):
        twice = len(ids) - len(set(ids))
        return f"{twice} samples twice, {text}", "ranks read the same data"
    if not missing and not extra:
        return "the same samples in another order", "shards in another order"
    return text, "a sampler that shares the data out wrongly"
