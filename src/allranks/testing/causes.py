"""Why does a tensor differ? Each cause is one that makes the difference vanish when it is undone.

First by arithmetic on what was recorded: `guesses` are tensors that would have been recorded
without a mistake, and one that is equal to the reference names it. Then by running both worlds
again with one thing done otherwise (`undo`). No cause is said for being likely.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allranks.testing import undo
from allranks.testing.compare import (
    INPUT,
    ROWS,
    Limits,
    RecordedWorld,
    TensorDifference,
    difference_of,
    first_difference,
)
from allranks.tools.check.sizes import factors

LONGEST_S = 120.0  # for runs in which something is undone
Rerun = Callable[[str, int], RecordedWorld | None]
Guess = tuple[str, str, Sequence[Tensor]]

BY_UNDOING = {
    undo.SEEDS: "with the same seed on all ranks it vanishes: a generator that is seeded by the "
    "rank, or by nothing",
    undo.WEIGHTED: "with each rank's part weighted by the elements of its mean it vanishes: a mean "
    "of means over unequal numbers",
    undo.MEAN: "with all reductions divided by the number of ranks it vanishes: a sum where a mean "
    "is meant",
    undo.SUM: "with all reductions multiplied by the number of ranks it vanishes: a mean where a "
    "sum is meant",
    undo.AS_SUM: "with sums in the place of maxima, minima and products it vanishes: another "
    "reduction is meant",
    undo.ROUNDING: "with 64 bits in the place of 16 and 32 it vanishes: rounding",
    undo.BATCHNORM: "with the statistics of all ranks in BatchNorm it vanishes: each rank "
    "normalises its own part",
    undo.DROPOUT: "without dropout it vanishes: the ranks together draw other masks",
}
WITH_REFERENCE = (undo.SEEDS, undo.ROUNDING, undo.DROPOUT)  # those that change one rank, too


@dataclass(frozen=True)
class Differing:
    """Two worlds and their first difference."""

    reference: RecordedWorld
    candidate: RecordedWorld
    difference: TensorDifference
    limits: Limits

    def is_equal(self, true: Tensor, tensor: Tensor) -> bool:
        """Whether a tensor is equal to that of the reference, within the limits."""
        if true.shape != tensor.shape:
            return False
        size, limit, _ = difference_of(true, tensor.to(true.dtype), 0.0, self.limits)
        rounding = 4 * torch.finfo(true.dtype).eps if true.is_floating_point() else 0.0
        return size <= max(limit, rounding)  # the arithmetic here rounds, too

    def vanishes(self, reference: RecordedWorld, candidate: RecordedWorld) -> bool:
        """Whether what differed first is equal in two other runs, and what comes before it."""
        first, was = first_difference(reference, candidate, self.limits), self.difference
        if first is None or first.step != was.step:
            return first is None or first.step > was.step
        names = reference.names(was.step)
        return names.index(first.tensor) > names.index(was.tensor)


def cause_of(differing: Differing, rerun: Rerun) -> tuple[str, str]:
    """The kind of the cause, and a sentence; two empty texts if nothing makes it vanish."""
    step, name = differing.difference.step, differing.difference.tensor
    true = differing.reference.tensors(step, name)[0]
    for kind, text, tensors in guesses(differing, true):
        if all(differing.is_equal(true, tensor) for tensor in tensors):
            return kind, text
    size, deadline = differing.candidate.size, time.monotonic() + LONGEST_S
    for change, text in BY_UNDOING.items():
        if time.monotonic() > deadline:
            return "", f"unknown: {LONGEST_S:g} s were not enough to undo everything"
        base: RecordedWorld | None = differing.reference
        if change in WITH_REFERENCE or differing.reference.size > 1:
            base = rerun(change, differing.reference.size)
        other = rerun(change, size)
        if base is not None and other is not None and differing.vanishes(base, other):
            return change, text
    inputs = rerun(undo.INPUTS, size)
    for kind, text, tensors in _with_inputs(differing, inputs) if inputs is not None else ():
        if all(differing.is_equal(true, tensor) for tensor in tensors):
            return kind, text
    return "", ""


def guesses(differing: Differing, true: Tensor) -> Iterator[Guess]:
    """Kind, sentence, and what the ranks would have without that mistake."""
    step, name = differing.difference.step, differing.difference.tensor
    size = differing.candidate.size
    tensors = differing.candidate.tensors(step, name)
    if differing.candidate.ranks[0][step][name].kind == ROWS:
        yield from _other_rows(true, tensors[0])
        return
    if true.is_complex() or any(tensor.shape != true.shape for tensor in tensors):
        return
    if not true.is_floating_point():
        yield from _moved(true, tensors)
        return
    yield from _of_ranks(tensors)
    for times, word in factors(size):
        yield "scale", f"it is {word}", [tensor / times for tensor in tensors]
    if step:
        yield from _of_the_step_before(differing, tensors)
    yield from _added_too_often(differing, tensors)
    yield from _moved(true, tensors)
    holes = [(tensor == 0) & (true != 0) for tensor in tensors]
    filled = [torch.where(hole, true, t) for hole, t in zip(holes, tensors, strict=True)]
    count = max(int(hole.sum()) for hole in holes)
    if count < true.numel():
        yield "missing", f"{count} elements are 0: a part of it is missing", filled


def _of_ranks(tensors: Sequence[Tensor]) -> Iterator[Guess]:
    """Ranks that differ from each other may each have only their own part."""
    if len({tuple(t.reshape(-1).tolist()) for t in tensors}) == 1:
        return
    total = torch.stack(list(tensors)).sum(dim=0)
    words = "each rank has its own: together they are right as a"
    yield "not-reduced", f"{words} sum, which is missing", [total]
    yield "not-reduced", f"{words} mean, which is missing", [total / len(tensors)]


def _of_the_step_before(differing: Differing, tensors: Sequence[Tensor]) -> Iterator[Guess]:
    step, name = differing.difference.step, differing.difference.tensor
    reference, candidate = differing.reference, differing.candidate
    before = reference.tensors(step - 1, name)[0]
    true = reference.tensors(step, name)[0]
    was = candidate.tensors(step - 1, name)
    if not (before.shape == true.shape == was[0].shape):
        return
    change = true - before
    stale = all(differing.is_equal(before, tensor) for tensor in tensors)
    if stale:
        yield "stale", "it is the value of the step before", [t + change for t in tensors]
    changes = [tensor - old for tensor, old in zip(tensors, was, strict=True)]
    for times, word in factors(candidate.size):
        again = [old + c / times for c, old in zip(changes, was, strict=True)]
        yield "scale", f"its change in this step is {word}", again
    if step > 1:
        last = before - reference.tensors(step - 2, name)[0]
        late = [tensor - last + change for tensor in tensors]
        yield "stale", "it has changed as in the step before", late


def _added_too_often(differing: Differing, tensors: Sequence[Tensor]) -> Iterator[Guess]:
    """Another tensor, as a bias, that each rank adds."""
    step, name = differing.difference.step, differing.difference.tensor
    size = differing.candidate.size
    for other in differing.reference.names(step):
        for at in range(step, max(-1, step - 2), -1):
            if other == name or other not in differing.reference.names(at):
                continue
            term = differing.reference.tensors(at, other)[0]
            if not term.is_floating_point() or _broadcast(term, tensors[0]) is None:
                continue
            for times in dict.fromkeys((size - 1, 1, -1)):
                words = f"{other!r} is in it {times} times too often"
                yield "counted-twice", words, [t - times * term for t in tensors]


def _broadcast(term: Tensor, tensor: Tensor) -> Tensor | None:
    try:
        return term.expand_as(tensor)
    except RuntimeError:
        return None


def _moved(true: Tensor, tensors: Sequence[Tensor]) -> Iterator[Guess]:
    """The same numbers at other places: those of the reference are put back in its order."""
    if true.numel() > 1:
        ordered = [_in_order_of(true, tensor) for tensor in tensors]
        yield "order", "it has the same numbers in another order", ordered


def _in_order_of(true: Tensor, tensor: Tensor) -> Tensor:
    """The numbers of `tensor`, the smallest where that of `true` is, and so on."""
    places = true.reshape(-1).argsort()
    result = torch.empty_like(true).reshape(-1)
    result[places] = tensor.reshape(-1).sort().values.to(true.dtype)
    return result.reshape(true.shape)


def _other_rows(true: Tensor, rows: Tensor) -> Iterator[Guess]:
    """Samples of which some are there too often, or not at all."""
    wanted, there = (Counter(tuple(row.reshape(-1).tolist()) for row in t) for t in (true, rows))
    missing, more = (wanted - there).total(), (there - wanted).total()
    if not set(there) - set(wanted):  # without what is too often, and with what is missing, equal
        often = f"samples that are there too often, as by padding: {more}"
        few = f"samples that are missing: {missing}"
        words = ", ".join(word for word, n in ((often, more), (few, missing)) if n)
        yield "samples", words, [true]


def _with_inputs(differing: Differing, inputs: RecordedWorld) -> Iterator[Guess]:
    """What ranks gave to reductions in this step, added once too often or left out."""
    step, name = differing.difference.step, differing.difference.tensor
    size = inputs.size
    tensors = inputs.tensors(step, name)
    for other in inputs.names(step):
        parts = [steps[step][other].tensor for steps in inputs.ranks]
        if not other.startswith(INPUT) or any(p.numel() != tensors[0].numel() for p in parts):
            continue
        parts = [part.reshape(tensors[0].shape) for part in parts]
        for times in (1, 1 / size):
            if len(tensors) == size:
                parted = [t - times * part for t, part in zip(tensors, parts, strict=True)]
                yield "counted-twice", "each rank's own part is counted twice", parted
            for rank, part in enumerate(parts):
                words = f"the part of rank {rank} is"
                yield "missing", f"{words} missing", [t + times * part for t in tensors]
                yield "counted-twice", f"{words} counted twice", [t - times * part for t in tensors]
