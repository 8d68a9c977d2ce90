"""The first operator that computes something else: two folders of recorded operators, compared.

Operators (`torch.witness.operators`) correspond by module, phase, name and number within a pass.
What all ranks hold of a tensor agrees with what those of the other run hold if it is the same
everywhere, each its counterpart, parts of one whole along a dim, or terms of one sum. Named is the
first, in the order of the candidate, whose inputs agree and whose output does not.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from allranks.errors import ProgramError, RequestError
from allranks.job.job import Job
from allranks.strategies.mesh import DATA
from allranks.tools.check.compare import Difference, Tolerance
from allranks.tools.check.sizes import Array, norm, tensor_difference
from allranks.training.record.trace import OPERATORS, START

MODULE = "module"  # the name of a call of a module, whose class may be another one on ranks
AFTER_PASSES = "clipping", "update", "callbacks"
OF_TENSORS = "accumulation", "clipping", "update"  # phases whose operators are those of a tensor
NOISE = 16  # units of rounding, of the norm of the inputs, by which an output may be off
LIKE = SAME, EACH = "same", "each"
Arrays = Sequence[Array]


@dataclass(frozen=True)
class OperatorSearch:
    """What was found: a named operator or not; `unmatched` is the first without a counterpart.

    `reader` is the first whose inputs differ, where none before it computes something else.
    """

    text: str
    compared: int = 0
    total: int = 0
    unmatched: str = ""
    name: str = ""
    module: str = ""
    phase: str = ""
    line: str = ""
    reader: str = ""

    def __str__(self) -> str:
        where = _in_words(self.name, self.module, self.phase, self.line)
        unmatched = f"; without a counterpart: {self.unmatched}" if self.unmatched else ""
        counts = f"{self.compared} of {self.total} operators were compared{unmatched}"
        return f"operator: {where if self.name else 'none is named'}: {self.text}\n  {counts}"


def _in_words(name: str, module: str, phase: str, line: str) -> str:
    """An operator and where it is: in a module or function, or of a tensor."""
    is_of_tensor = phase in OF_TENSORS and not module.endswith("()")
    where = f"{'of' if is_of_tensor else 'in'} {module or 'the model'} ({phase})"
    return f"{'the call' if name == MODULE else name} {where}{', ' * bool(line)}{line}"


def search_operators(
    first: Difference, ours: Job, single: Job, tolerance: Tolerance, run: Callable[[str, Job], Any]
) -> OperatorSearch:
    """Run the step that differs again on both sides, recorded, and compare its operators."""
    if first.step == START or first.stage in ("evaluation", "digest", "samples"):
        return OperatorSearch(f"no operator of a step makes the {first.stage}")
    recorded: dict[str, Any] = {"parts_of": first.step, "operators": True, "compile": False}
    if ours.precision != "fp64" or tolerance.exact:  # passes of equal shapes round alike
        data = max(1, ours.strategy_spec.mesh.size(DATA))
        single = dataclasses.replace(single, cut_for=data, micro_batch=ours.micro_batch)
    try:
        reference = run("operators-of-one", dataclasses.replace(single, **recorded)).trace.path
        recorded["replay"] = "" if tolerance.exact else str(reference)
        candidate = run("operators", dataclasses.replace(ours, **recorded)).trace.path
    except (ProgramError, RequestError) as error:
        return OperatorSearch(f"recording them failed: {str(error).splitlines()[0]}")
    return compare_operators(candidate / OPERATORS, reference / OPERATORS, tolerance.tensors)


class RecordedCall(NamedTuple):
    """An operator in one pass of one rank."""

    rank: int
    line: str
    matters: bool  # a gradient or a change in place follows from it; not from what is printed
    inputs: Arrays
    outputs: Arrays
    numbers: list[str]


class RecordedOperators(defaultdict[tuple[str, str, str, int], list[RecordedCall]]):
    """The operators of one run in their order: of each its calls, by rank and pass.

    Of a script the paths of modules go without the names of `wrappers`.
    """

    def __init__(self, folder: Path, wrappers: Sequence[str] = ()) -> None:
        super().__init__(list)
        files = sorted(folder.glob("rank-*.json"))
        self.ranks = len(files)
        for rank, file in enumerate(files):
            record, path = json.loads(file.read_text()), file.with_suffix(".safetensors")
            values, rows, needed = load_file(path), record["rows"], set[str]()
            for row in rows if wrappers else ():
                parts = (part for part in row["module"].split(".") if part not in wrappers)
                row["module"] = ".".join(parts)
            for row in reversed(rows):  # backward comes to its node, or one that matters reads it
                row["writes"] |= row["phase"] == "backward" or row["node"] in record["reached"]
                row["writes"] |= not needed.isdisjoint(digest for digest, _ in row["outputs"])
                needed |= {digest for digest, _ in row["inputs"] if row["writes"]}
            keys = [(row["module"], row["phase"], row["name"]) for row in rows]
            times, before = Counter(keys), Counter[tuple[str, str, str]]()
            calls = [n for key, n in times.items() if key[1:] == ("forward", MODULE)]
            passes = math.gcd(*calls) or 1
            for key, row in zip(keys, rows, strict=True):
                is_each = key[1] not in AFTER_PASSES and times[key] % passes == 0
                each = times[key] // passes if is_each else times[key]
                sides = row["inputs"], row["outputs"]
                a, b = ([values[digest].reshape(shape) for digest, shape in t] for t in sides)
                call = RecordedCall(rank, row["line"], row["writes"], a, b, row["numbers"])
                self[*key, before[key] % each].append(call)
                before[key] += 1


class Match(NamedTuple):
    """A way in which two runs may hold a tensor; along `dim`, `owners` are the ranks of `ours`."""

    kind: str
    ours: Array
    theirs: Array
    owners: Array | None = None
    dim: int = 0
    agrees: bool = False
    scale: float = 1.0  # by which ours were divided

    def in_words(self) -> str:
        """Where it differs, and by how much."""
        off = abs(np.nan_to_num(self.ours * 1.0) - np.nan_to_num(self.theirs * 1.0))
        wrong = off > off.max() / 1000  # not what is rounded otherwise
        counts = f"{int(wrong.sum())} of {wrong.size} elements, by up to {off.max():.1e}"
        if self.owners is None:
            return f"the sum of the output over the ranks differs: {counts}"
        named = sorted({int(rank) for rank in self.owners[np.nonzero(wrong)[self.dim]]})
        places = f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
        return f"the output differs on {places}: {counts}"


def match(
    ours: Arrays,
    theirs: Arrays,
    ranks: Sequence[int],
    tolerance: float,
    of: Sequence[Match] = (),
    scale: float = 1.0,
    order: Array | None = None,
) -> Match:
    """The first way in which they agree, or the closest; without a way if no shapes fit.

    What is computed `of` tensors that agree as wholes is itself no part, nor term of a sum. Ours
    may be `scale` times larger, and their rows in another `order`.
    """
    closest, smallest = Match("", np.zeros(0), np.zeros(0)), np.inf
    alike = bool(of) and all(way.kind in LIKE for way in of)
    floor = max((norm(way.theirs) for way in of), default=0.0) if tolerance else 0.0
    for way in _ways(ours, theirs, np.asarray(ranks), order):
        dtype = way.theirs.dtype
        if (alike and way.kind not in LIKE) or (scale != 1 and dtype.kind not in "fc"):
            continue
        way = way if scale == 1 else way._replace(ours=way.ours / scale, scale=scale)
        size = tensor_difference(way.ours, way.theirs)
        rounding = NOISE * float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0
        if size <= tolerance * norm(way.theirs) + rounding * floor:
            return way._replace(agrees=True)
        if not closest.kind or size < smallest:
            closest, smallest = way, size
    return closest


def _ways(ours: Arrays, theirs: Arrays, ranks: Array, order: Array | None) -> Iterator[Match]:
    alike = len({array.shape for array in (*ours, *theirs)}) == 1
    if alike and all(array.tobytes() == theirs[0].tobytes() for array in theirs):
        a = np.stack(ours)
        yield Match(SAME, a, np.broadcast_to(theirs[0], a.shape), ranks)
    if [array.shape for array in ours] == [array.shape for array in theirs]:
        a, b = (np.concatenate([array.ravel() for array in side]) for side in (ours, theirs))
        yield Match(EACH, a, b, np.repeat(ranks, [array.size for array in ours]))
    for dim in range(ours[0].ndim if len({array.ndim for array in (*ours, *theirs)}) == 1 else 0):
        most = math.gcd(*(array.shape[dim] for array in (*ours, *theirs)))
        for groups in (n for n in range(1, most + 1) if most % n == 0):
            with suppress(ValueError):  # they have other dims
                a, b = (
                    np.concatenate([np.stack(np.split(x, groups, dim), dim) for x in side], dim + 1)
                    for side in (ours, theirs)
                )
                owners = np.repeat(ranks, [array.shape[dim] // groups for array in ours])
                if a.shape == b.shape:
                    yield Match(f"dim {dim}", a, b, owners, dim + 1)
    rows = _rows(ours, theirs)
    if order is not None and rows and len(rows[0]) % len(order) == 0:
        a, b = (side.reshape(len(order), -1) for side in rows)
        owners = np.repeat(ranks, [len(array) for array in ours]).reshape(len(order), -1)[:, 0]
        yield Match("rows", a[order], b, owners[order])
    if alike and len(ours) + len(theirs) > 2:
        yield Match("sum", np.sum(np.stack(ours), 0), np.sum(np.stack(theirs), 0))


def _rows(*sides: Arrays) -> list[Array] | None:
    """All rows of each side, if the sides have equally many of one length."""
    if len({array.shape[1:] if array.ndim else None for side in sides for array in side}) > 1:
        return None
    rows = [np.concatenate(side) for side in sides] if sides[0][0].ndim else []
    return rows if rows and len(rows[0]) == len(rows[1]) else None


def _order(candidate: RecordedOperators, reference: RecordedOperators) -> Array | None:
    """The order in which our samples are theirs, where another one is: of the first operators."""
    for key, calls in itertools.islice(candidate.items(), 20):
        sides = [zip(*(call.inputs for call in c), strict=False) for c in (calls, reference[key])]
        for rows in filter(None, map(_rows, *map(list, sides))):
            ours, theirs = ([row.tobytes() for row in side] for side in rows)
            if ours != theirs and len({*ours}) == len(ours) and {*ours} == {*theirs}:
                return np.asarray([ours.index(row) for row in theirs])
    return None


def compare_operators(
    ours: Path,
    theirs: Path,
    tolerance: float,
    wrappers: Sequence[str] = (),
    *,
    is_exact: bool = False,
) -> OperatorSearch:
    """The first operator of our folder that differs from its counterpart, if any.

    Of scripts, which have `wrappers`, each rank may have taken the mean over its own samples. If
    the comparison `is_exact`, numbers count as inputs, and none is named after the first reader.
    """
    sides = candidate, reference = [RecordedOperators(side, wrappers) for side in (ours, theirs)]
    on = {1: "", 2: " on both ranks"}.get(candidate.ranks, f" on all {candidate.ranks} ranks")
    named = OperatorSearch("no output differs where all inputs agree")
    compare = _Comparison(tolerance, is_exact=is_exact)
    if wrappers:
        compare = _Comparison(tolerance, candidate.ranks / reference.ranks, _order(*sides))
    compared, total, alone, reader, unequal = 0, 0, "", "", set[tuple[str, str]]()
    for key, calls in candidate.items():
        (module, phase, name, _), first = key, calls[0]
        is_compared, agrees, wrong = compare.calls(key, calls, reference.get(key, []))
        compared, total = compared + (is_compared and name != MODULE), total + (name != MODULE)
        if not is_compared:
            alone = alone or f"{name} in {module or 'the model'}" * (name != MODULE)
        elif wrong is not None and not named.name and first.matters and not (is_exact and reader):
            same_module = {(module, phase)} if name != MODULE else set()
            keeps_nothing = not wrappers or name.count(".") > 1  # of what differs elsewhere
            if keeps_nothing or unequal <= same_module:
                text = f"inputs agree{on}; {wrong.in_words()}"
                named = OperatorSearch(text, 0, 0, "", name, module, phase, first.line)
        if is_compared and not agrees and not named.name and name != MODULE:
            line = _first_unlike(calls, reference[key]).line
            reader = reader or _in_words(name, module, phase, line)
        if is_compared and (wrong is not None or not agrees):
            unequal.add((module, phase))
    named = dataclasses.replace(named, compared=compared, total=total, unmatched=alone)
    return dataclasses.replace(named, reader=reader)


def _first_unlike(ours: list[RecordedCall], theirs: list[RecordedCall]) -> RecordedCall:
    """The first of our calls that has other inputs than its counterpart, where each has one."""
    for call, other in zip(ours, theirs, strict=False):
        pairs = zip(call.inputs, other.inputs, strict=True)
        if len(ours) == len(theirs) and any(a.tobytes() != b.tobytes() for a, b in pairs):
            return call
    return ours[0]


@dataclass(frozen=True)
class _Comparison:
    """Compares calls. Scripts have `times` as many ranks, with gradients so many times larger."""

    tolerance: float
    times: float = 0.0
    order: Array | None = None
    is_exact: bool = False

    def calls(
        self, key: tuple[str, str, str, int], ours: list[RecordedCall], theirs: list[RecordedCall]
    ) -> tuple[bool, bool, Match | None]:
        """Whether they correspond, whether all inputs agree, and what of the output does not."""
        counts = {(len(call.inputs), len(call.outputs)) for call in (*ours, *theirs)}
        if not theirs or len(counts) > 1 or not ours[0].inputs:
            return False, False, None
        usual = [1.0, *{self.times, len(ours) / len(theirs)} - {1.0}] if self.times else [1.0]
        numbers = [{tuple(call.numbers) for call in side} for side in (ours, theirs)]
        is_open = bool(self.times) and (numbers[0] != numbers[1] or key[2].endswith(".backward"))
        if self.is_exact and numbers[0] != numbers[1]:
            return True, False, None
        inputs = [*self._matches("inputs", ours, theirs, usual)]
        agreeing = [[way for way in ways if way.agrees] for ways in inputs]
        if not all(agreeing):
            return all(ways[0].kind for ways in inputs), False, None
        for ways in agreeing:  # a number, or zeros, may agree at several scales
            if ways[0].theirs.size > len(ours) and ways[0].theirs.any():
                del ways[1:]
        kinds = {ways[0].kind[:3] for ways in agreeing if ways[0].theirs.size > len(ours)}
        if self.times and "sum" in kinds and kinds & {"dim", "row"}:
            return True, False, None  # terms of a sum times parts of a whole are neither
        scales = {way.scale for ways in agreeing for way in ways}
        if not all(ways[0].scale == 1 for ways in agreeing):
            scales -= {1.0}
        of, fits = [ways[0] for ways in agreeing], True
        of += [Match("", np.zeros(0), np.zeros(0))] * is_open  # more than the tensors differs
        wrong = None
        for ways in self._matches("outputs", ours, theirs, usual, of):
            means = [way for way in ways if way.kind == "sum"] if key[1] == "forward" else []
            ways = ways if is_open else [way for way in ways if way.scale in scales] + means
            if not any(way.agrees for way in ways) and ways[0].theirs.dtype.kind not in "iu":
                wrong = wrong or ways[0]
            fits = fits and bool(ways[0].kind)
        if wrong and self.times and numbers[0] != numbers[1]:
            return False, True, None
        return fits, True, wrong

    def _matches(
        self,
        side: str,
        ours: list[RecordedCall],
        theirs: list[RecordedCall],
        scales: Sequence[float],
        of: Sequence[Match] = (),
    ) -> Iterator[list[Match]]:
        """Of each tensor its match at each scale."""
        tensors = (zip(*(getattr(c, side) for c in calls), strict=True) for calls in (ours, theirs))
        ranks = [call.rank for call in ours]
        for a, b in zip(*tensors, strict=True):
            yield [match(a, b, ranks, self.tolerance, of, s, self.order) for s in scales]
