"""Gradients that are times a number of the job: of its ranks, its micro-batches, its loss scale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from allranks.tools.check.causes.cause import Account
from allranks.tools.check.causes.evidence import Evidence


def summed(evidence: Evidence) -> Iterator[Account]:
    """All gradients times the ranks along an axis, or one over them."""
    found = _ratio(evidence)
    if found is None or not _are_all(evidence):
        return
    for words, count in _counts_of_ranks(evidence):
        if _is(found, count):
            says = f"gradients are the sum over {words} where their mean is wanted, or summed twice"
            yield _undone(evidence, says, count)
        elif _is(found, 1 / count):
            yield _undone(evidence, f"gradients are divided once too often by {words}", 1 / count)


def by_micro_batches(evidence: Evidence) -> Iterator[Account]:
    """All gradients times the micro-batches of a rank, or one over them."""
    found = _ratio(evidence)
    if found is None or not _are_all(evidence):
        return
    count = _micro_batches(evidence)
    if count > 1 and _is(found, count):
        says = f"gradients of the {count} micro-batches are summed, and nobody divides the sum"
        yield _undone(evidence, says, count)
    elif count > 1 and _is(found, 1 / count):
        says = f"gradients are divided once too often by the {count} micro-batches"
        yield _undone(evidence, says, 1 / count)


def by_loss_scale(evidence: Evidence) -> Iterator[Account]:
    """All gradients still times the loss scale of fp16, or divided by it twice."""
    found, scale = _ratio(evidence), evidence.row().get("loss_scale")
    if found is None or not scale or scale == 1 or not _are_all(evidence):
        return
    if _is(found, scale):
        yield _undone(evidence, f"gradients are still times the loss scale of {scale:g}", scale)
    elif _is(found, 1 / scale):
        says = f"gradients are divided twice by the loss scale of {scale:g}"
        yield _undone(evidence, says, 1 / scale)
    elif _is(found, 2.0) or _is(found, 0.5):
        says = f"gradients are divided by another loss scale than the {scale:g} they were made with"
        yield _undone(evidence, says, round(found, 1))


def some_times_ranks(evidence: Evidence) -> Iterator[Account]:
    """Some gradients times the ranks along an axis, or one over them: the others are right."""
    found = _ratio(evidence)
    if found is None or _are_all(evidence):
        return
    what = _what(evidence)
    for words, count in _counts_of_ranks(evidence):
        if _is(found, count):
            says = f"the gradients of {what} are times {words}: they hold every rank's part already"
            yield _undone(evidence, says, count)
        elif _is(found, 1 / count):
            says = f"the gradients of {what} are divided by {words}, which all have the whole of it"
            yield _undone(evidence, says, 1 / count)


def some_times_micro_batches(evidence: Evidence) -> Iterator[Account]:
    """Some gradients times the micro-batches, or one over them: the others are right."""
    found, count = _ratio(evidence), _micro_batches(evidence)
    if found is None or count == 1 or _are_all(evidence):
        return
    what = _what(evidence)
    if _is(found, count):
        says = f"the gradients of {what} are the sum of {count} micro-batches that nobody divides"
        yield _undone(evidence, says, count)
    elif _is(found, 1 / count):
        says = f"the gradients of {what} are divided again by the {count} micro-batches"
        yield _undone(evidence, says, 1 / count)


def _what(evidence: Evidence) -> str:
    """Which tensors these are, in words."""
    names = evidence.differing
    if all(name in evidence.facts.get("cut", {}) for name in names):
        return "weights of which each rank holds a part"
    if all(name.rpartition(".")[2] == "bias" for name in names):
        return "biases"
    rooms = {name.partition(".")[0] for name in names}
    return f"layer {rooms.pop()!r}" if len(rooms) == 1 else f"{len(names)} weights"


def _micro_batches(evidence: Evidence) -> int:
    counts = [len(rank[evidence.step].get("micro_batches") or ()) for rank in evidence.ours.ranks]
    return max([1, *counts])


def _counts_of_ranks(evidence: Evidence) -> list[tuple[str, int]]:
    """How many ranks there are along each axis, and in all."""
    found = [(evidence.words_of(axis), size) for axis, size in evidence.axes.items()]
    if len(evidence.axes) != 1 and evidence.ranks > 1:
        found.append((f"all {evidence.ranks} ranks", evidence.ranks))
    return found


def _are_all(evidence: Evidence) -> bool:
    wanted = evidence.wanted(evidence.stage)
    own = {name for name, tensor in wanted.items() if np.any(tensor)}
    return own <= set(evidence.differing)


def _ratio(evidence: Evidence) -> float | None:
    """By which every differing tensor is times that of one process, if it is one number."""
    ours, wanted = evidence.found(evidence.stage), evidence.wanted(evidence.stage)
    dot = square = 0.0
    for name in evidence.differing:
        if name not in ours or name not in wanted or ours[name].shape != wanted[name].shape:
            return None
        a, b = ours[name].astype(np.float64).ravel(), wanted[name].astype(np.float64).ravel()
        dot, square = dot + float(a @ b), square + float(b @ b)
    ratio = dot / square if square else None
    return ratio if ratio is None or np.isfinite(ratio) else None


def _is(found: float, count: float) -> bool:
    near = 1e-3  # what is left afterwards decides
    return abs(found / count - 1) < near


def _undone(evidence: Evidence, says: str, factor: float) -> Account:
    ours = evidence.found(evidence.stage)
    repaired = {name: ours[name] / factor for name in evidence.differing}
    return Account(says, repaired, factor, tuple(range(evidence.ranks)))
