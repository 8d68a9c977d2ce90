"""The causes that are known, each with the stages in which it is first seen, and what to do.

In the order in which they are tried: what says more of the same numbers comes first.
"""

from __future__ import annotations

from allranks.tools.check.causes import (
    buffers,
    counts,
    factors,
    missing,
    norms,
    starts,
    updates,
    weighting,
)
from allranks.tools.check.causes.cause import Cause
from allranks.tools.check.causes.evidence import SAMPLE_WEIGHT

GRADIENT, LOSS = ("gradient",), ("loss",)
BOTH = ("loss", "gradient")
COUNTED = ("samples", SAMPLE_WEIGHT)

CAUSES = tuple(
    Cause(*row)
    for row in (
        (
            "parts of rank 0",
            ("weight",),
            starts.parts_of_the_first,
            "give each rank the part that belongs to it: rows [rank · n, (rank + 1) · n)",
        ),
        (
            "weights not sent",
            ("weight", "buffer"),
            starts.not_sent_at_the_start,
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
            weighting.of_ranks,
            "sum losses and counts over all ranks, and divide once by the sum of the counts",
        ),
        (
            "mean of micro-batch means",
            BOTH,
            weighting.of_micro_batches,
            "sum the losses of all micro-batches, and divide once by the count of all",
        ),
        (
            "padding counted",
            BOTH,
            weighting.padding_counted,
            "divide by the sum of the weights, not by how many values there are",
        ),
        (
            "clipped before the sum",
            GRADIENT,
            weighting.clipped_before,
            "clip after gradients are summed, by the norm of the sum",
        ),
        (
            "summed, not averaged",
            GRADIENT,
            factors.summed,
            "divide once, by the weight of the whole batch; sum over each axis once",
        ),
        (
            "micro-batches not averaged",
            GRADIENT,
            factors.by_micro_batches,
            "divide the loss of every micro-batch by what all of them weigh together",
        ),
        (
            "loss scale",
            GRADIENT,
            factors.by_loss_scale,
            "divide gradients once by the loss scale that their loss was multiplied by",
        ),
        (
            "some gradients times ranks",
            GRADIENT,
            factors.some_times_ranks,
            "divide by the ranks that bring something in, which of these weights are other ones",
        ),
        (
            "some gradients times micro-batches",
            GRADIENT,
            factors.some_times_micro_batches,
            "scale the loss alone: what comes back from a later stage is scaled already",
        ),
        (
            "untied",
            GRADIENT,
            starts.untied,
            "sum the gradients of a shared weight over all ranks that use it",
        ),
        (
            "sum over ranks lost",
            GRADIENT,
            missing.not_summed,
            "sum these gradients over that axis before they are used",
        ),
        (
            "part of a rank lost",
            BOTH,
            missing.of_a_rank,
            "let every rank's part be in the sum: the same buckets, in the same order, on all",
        ),
        (
            "part of a rank lost",
            GRADIENT,
            missing.of_other_ranks,
            "add what every rank brings in to each part, before the ranks keep theirs",
        ),
        (
            "micro-batch lost",
            BOTH,
            missing.of_a_micro_batch,
            "sum after the last backward pass, over all of them; no_sync on all but the last",
        ),
        (
            "gradient of the last step",
            GRADIENT,
            missing.of_a_stale_step,
            "set every gradient and bucket to zero when a step begins",
        ),
        (
            "rounded before the sum",
            GRADIENT,
            missing.rounded,
            "sum gradients in 32 bits, or ask for reduce=bf16, whose card says so",
        ),
        (
            "norm of some ranks",
            ("gradient norm",),
            norms.of_some_ranks,
            "sum the squares of all parts over all axes before the root is taken",
        ),
        (
            "norm counts copies",
            ("gradient norm",),
            norms.whole_by_each,
            "add the squares of what several ranks hold once",
        ),
        (
            "schedule",
            ("learning rate",),
            updates.of_another_step,
            "move the schedule on once for each step of the optimizer, whatever the ranks",
        ),
        (
            "update not sent",
            ("weight",),
            updates.not_sent,
            "send updated weights from their owner to all ranks after the step",
        ),
        ("update lost", ("weight",), updates.lost, "give the optimizer these weights"),
        (
            "weight written by the model",
            ("weight",),
            updates.not_written,
            "move a weight that is not trained, such as a teacher's, in on_step of a callback",
        ),
        (
            "decay of each rank",
            ("weight",),
            updates.decayed_by_each,
            "decay weights once for each step",
        ),
        (
            "optimizer state lost",
            ("weight",),
            updates.fresh_state,
            "keep, save and restore what the optimizer keeps for each weight",
        ),
        (
            "step times ranks",
            ("weight",),
            updates.times_ranks,
            "leave the rate as it is: the batch belongs to the job, not to a rank",
        ),
        (
            "average of each rank",
            ("average",),
            updates.other_decay,
            "take the decay as it is, once for each step",
        ),
        (
            "average before the step",
            ("average",),
            updates.averaged_before,
            "take the average after the optimizer's step",
        ),
        (
            "statistics of one rank",
            ("buffer",),
            buffers.of_one_rank,
            "sum the moments of all ranks before running statistics are updated",
        ),
        (
            "statistics updated twice",
            ("buffer",),
            buffers.updated_twice,
            "update running statistics once for each step",
        ),
    )
)
