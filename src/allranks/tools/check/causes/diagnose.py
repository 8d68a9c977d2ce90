"""The known causes, each with the stages that show it first, and what to do.

They are tried in this order: the more specific explanation of the same numbers comes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safetensors.numpy import load_file

from allranks.errors import ProgramError, RequestError
from allranks.job.job import Job
from allranks.strategies.mesh import DATA
from allranks.tools.check.causes import counts, gradients, state
from allranks.tools.check.causes.cause import (
    BatchParts,
    ConfirmedCause,
    Evidence,
    confirmed,
    read_parts,
)
from allranks.tools.check.compare import Difference, RecordedTrace, Tolerance
from allranks.training.record.trace import START, tensors_path

CAUSES = (*counts.CAUSES, *gradients.CAUSES, *state.CAUSES)
"""In the order in which they are tried."""


# From a difference to its cause: both runs are repeated up to the step that differs.
#
# The ranks record the tensors of each, and one process records every part of the batch by itself.
# If that fails, no cause is reported.


Run = Callable[[str, Job], RecordedTrace]
"""Runs a job under a name, and gives its trace."""


def cause_of(
    first: Difference, ours: Job, single: Job, right: RecordedTrace, tolerance: Tolerance, run: Run
) -> ConfirmedCause | None:
    """The cause of a difference between our job and the `single` one, if one is confirmed."""
    try:
        evidence = _collected(first, ours, single, right, tolerance, run)
    except (ProgramError, RequestError, OSError):
        return None
    return diagnosed(evidence)


def diagnosed(evidence: Evidence) -> ConfirmedCause | None:
    """The first cause of the table that holds, with others that explain the same numbers."""
    causes: dict[str, ConfirmedCause] = {}
    if not evidence.is_comparable:
        return None
    for cause in CAUSES:
        if evidence.stage not in cause.stages or cause.name in causes:
            continue
        for account in cause.pattern(evidence):
            finding = confirmed(cause, account, evidence)
            if finding is not None:
                causes[cause.name] = finding
                break
    if not causes:
        return None
    best, *others = causes.values()
    return dataclasses.replace(best, or_else=tuple(other.says for other in others))


def _collected(
    first: Difference, ours: Job, single: Job, right: RecordedTrace, tolerance: Tolerance, run: Run
) -> Evidence:
    again = run(f"cause-{ours.precision}-{ours.ranks}", _traced(ours, first.step))
    mesh = ours.strategy_spec.mesh
    facts = again.ranks[0][START].get("facts", {})
    parts: BatchParts | None = None
    alone: RecordedTrace | None = None
    if first.step != START:
        passes = [rank[first.step].get("micro_batches") or [] for rank in again.ranks]
        data = max(1, mesh.size(DATA))
        cut = dataclasses.replace(
            _traced(single, first.step),
            replay=str(right.path),
            cut_for=data,
            micro_batch=ours.micro_batch or _micro_batch(passes),
            added_by_each=_biases(facts),
            adding=ours.ranks // data,
        )
        alone = run(f"cause-{ours.precision}-{ours.ranks}-parts", cut)
        parts = read_parts(alone.path, first.step)
    paths = [tensors_path(again.path, first.step, rank) for rank in range(len(again.ranks))]
    each = tuple(load_file(path) if path.exists() else {} for path in paths)
    return Evidence(first, tolerance, mesh, right, again, each, parts, facts, alone)


def _traced(job: Job, step: int) -> Job:
    return dataclasses.replace(job, parts_of=step)


def _micro_batch(passes: Sequence[Sequence[int]]) -> int | None:
    """The micro-batch that the strategy chose, where the job does not set one."""
    most = max(passes, key=len)
    return max(most) if len(most) > 1 else None


def _biases(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The whole biases of layers whose weight is cut: their outputs are summed over the ranks."""
    cut = facts.get("cut", {})
    rooms = [name.removesuffix("weight") for name in cut if name.endswith("weight")]
    return tuple(f"{room}bias" for room in rooms if f"{room}bias" not in cut)
