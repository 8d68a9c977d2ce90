"""From a difference to its cause: what is recorded once more of its step, and which cause holds.

The step that differs is run twice again, up to it: on the ranks, with the tensors of each, and in
one process, with every part of the batch by itself. Where that fails, no cause is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from allranks.errors import ProgramError, RequestError
from allranks.job.job import Job
from allranks.strategies.mesh import DATA
from allranks.tools.check.causes.cause import Finding, confirmed
from allranks.tools.check.causes.evidence import Evidence, Parts, Tensors, read_parts
from allranks.tools.check.causes.table import CAUSES
from allranks.tools.check.compare import Difference, Tolerance, Trace
from allranks.training.record.trace import START, tensors_path

Run = Callable[[str, Job], Trace]
"""Runs a job under a name, and gives its trace."""


def cause_of(
    first: Difference, ours: Job, one: Job, right: Trace, tolerance: Tolerance, run: Run
) -> Finding | None:
    """The cause of a difference between the job and `one` process, if one is confirmed."""
    try:
        evidence = _collected(first, ours, one, right, tolerance, run)
    except (ProgramError, RequestError, OSError):
        return None
    return diagnosed(evidence)


def diagnosed(evidence: Evidence) -> Finding | None:
    """The first cause of the table that holds, with what else explains the same numbers."""
    found: dict[str, Finding] = {}
    if not evidence.is_comparable:
        return None
    for cause in CAUSES:
        if evidence.stage not in cause.stages or cause.name in found:
            continue
        for account in cause.pattern(evidence):
            finding = confirmed(cause, account, evidence)
            if finding is not None:
                found[cause.name] = finding
                break
    if not found:
        return None
    best, *others = found.values()
    return dataclasses.replace(best, or_else=tuple(other.says for other in others))


def _collected(
    first: Difference, ours: Job, one: Job, right: Trace, tolerance: Tolerance, run: Run
) -> Evidence:
    again = run(f"cause-{ours.precision}-{ours.ranks}", _traced(ours, first.step))
    mesh = ours.strategy_spec.mesh
    facts = again.ranks[0][START].get("facts", {})
    parts: Parts | None = None
    alone: Trace | None = None
    if first.step != START:
        passes = [rank[first.step].get("micro_batches") or [] for rank in again.ranks]
        data = max(1, mesh.size(DATA))
        cut = dataclasses.replace(
            _traced(one, first.step),
            replay=str(right.path),
            cut_for=data,
            micro_batch=ours.micro_batch or _micro_batch(passes),
            added_by_each=_biases(facts),
            adding=ours.ranks // data,
        )
        alone = run(f"cause-{ours.precision}-{ours.ranks}-parts", cut)
        parts = read_parts(alone.path, first.step)
    each = tuple(_tensors(again.path, first.step, rank) for rank in range(len(again.ranks)))
    return Evidence(first, tolerance, mesh, right, again, each, parts, facts, alone)


def _traced(job: Job, step: int) -> Job:
    return dataclasses.replace(job, parts_of=step)


def _micro_batch(passes: Sequence[Sequence[int]]) -> int | None:
    """How many samples a strategy lets go through the model at once, where nobody says it."""
    most = max(passes, key=len)
    return max(most) if len(most) > 1 else None


def _biases(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The whole biases of layers whose weight is cut: their outputs are summed over the ranks."""
    cut = facts.get("cut", {})
    rooms = [name.removesuffix("weight") for name in cut if name.endswith("weight")]
    return tuple(f"{room}bias" for room in rooms if f"{room}bias" not in cut)


def _tensors(trace: Path, step: int, rank: int) -> Tensors:
    path = tensors_path(trace, step, rank)
    return load_file(path) if path.exists() else {}
