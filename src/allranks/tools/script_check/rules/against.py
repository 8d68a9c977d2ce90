"""Compares the recorded steps of two scripts, and names the first difference and its cause.

The order of a step: weights before the first one, samples, losses, gradients, numbers of the
optimizer, weights, their updates, buffers. A difference is relative to the norm of its tensor,
which counts as at least a small part of the largest of its kind so far. Worlds of one size are
compared rank by rank; else each rank is compared with the first of the other side.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allranks.errors import ProgramError, RequestError
from allranks.launcher.scripts.plan import CommandRequest
from allranks.tools.check.operators import OperatorSearch, compare_operators
from allranks.tools.check.sizes import Array, Rounding, factors, norm, tensor_difference
from allranks.tools.script_check.record.steps import (
    BEFORE,
    BUFFER,
    GRADIENT,
    LOSS,
    RATE,
    WEIGHT,
    WRAPPERS,
)
from allranks.tools.script_check.rules.facts import (
    FACTS,
    line_of,
    names_among,
    place_of,
    read_ranks,
    watched_request,
)
from allranks.tools.script_check.rules.watch import SCALE_FREE, watched_in
from allranks.training.record.trace import OPERATORS

LIMITS = {"float64": 1e-10, "float32": 2**-11.5, "float16": 2**-5, "bfloat16": 2**-3.5}
"""1e-10 in 64 bits, else the square root of a rounding. `limit_of` knows the other types."""
COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
SMALL = 1e-3  # of the largest root mean square of a kind so far
WHOLE = -1  # in the place of a rank: the parts of all ranks, added up
NAMES_OF_WRAPPERS = ("module", *(name.removesuffix(".") for name in WRAPPERS))
SAMPLES, UPDATE = "samples", "update"
ROUNDINGS = 8  # of a weight, by which an update may differ
PLACES = {SAMPLES: "forward", LOSS: "backward", GRADIENT: "backward"}
EXPLAINED_BY = {
    BEFORE: "weights-begin-unequal",
    SAMPLES: "same-samples-on-ranks sampler-for-other-ranks same-order-each-epoch",
    LOSS: "accumulation-not-divided mean-of-unequal-means",
    GRADIENT: "mean-of-unequal-means step-without-reduction gradients-of-one-rank replicas-drift",
    RATE: "schedule-too-fast schedule-ahead",
}
"""By kind of difference the findings that explain it, if `check` has them on one side alone."""


def limit_of(dtype: str) -> float:
    """The limit of a type: integers are exact, and an unknown type has the coarsest."""
    is_exact = dtype.startswith(("int", "uint", "bool"))
    return 0.0 if is_exact else LIMITS.get(COMPLEX.get(dtype, dtype), max(LIMITS.values()))


class RecordedScript:
    """The recorded steps of one command."""

    def __init__(self, folder: Path, command: str) -> None:
        self.watched, self.ranks = watched_in(folder), read_ranks(folder)
        self.steps = {rank.rank: facts for rank in self.ranks if (facts := rank.all("values"))}
        if not self.steps:
            raise RequestError(
                asked=f"to compare the steps of {command}",
                found="no optimizer of torch made a step in any process of it",
                why="two scripts are compared at the steps of their optimizers",
                do="give two commands that train",
            )
        self._numbers = {rank: np.fromfile(facts[0]["file"]) for rank, facts in self.steps.items()}
        first = next(rank for rank in self.ranks if rank.rank in self.steps)
        self.first = self.steps[first.rank]
        self.count = sum(first.last("counts", "steps", {}).values()) or len(self.first)

    def tensors(self, kind: str, step: int) -> dict[str, dict[str, Any]]:
        """The tensors of a kind at a step, with `values` by rank; of losses the mean over ranks."""
        tensors: dict[str, dict[str, Any]] = {}
        for rank, facts in self.steps.items():
            for about in facts[step]["tensors"].get(kind, ()) if step < len(facts) else ():
                values = tensors.setdefault(about["name"], {**about, "values": {}})["values"]
                at = WHOLE if about["parts"] else rank
                if not about["why"]:
                    others = values.get(at, 0.0) if about["parts"] else 0.0
                    values[at] = self._numbers[rank][slice(*about["at"])] + others
        for tensor in tensors.values() if kind == LOSS else ():
            tensor["values"] = {WHOLE: np.mean([*tensor["values"].values()], axis=0)}
        return tensors

    def samples(self, first: int, last: int) -> dict[str, list[Counter[int]]]:
        """Digests of the samples of some steps by type and shape, for each rank; none of many."""
        samples: dict[str, list[Counter[int]]] = defaultdict(list)
        many = dict[str, list[Counter[int]]]()
        for facts in self.steps.values():
            of_rank: dict[str, Counter[int]] = defaultdict(Counter)
            for kind, rows in (item for fact in facts[first:last] for item in fact["rows"].items()):
                of_rank[kind].update(rows or ())
                many |= {kind: []} if rows is None else {}
            for kind, counts in of_rank.items():
                samples[kind].append(counts)
        return samples | many


@dataclass(frozen=True)
class TensorPair:
    """A tensor of one rank, and what it is compared with; `limit` is relative to the norm."""

    name: str
    rank: int
    value: Array
    true: Array
    elements: int
    limit: float
    rounding: float = 0.0  # a difference up to it is none

    def size(self, least: float = 0.0, times: float = 1.0) -> float:
        """The difference relative to the norm; `least` is a root mean square."""
        size = tensor_difference(self.value * times, self.true)
        size *= size > self.rounding
        scale = max(norm(self.true), least * self.elements**0.5)
        return size / scale if scale else math.inf if size else 0.0


@dataclass(frozen=True)
class StepDifference:
    """The first difference. `ranks` are those of the checked command that differ (none: all)."""

    step: int
    kind: str
    tensor: str
    text: str
    where: tuple[str, int] | None
    ranks: tuple[int, ...] = ()
    cause: str = ""

    def __str__(self) -> str:
        ranks = f"rank {', '.join(map(str, self.ranks))}: " if self.ranks else ""
        return (
            f"step {self.step}, {self.kind} {self.tensor!r}: not the same as with --against\n"
            f"  place:   {place_of(self.where)}\n"
            f"  differs: {ranks}{self.text}\n"
            f"  cause:   {self.cause or 'unknown'}"
        )


class StepComparison:
    """The first steps of two scripts, compared."""

    def __init__(self, reference: RecordedScript, candidate: RecordedScript) -> None:
        self.sides, self.counts = (reference, candidate), (candidate.count, reference.count)
        self.sizes = len(reference.ranks), len(candidate.ranks)
        self.notes: dict[str, str] = {}
        self.left_out = dict.fromkeys(why for side in self.sides for why in side.watched.unwatched)
        self._optimizers: list[int] = [fact["optimizer"] for fact in candidate.first]
        self._largest: dict[tuple[int, str], float] = {}
        self._rounding: dict[int, Rounding] = defaultdict(Rounding)  # by number of the optimizer
        self._is_scale_free = any(fact["name"] in SCALE_FREE for fact in candidate.first)
        self.compared = min(len(side.first) for side in self.sides)
        first = next(filter(None, map(self._first_of, range(self.compared))), None)
        self.difference = first and dataclasses.replace(first, cause=self._cause(first))
        is_equal = first is None and self.counts[0] == self.counts[1]
        self.equal = None if is_equal and self.left_out else is_equal  # None: undecided
        words = [word for rounding in self._rounding.values() for word in rounding.in_words()]
        if self._is_scale_free and words:
            why = "their gradient is rounding, of which the optimizer makes whole steps"
            self.notes[WEIGHT] = f"weights not compared, {why}: {names_among(words)}"

    def limit(self, step: int) -> float:
        """How far a tensor of this step may be off, relative to its norm: in its coarsest type."""
        types = [fact["autocast"] for fact in (side.first[step] for side in self.sides)]
        types += [t["dtype"] for side in self.sides for t in side.tensors(WEIGHT, step).values()]
        return max(limit_of(dtype) for dtype in types if dtype)

    def to_data(self) -> dict[str, Any]:
        """As a mapping that JSON can carry."""
        difference = self.difference and dataclasses.asdict(self.difference)
        values = {"equal": self.equal, "difference": difference, "notes": [*self.notes.values()]}
        return {**values, "not_compared": list(self.left_out), "steps": self.counts}

    def __str__(self) -> str:
        lines = [str(self.difference)] if self.difference else []
        lines += [f"note: {note}" for note in self.notes.values()]
        lines += [f"not compared: {reason}" for reason in self.left_out]
        counts = f"{self.counts[0]} steps, and {self.counts[1]} with --against"
        if self.counts[0] != self.counts[1]:
            lines.append(f"the steps of the two do not correspond: {counts}")
        equal = {True: "equal", False: "a difference", None: "undecided"}[self.equal]
        return "\n".join([*lines, f"{self.compared} steps compared ({counts}): {equal}"])

    def _first_of(self, step: int) -> StepDifference | None:
        """The first difference of a step. Samples and losses that change no gradient are notes."""
        if difference := self._first(BEFORE, step):
            return difference
        inputs = [self._of_samples(step), self._first(LOSS, step)]
        gradient = self._first(GRADIENT, step)
        for difference in filter(None, inputs):
            if gradient is not None:
                return difference
            text = f"{difference.kind} differ, and no gradient does: {difference.text}"
            self.notes.setdefault(difference.kind, text)
        states = [[f[step]["states"] for f in s.steps.values() if f[step:]] for s in self.sides]
        for theirs, ours in zip(*states, strict=False) if self.sizes[0] == self.sizes[1] else ():
            for name in [name for name in ours if ours[name] != theirs.get(name)]:
                text = f"the state of the generator {name} differs after step {step + 1}"
                self.notes.setdefault(name, text)
        after = (self._first(kind, step) for kind in (RATE, WEIGHT, UPDATE))
        if difference := gradient or next(filter(None, after), None):
            return difference
        difference = self._first(BUFFER, step)
        is_masked = any(rounding.only for rounding in self._rounding.values())
        if difference is not None and self._is_scale_free and is_masked:
            self.notes[BUFFER] = f"{difference.tensor} differs, by weights that are not compared"
            return None
        return difference

    def _of_samples(self, step: int) -> StepDifference | None:
        for kind, (true, ours) in self._samples(step, step + 1).items():
            few, many = sorted((true, ours), key=Counter.total)
            times = many.total() // few.total()  # copies, as of ranks of one model
            if many != Counter({row: times * count for row, count in few.items()}):
                text = f"{ours.total()} in the place of {true.total()}, of which "
                text += f"{(true - ours).total()} are missing and {(ours - true).total()} too many"
                where = line_of(self.sides[1].first[step]["forward"])
                return StepDifference(step + 1, SAMPLES, kind, text, where)
        return None

    def _samples(self, first: int, last: int) -> dict[str, tuple[Counter[int], Counter[int]]]:
        """Samples over all ranks, of types and shapes that both sides have."""
        true, ours = (side.samples(first, last) for side in self.sides)
        for kind in [kind for side in (true, ours) for kind in side if not side[kind]]:
            self.notes[kind] = f"samples {kind} not compared: too many in a step of one rank"
        kinds = [kind for kind in ours if ours[kind] and true.get(kind)]
        return {k: (sum(true[k], Counter[int]()), sum(ours[k], Counter[int]())) for k in kinds}

    def _step_before(self, step: int) -> int | None:
        """The last step before one, of the same optimizer."""
        number = self._optimizers[step]
        return next((at for at in range(step)[::-1] if self._optimizers[at] == number), None)

    def _first(self, kind: str, step: int) -> StepDifference | None:
        """The first tensor of a kind that differs too much."""
        pairs = list(self._updates(step) if kind == UPDATE else self._pairs(kind, step))
        sizes = [norm(pair.true) / max(1, pair.elements) ** 0.5 for pair in pairs]
        key = self._optimizers[step], kind
        self._largest[key] = max([self._largest.get(key, 0.0), *sizes])
        least = SMALL * self._largest[key]
        wrong = [pair for pair in pairs if pair.size(least) > pair.limit]
        for pair in pairs if kind == GRADIENT and not wrong else ():
            self._note_rounding(pair, self._rounding[key[0]])
        if not wrong:
            return None
        first = [pair for pair in wrong if pair.name == wrong[0].name]
        pair = max(first, key=lambda pair: pair.size(least))
        text = f"by {pair.size(least):.3g} of its norm; {pair.limit:.2g} is allowed. "
        text = text if pair.value.any() and pair.true.any() else "one side has none, or zeros. "
        names, every = {pair.name for pair in wrong}, {pair.name for pair in pairs}
        text += f"{len(names)} of {len(every)} such tensors differ"
        if pair.elements == 1:
            text = f"{pair.value[0]:.6g} in the place of {pair.true[0]:.6g}"
        ranks = tuple(sorted(pair.rank for pair in first if pair.rank != WHOLE))
        where = line_of(self.sides[1].first[step][PLACES.get(kind, "where")])
        return StepDifference(step + 1, kind, pair.name, text, where, ranks)

    def _pairs(self, kind: str, step: int) -> Iterator[TensorPair]:
        """The tensors of a kind on each rank; a gradient that one side lacks is zero."""
        autocast = max(LIMITS.get(side.first[step]["autocast"], 0.0) for side in self.sides)
        theirs, ours = (side.tensors(kind, step) for side in self.sides)
        for name, other in self._names(kind, step).items():
            both = [tensor for tensor in (ours.get(name), theirs.get(other)) if tensor]
            if not both:
                continue
            nothing = {WHOLE: np.zeros_like(next(iter(both[0]["values"].values())))}
            values = ours[name]["values"] if name in ours else nothing
            true = theirs[other]["values"] if other in theirs else nothing
            limit = max(limit_of(tensor["dtype"]) for tensor in both)
            limit = 1e-6 if kind == RATE else max(limit, autocast) if limit else limit
            is_masked = kind in (BEFORE, WEIGHT) and self._is_scale_free
            mask = self._rounding[self._optimizers[step]].mask(name) if is_masked else None
            part: Any = slice(None) if mask is None else mask
            elements = math.prod(both[0]["shape"])
            for rank, value in values.items():
                if kind == BUFFER and rank > 0 and self.sizes[0] != self.sizes[1]:
                    continue  # DDP broadcasts those of the first rank
                same = true.get(rank, next(iter(true.values())))
                yield TensorPair(name, rank, value[part], same[part], elements, limit)

    def _updates(self, step: int) -> Iterator[TensorPair]:
        """What weights became since the last step of their optimizer; in them it may be lost."""
        last = self._step_before(step)
        pairs = self._pairs(BEFORE, step) if last is None else self._pairs(WEIGHT, last)
        before = {(pair.name, pair.rank): pair for pair in pairs}
        tensors = [t for side in self.sides for t in side.tensors(WEIGHT, step).values()]
        rounding = max([1e-14, *(limit_of(tensor["dtype"]) ** 2 for tensor in tensors)])
        for now in self._pairs(WEIGHT, step):
            if was := before.get((now.name, now.rank)):
                value, true = now.value - was.value, now.true - was.true
                limit = 3 * now.limit**0.5  # Adam makes whole steps of small gradients
                least = ROUNDINGS * rounding * norm(was.true)
                yield TensorPair(now.name, now.rank, value, true, now.elements, limit, least)

    def _names(self, kind: str, step: int) -> dict[str, str]:
        """The names of tensors, each with that on the other side: the same, or in their order."""
        of = WEIGHT if kind == GRADIENT else kind
        theirs, ours = (side.tensors(of, step) for side in self.sides)
        shapes = [[tensor["shape"] for tensor in side.values()] for side in (theirs, ours)]
        names = {name: name for name in ours if name in theirs}
        if kind not in (LOSS, RATE) and theirs.keys() != ours.keys():
            names = dict(zip(ours, theirs, strict=False)) if shapes[0] == shapes[1] else {}
        if kind == BUFFER and not names and (ours or theirs):
            self.left_out["buffers: the modules that ran have other ones"] = None
        elif kind in (BEFORE, GRADIENT, WEIGHT) and ours and not names:
            sides = ((theirs, ours), (ours, theirs))
            alone = [names_among(a.keys() - b.keys()) or "none" for a, b in sides]
            raise RequestError(
                asked="to compare the parameters of two optimizers",
                found=f"{len(theirs)} with --against ({alone[0]} there alone) and {len(ours)} "
                f"without ({alone[1]} there alone)",
                why="they are compared by name, or in their order if all shapes are equal",
                do="train the same parameters in both commands",
            )
        for name, other in [*names.items()]:
            why = ours[name]["why"] or theirs[other]["why"]
            if not why and ours[name]["shape"] != theirs[other]["shape"]:
                why = f"shape {ours[name]['shape']}, and {theirs[other]['shape']} with --against"
            if why:
                self.left_out[f"{name}: {why}"] = None
                del names[name]
        return names

    def _note_rounding(self, pair: TensorPair, rounding: Rounding) -> None:
        """Note the elements of a gradient that count as equal only because they are small."""
        larger = np.maximum(abs(pair.value), abs(pair.true))
        only = abs(pair.value - pair.true) > pair.limit * larger
        if pair.elements > only.size:  # sums of elements
            only[:] = pair.size() > pair.limit
        if only.any():
            rounding.only[pair.name] = rounding.only.get(pair.name, only) | only
            rounding.sizes[pair.name] = only.size

    def _cause(self, first: StepDifference) -> str:
        """What explains the difference: arithmetic that was confirmed, and findings of `check`."""
        reasons = [next(self._confirmed(first, first.step - 1), "")]
        theirs, ours = ({f.name: f for f in side.watched.findings} for side in self.sides)
        for alone, other, side in ((ours, theirs, ""), (theirs, ours, " of --against")):
            for name in EXPLAINED_BY.get(first.kind, "").split():
                if name in alone and name not in other:
                    place = f"{place_of(alone[name].where)}{side}"
                    reasons.append(f"{name} at {place}: {alone[name].found}")
        return "; ".join(filter(None, reasons))

    def _confirmed(self, first: StepDifference, step: int) -> Iterator[str]:
        """Arithmetic on what was recorded that gives what the other side has."""
        if first.kind == BEFORE:
            yield "nothing was trained yet: what initialises or loads the weights differs"
        if first.kind == SAMPLES:
            yield from self._confirmed_of_samples(first.tensor, step)
        if first.kind not in (LOSS, GRADIENT, RATE):
            return
        least = SMALL * self._largest[self._optimizers[step], first.kind]
        pairs, last_step = list(self._pairs(first.kind, step)), self._step_before(step)
        pairs = [pair for pair in pairs if first.kind != RATE or pair.name == first.tensor]
        for times, words in factors(max(self.sizes) if min(self.sizes) == 1 else 1):
            if all(pair.size(least, 1 / times) <= pair.limit for pair in pairs):
                yield f"it is {words if first.kind != RATE else words.partition(':')[0]}"
        if first.kind == GRADIENT and last_step is not None:
            last = {(p.name, p.rank): p.value for p in self._pairs(GRADIENT, last_step)}
            changes = [pair.value - last.get((pair.name, pair.rank), 0.0) for pair in pairs]
            alone = [dataclasses.replace(p, value=v) for p, v in zip(pairs, changes, strict=True)]
            if all(pair.size(least) <= pair.limit for pair in alone):
                yield "it is added to that of the step before: no zero_grad"
        for times, words in ((1, "sum"), (1 / self.sizes[1], "mean")):
            sums = dict[str, TensorPair]()
            for pair in pairs:
                before = sums[pair.name].value if pair.name in sums else 0.0
                sums[pair.name] = dataclasses.replace(pair, value=before + pair.value * times)
            if first.kind == GRADIENT and all(p.size(least) <= p.limit for p in sums.values()):
                yield f"each rank has its own: as a {words}, which is missing, they are right"
        if self.sizes[0] == self.sizes[1]:
            return
        if any(name.endswith("running_mean") for name in self.sides[1].tensors(BUFFER, step)):
            yield "unknown; BatchNorm normalises each rank's part by itself"
        if any(rank.all("draws") for side in self.sides for rank in side.ranks):
            yield "unknown; the forward draws random numbers, as for dropout"

    def _confirmed_of_samples(self, kind: str, step: int) -> Iterator[str]:
        """What the samples of other ranks and steps say of those of a step."""
        read = self.sides[1].samples(step, step + 1)[kind]
        if len(read) > 1 and all(samples == read[0] for samples in read):
            yield f"all {len(read)} ranks read the same samples"
        true, ours = self._samples(step, step + 1)[kind]
        all_true, all_ours = self._samples(0, self.compared).get(kind, (true, ours))
        if all_true == all_ours:
            yield f"over {self.compared} steps they are the same: they come in another order"
        times = ours.total() // true.total()
        of_steps = self._samples(step * times, (step + 1) * times).get(kind)
        if times > 1 and of_steps is not None and ours == of_steps[0]:
            yield f"all ranks together read those of {times} steps of --against: divide the batch"
        repeated, is_more = ours - true, not true - ours
        if is_more and all(all_ours[row] > 1 for row in repeated):
            yield f"{repeated.total()} of them come twice, as a DistributedSampler repeats some"


def search_script_operators(
    comparison: StepComparison,
    requests: Sequence[CommandRequest],
    run: Callable[[list[CommandRequest]], None],
) -> OperatorSearch:
    """Run both commands again, and compare the operators of the step that differs."""
    first = comparison.difference
    if first is None or first.kind in (BEFORE, SAMPLES, RATE, UPDATE):
        return OperatorSearch(f"no operator of a step makes the {first.kind if first else 'steps'}")
    again = []
    for request in (dataclasses.replace(request, shown="none") for request in requests):
        folder = f"{request.run_dir}-operators"
        again.append(watched_request(request, folder, os.environ, at=first.step))
    try:
        run(again)
    except (ProgramError, RequestError) as error:
        return OperatorSearch(f"recording them failed: {str(error).splitlines()[0]}")
    ours, theirs = (Path(request.run_dir, FACTS, OPERATORS) for request in again)
    if not (ours.exists() and theirs.exists()):
        return OperatorSearch("none was recorded: no module ran in training in this step")
    return compare_operators(ours, theirs, comparison.limit(first.step - 1), NAMES_OF_WRAPPERS)
