"""Lines of the TensorFlow engine to break, each with what `check` must say of it. No framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A line of one function of the engine changed, and what `check` must say of it.

    Of the task `Broken` with `settings`; `step` and `stage` are where it must be found first.
    """

    place: str
    line: str
    becomes: str
    stage: str
    tensor: str | None
    hint: str
    step: int = 0
    settings: tuple[str, ...] = ()


STEP = "allranks.tensorflow.step.step:Graphs."
FIRST = "batch_normalization/beta"  # the first of its gradients by name
SUMS = "*sums, tally = context.all_reduce(SUM, [*there, tally], self.options)"
FAULTS = {
    "mean of means": Fault(
        STEP + "_micro",
        "scaled = total * tf.cast(factor, self.kind)",
        "scaled = total * tf.cast(factor * numbers[NOMINAL] / self.replicas / samples, self.kind)",
        "gradient",
        FIRST,
        "mean of means",
        step=4,  # the first batch whose samples the replicas cannot share evenly
        settings=("weighted=false",),
    ),
    "the gradients of one replica are dropped": Fault(
        STEP + "_reduced",
        "[*there, tally]",
        "[*(g * float(_replica_number() == 0) for g in there), tally]",
        "gradient",
        FIRST,
        "changed before they were summed",
    ),
    "moving statistics of one replica": Fault(
        STEP + "_reduced",
        SUMS,
        "*sums, found = context.all_reduce(SUM, [*there, tally], self.options); "
        "at = HEAD + self.replicas; tally = tf.concat([found[:at], tally[at:]], 0)",
        "buffer",
        "batch_normalization/moving_mean",
        "BatchNorm statistics of one rank",
    ),
    "the weight of one replica": Fault(
        STEP + "_reduced",
        SUMS,
        "own = tally[WEIGHT]; " + SUMS + "; "
        "tally = tf.tensor_scatter_nd_update(tally, [[WEIGHT]], own[None])",
        "weight",
        None,
        "weights counted twice or lost",
    ),
    "clipped before the sum": Fault(
        STEP + "_reduced",
        "[*there, tally]",
        "[*tf.clip_by_global_norm(there, 0.01)[0], tally]",
        "gradient",
        FIRST,
        "changed before they were summed",
    ),
    "summed, and not divided": Fault(
        STEP + "_finished",
        "factor = nominal / weight",
        "factor = nominal / weight * self.replicas",
        "gradient",
        FIRST,
        "a sum where the mean is wanted",
        settings=("regularized=false",),
    ),
    "each replica updates by a gradient of its own": Fault(
        STEP + "_update",
        "self.optimizer.apply(local, used)",
        "self.optimizer.apply([g * (1.0 + _replica_number()) for g in local], used)",
        "weight",
        FIRST,
        "each rank updates by itself",
    ),
    "one stream for all replicas": Fault(
        "allranks.tensorflow.step.layers:KerasShardDropout.call",
        "_mixed(piece.shard,",
        "_mixed(piece.shard - now.pieces[0].shard,",
        "loss",
        None,
        "other random numbers",
    ),
    "a schedule that every rank steps": Fault(
        "allranks.tensorflow.trainer:Trainer._says",
        "self._schedule(update)",
        "self._schedule(update * self.strategy.replicas)",
        "learning rate",
        None,
        "stepped by each rank",
        step=1,
    ),
    "all ranks read the same samples": Fault(
        "allranks.tensorflow.data.batches:Batches._span",
        "start = sum(sizes[: self._mine.start])",
        "start = 0",
        "samples",
        None,
        "ranks read the same data",
    ),
    "an evaluation of one rank": Fault(
        "allranks.tensorflow.data.task_data:Evaluator.run",
        "self.strategy.comm.sum(np.array(rows, np.float64))",
        "np.array(rows, np.float64)",
        "evaluation",
        None,
        "an evaluation of",
        step=4,
    ),
}
