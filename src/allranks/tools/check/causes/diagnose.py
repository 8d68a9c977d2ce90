"""The known causes, each with the stages that show it first, and what to do.

They are tried in this order: the more specific explanation of the same numbers comes first.
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
from allranks.tools.check.causes import counts, gradients, state
from allranks.tools.check.causes.cause import (
    SAMPLE_WEIGHT,
    BatchParts,
    Cause,
    ConfirmedCause,
    Evidence,
    Tensors,
    confirmed,
    read_parts,
)
from allranks.tools.check.compare import Difference, RecordedTrace, Tolerance
from allranks.training.record.trace import START, tensors_path

GRADIENT, LOSS = ("gradient",), ("loss",)
BOTH = ("loss", "gradient")
COUNTED = ("samples", SAMPLE_WEIGHT)

CAUSES = tuple(
    Cause(*row)
    for row in (
        (
            "parts of rank 0",
            ("weight",),
            state.parts_of_the_first,
            "give each rank the part that belongs to it: rows [rank · n, (rank + 1) · n)",
        ),
        (
            "weights not sent",
            ("weight", "buffer"),
            state.not_sent_at_the_start,
            "broadcast weights and buffers from rank 0 once, before the optimizer is made",
        ),
        (
            "counted by each",
            COUNTED,
            counts.by_several,
            "let one of the ranks that read the same samples count them",
        ),
        (
            "micro-batch counted as full",
            COUNTED,
            counts.as_full,
            "count the samples of each micro-batch, not of the first",
        ),
        (
            "padding counted",
            (SAMPLE_WEIGHT,),
            counts.with_padding,
            "sum the weights of the values, not how many there are",
        ),
        (
            "labels shifted after the cut",
            (SAMPLE_WEIGHT, "loss"),
            counts.labels_cut,
            "shift labels on the whole sequence, and cut them with it",
        ),
        (
            "sum over ranks lost",
            COUNTED,
            counts.by_one,
            "add what comes from another rank to what is there, and sum over all of them",
        ),
        (
            "result follows the cut",
            (SAMPLE_WEIGHT, "loss", "gradient", "buffer"),
            counts.samples_together,
            "let loss and output of each sample follow it alone: no mean, statistics or padding "
            'over a micro-batch (weight(batch), loss_over = "batch"); draw with functions of torch',
        ),
        (
            "one random stream",
            LOSS,
            counts.one_stream,
            "seed what is drawn by the samples or the rank, not alike on every rank",
        ),
        (
            "bias of each rank",
            LOSS,
            counts.bias_of_each,
            "add the bias after the sum over the ranks, or on one of them",
        ),
        (
            "micro-batch mixed up",
            LOSS,
            counts.a_micro_batch_before,
            "keep what each micro-batch sends apart, by its number",
        ),
        (
            "mean of means",
            BOTH,
            gradients.of_ranks,
            "sum losses and counts over all ranks, and divide once by the sum of the counts",
        ),
        (
            "mean of micro-batch means",
            BOTH,
            gradients.of_micro_batches,
            "sum the losses of all micro-batches, and divide once by the count of all",
        ),
        (
            "padding counted",
            BOTH,
            gradients.padding_counted,
            "divide by the sum of the weights, not by how many values there are",
        ),
        (
            "clipped before the sum",
            GRADIENT,
            gradients.clipped_before,
            "clip after gradients are summed, by the norm of the sum",
        ),
        (
            "summed, not averaged",
            GRADIENT,
            gradients.summed,
            "divide once, by the weight of the whole batch; sum over each axis once",
        ),
        (
            "micro-batches not averaged",
            GRADIENT,
            gradients.by_micro_batches,
            "divide the loss of every micro-batch by what all of them weigh together",
        ),
        (
            "loss scale",
            GRADIENT,
            gradients.by_loss_scale,
            "divide gradients once by the loss scale that their loss was multiplied by",
        ),
        (
            "some gradients times ranks",
            GRADIENT,
            gradients.some_times_ranks,
            "divide by the ranks that bring something in, which of these weights are other ones",
        ),
        (
            "some gradients times micro-batches",
            GRADIENT,
            gradients.some_times_micro_batches,
            "scale the loss alone: what comes back from a later stage is scaled already",
        ),
        (
            "untied",
            GRADIENT,
            state.untied,
            "sum the gradients of a shared weight over all ranks that use it",
        ),
        (
            "sum over ranks lost",
            GRADIENT,
            gradients.not_summed,
            "sum these gradients over that axis before they are used",
        ),
        (
            "part of a rank lost",
            BOTH,
            gradients.of_a_rank,
            "let every rank's part be in the sum: the same buckets, in the same order, on all",
        ),
        (
            "part of a rank lost",
            GRADIENT,
            gradients.of_other_ranks,
            "add what every rank brings in to each part, before the ranks keep theirs",
        ),
        (
            "micro-batch lost",
            BOTH,
            gradients.of_a_micro_batch,
            "sum after the last backward pass, over all of them; no_sync on all but the last",
        ),
        (
            "gradient of the last step",
            GRADIENT,
            gradients.of_a_stale_step,
            "set every gradient and bucket to zero when a step begins",
        ),
        (
            "rounded before the sum",
            GRADIENT,
            gradients.rounded,
            "sum gradients in 32 bits, or ask for reduce=bf16, whose card says so",
        ),
        (
            "norm of some ranks",
            ("gradient norm",),
            counts.of_some_ranks,
            "sum the squares of all parts over all axes before the root is taken",
        ),
        (
            "norm counts copies",
            ("gradient norm",),
            counts.whole_by_each,
            "add the squares of what several ranks hold once",
        ),
        (
            "schedule",
            ("learning rate",),
            counts.of_another_step,
            "move the schedule on once for each step of the optimizer, whatever the ranks",
        ),
        (
            "update not sent",
            ("weight",),
            state.not_sent,
            "send updated weights from their owner to all ranks after the step",
        ),
        ("update lost", ("weight",), state.lost, "give the optimizer these weights"),
        (
            "weight written by the model",
            ("weight",),
            state.not_written,
            "move a weight that is not trained, such as a teacher's, in on_step of a callback",
        ),
        (
            "decay of each rank",
            ("weight",),
            state.decayed_by_each,
            "decay weights once for each step",
        ),
        (
            "optimizer state lost",
            ("weight",),
            state.fresh_state,
            "keep, save and restore what the optimizer keeps for each weight",
        ),
        (
            "step times ranks",
            ("weight",),
            state.times_ranks,
            "leave the rate as it is: the batch belongs to the job, not to a rank",
        ),
        (
            "average of each rank",
            ("average",),
            state.other_decay,
            "take the decay as it is, once for each step",
        ),
        (
            "average before the step",
            ("average",),
            state.averaged_before,
            "take the average after the optimizer's step",
        ),
        (
            "statistics of one rank",
            ("buffer",),
            state.of_one_rank,
            "sum the moments of all ranks before running statistics are updated",
        ),
        (
            "statistics updated twice",
            ("buffer",),
            state.updated_twice,
            "update running statistics once for each step",
        ),
    )
)


# --- diagnose ------------------------------------------------------------------------------------
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
    each = tuple(_tensors(again.path, first.step, rank) for rank in range(len(again.ranks)))
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


def _tensors(trace: Path, step: int, rank: int) -> Tensors:
    path = tensors_path(trace, step, rank)
    return load_file(path) if path.exists() else {}
