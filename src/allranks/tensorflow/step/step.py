"""One optimizer step on one global batch, as a graph of TensorFlow; the same for every strategy.

    forward and backward of every micro-batch              `gradients_of`, on every replica
    one sum of gradients and tally over all replicas       `_reduced`
    division by the weight, regularizer, norm, clipping    `_finished`, alike on every replica
    update, BatchNormalization                             `_update`, if the step is fine

The engine owns the division: losses are per sample, and what is differentiated is their weighted
sum over the samples of the global batch, so that the sum over micro-batches and replicas is the
mean wherever all weights are 1; other weights are put right after the sum, by samples / weight.

The tally rides on the gradients, so that no step sends a message for bookkeeping:

    [ loss, weight, samples, stop, save, whether its own part is bad for each replica
      | BatchNormalization: samples, means, variances per layer ]

Shapes are fixed in the graph: it is made anew for each way in which a batch is cut, which is one
for the full batches and one for the last of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.loss_scale import parse_loss_scale
from allranks.strategies.shards import Micro
from allranks.tensorflow.comm import translated
from allranks.tensorflow.data.batches import ReplicaBatch
from allranks.tensorflow.data.nested import mapped
from allranks.tensorflow.step.inputs import (
    ASKED_SAVE,
    ASKED_STOP,
    FINE,
    HEAD,
    LIMIT,
    LOSS,
    MAGNITUDE,
    NOMINAL,
    POISON,
    RATE,
    SCALE,
    SUM,
    WEIGHT,
    GraphProbe,
    InputSplit,
    Insides,
    StepInputs,
    StepSums,
    by_replica,
    named,
    pack,
)
from allranks.tensorflow.step.layers import GraphPass, InGraph, passing, shard_norms
from allranks.tensorflow.strategies.base import BuiltKerasModel, TensorFlowStrategy
from allranks.training.guard import BadStepFinding, Guard, weightless
from allranks.training.keras_task import Task
from allranks.training.progress import RankRequests, StepResult

# --- gradients -----------------------------------------------------------------------------------
# Arithmetic on the gradients of a replica: a list, with `None` where the loss does not reach.


def times(gradients: list[Any], factor: Any) -> list[Any]:
    """Each gradient times one factor."""
    return [None if g is None else g * tf.cast(factor, g.dtype) for g in gradients]


def added(first: Any, other: Any) -> Any:
    """Their sum, where `None` is nothing."""
    if first is None or other is None:
        return other if first is None else first
    return first + other


def length(gradients: list[Any]) -> Any:
    """The length of all gradients together."""
    there = [g for g in gradients if g is not None]
    return tf.linalg.global_norm(there) if there else tf.zeros(())


# --- losses --------------------------------------------------------------------------------------
# The losses of a micro-batch, one for each sample, and what is not taken for one.


def weighted_losses(
    task: Task, output: Any, batch: Any, samples: int, kind: Any
) -> tuple[Any, Any]:
    """The weighted losses of a micro-batch, a row per sample, and the sum of their weights."""
    losses = tf.cast(tf.convert_to_tensor(task.loss(full(output, kind), batch)), kind)
    if losses.ndim == 0 or losses.shape[0] != samples:
        raise RequestError(
            asked="loss(output, batch) of the task",
            found=f"values of shape {tuple(losses.shape)} for {samples} samples",
            why="the engine divides by the weight of the whole global batch, so it takes no mean",
            do="return one value for each sample: reduction='none', or a function of keras.losses",
        )
    weights = task.weight(batch)
    if weights is None:
        return losses, tf.cast(tf.size(losses), kind)
    weights = tf.cast(tf.convert_to_tensor(weights), kind)
    if weights.shape != losses.shape:
        raise RequestError(
            asked="weight(batch) of the task",
            found=f"shape {tuple(weights.shape)} for losses of shape {tuple(losses.shape)}",
            why="each value that loss() returns has its own weight",
            do="return the weights in the shape of the losses",
        )
    return losses * weights, tf.reduce_sum(weights)


def full(output: Any, kind: Any) -> Any:
    """An output with numbers of 16 bits as `kind`: no loss and no metric is computed in them."""
    short = (tf.float16, tf.bfloat16)
    return mapped(lambda t: tf.cast(t, kind) if t.dtype in short else t, output)


def check_layer_losses(model: Any) -> None:
    """Raise `RequestError` if a layer has added a loss in the forward pass that was just made."""
    names = [layer.name for layer in model._flatten_layers() if getattr(layer, "_losses", ())]
    if names:
        raise RequestError(
            asked="to train a model whose layers add losses",
            found=f"add_loss, or an activity regularizer, in {', '.join(names)}",
            why="they are means over what one replica sees, so they follow the replicas",
            do="compute them in loss(output, batch), a value for each sample",
        )


class Graphs:
    """The graphs of the steps of one training: of the model and optimizer that were `built`.

    With `updates_bad` the update is made whatever the gradient is. A `probe`, set before the first
    step, is told the insides of every step; without one they never leave the graph.
    """

    probe: GraphProbe | None = None

    def __init__(
        self, task: Task, built: BuiltKerasModel, strategy: TensorFlowStrategy, *, updates_bad: bool
    ) -> None:
        self.task: Any = InGraph(task)
        self.model, self.optimizer = built.model, built.optimizer
        self.distribution, self.replicas = strategy.distribution, strategy.replicas
        self.first, self.options = strategy.local_replicas.start, strategy.collective_options
        self.updates_bad = updates_bad
        self.variables = strategy.trained(self.model)
        self.norms = shard_norms(self.model)
        self.kind = tf.as_dtype(keras.config.floatx())
        self.has_schedule = task.overrides("schedule") or task.overrides("plateau")
        self._reached = [True] * len(self.variables)
        self._made: dict[Any, Callable[..., Any]] = {}
        self.tally_size = HEAD + self.replicas + sum(norm.moment_size for norm in self.norms)

    @property
    def message_bytes(self) -> int:
        """The bytes that are summed over the replicas in a step."""
        sizes = [int(math.prod(v.shape) * tf.as_dtype(v.dtype).size) for v in self.variables]
        return sum(sizes) + self.tally_size * int(self.kind.size)

    def run(self, data: Any, cut: InputSplit, says: list[StepInputs]) -> list[StepSums]:
        """As many steps as there are in `says`; `data` is what `tf.distribute` gives its replicas.

        For several steps every array of it has them along a first axis more. All ranks call this.
        """
        packed = pack(says)
        arrays = tf.nest.flatten(data, expand_composites=True)
        known = cut, len(says), *((tuple(array.shape), array.dtype) for array in arrays)
        with translated():
            if known not in self._made:  # a concrete one does not look at its arguments anew
                make = self._several if len(says) > 1 else self._one
                graph = tf.function(partial(make, cut), autograph=False)
                self._made[known] = graph.get_concrete_function(data, packed)
            rows, insides = self._made[known](data, packed)
        self.probe_insides(insides)
        return [self._read(row) for row in rows.numpy()]

    def probe_insides(self, insides: Insides) -> None:
        """Pass the intermediate values of a step to the probe, for every local replica."""
        if self.probe is not None:
            for replica, inside in enumerate(insides):
                self.probe.inside(replica, inside)

    def _read(self, row: NDArray[np.float64]) -> StepSums:
        head, bad = row[: HEAD + 3], row[HEAD + 3 :]
        loss, weight, samples, stop, save, norm, fine, rate = head.tolist()
        which = tuple(np.flatnonzero(bad).tolist())
        return StepSums(
            loss, weight, round(samples), stop > 0, save > 0, norm, fine > 0, rate, which
        )

    # --- the graph: what is called from here on makes it, and runs once for each --------------

    def _one(self, cut: InputSplit, data: Any, inputs: Any) -> tuple[Any, Insides]:
        row, insides = self._step(cut, data, inputs[0])
        return row[tf.newaxis], insides

    def _several(self, cut: InputSplit, data: Any, inputs: Any) -> tuple[Any, Insides]:
        steps = int(inputs.shape[0])
        width = HEAD + 3 + self.replicas
        rows = tf.TensorArray(tf.float64, steps, element_shape=(width,))

        def body(number: Any, goes_on: Any, rows: Any) -> tuple[Any, Any, Any]:
            def at_number(part: Any) -> Any:
                return mapped(lambda array: array[number], part)

            row, _ = self._step(cut, data, inputs[number], at_number, goes_on)
            goes_on &= row[FINE] > 0  # nothing is updated after the step that ends the job
            return number + 1, goes_on, rows.write(number, row)

        *_, rows = tf.while_loop(
            lambda number, goes_on, rows: number < steps,
            body,
            (tf.constant(0), tf.constant(True), rows),
            parallel_iterations=1,
            maximum_iterations=steps,
        )
        return rows.stack(), []

    def _step(
        self,
        cut: InputSplit,
        data: Any,
        inputs: Any,
        at_number: Callable[[Any], Any] = lambda part: part,
        goes_on: Any = True,
    ) -> tuple[Any, Insides]:
        """The result of a step, (HEAD + 3 + replicas,), float64, and values for the probe."""
        used: list[Any] = []
        key, numbers = inputs[0], tf.bitcast(inputs[1:], tf.float64)

        def replica(part: Any) -> tuple[list[Any], Any, Any, dict[str, Any]]:
            gradients, tally, magnitude = self.gradients_of(cut, at_number(part), key, numbers)
            gradients, tally = self._reduced(gradients, tally)
            gradients, row, moments, inside = self._finished(gradients, tally, numbers)
            used[:] = [v for v, g in zip(self.variables, gradients, strict=True) if g is not None]
            inside = {**inside, MAGNITUDE: magnitude} if self.probe is not None else {}
            return [g for g in gradients if g is not None], row, moments, inside

        gradients, row, moments, inside = self.distribution.run(replica, args=(data,))
        local = self.distribution.experimental_local_results
        row, moments = local(row)[0], local(moments)[0]
        insides = by_replica(local, inside)
        with self.distribution.scope():
            if self.has_schedule:
                self.optimizer.learning_rate.assign(tf.cast(numbers[RATE], self.kind))
            if self.updates_bad:
                self._update(gradients, used, moments)
            else:
                tf.cond(
                    tf.logical_and(row[FINE] > 0, goes_on),
                    lambda: self._update(gradients, used, moments),
                    lambda: tf.constant(0),
                )
        return row, insides

    def gradients_of(
        self, cut: InputSplit, micros: Any, key: Any, numbers: Any
    ) -> tuple[list[Any], Any, Any]:
        """The replica's gradients (`None` where the loss does not reach), its tally, the size of
        its losses.

        `micros` is one structure for each micro-batch. No communication.
        """
        replica = _replica_number()
        local_pieces = cut.pieces[replica - self.first]
        gradients: list[Any] = [None] * len(self.variables)
        tally, magnitude = tf.zeros(self.tally_size, self.kind), tf.zeros((), self.kind)
        poison = tf.cast(numbers[POISON], self.kind)
        for pieces, batch in zip(local_pieces, micros, strict=True):
            if not pieces:
                continue
            of_micro, part, size = self._micro(pieces, batch, key, numbers, poison)
            gradients = [added(g, f) for g, f in zip(gradients, of_micro, strict=True)]
            tally, magnitude = tally + part, magnitude + size
            poison = tf.ones((), self.kind)
        if not cut.spare:
            self._reached = [g is not None for g in gradients]
        else:  # one that has nothing to pass through knows what the loss reaches from before
            three = zip(gradients, self.variables, self._reached, strict=True)
            gradients = [
                tf.zeros(v.shape, v.dtype) if g is None and is_reached else g
                for g, v, is_reached in three
            ]
        marks = tf.zeros(self.replicas, self.kind)
        if self.replicas > 1:  # with several replicas, mark which one is bad
            fine = tf.math.is_finite(tally[LOSS]) & tf.math.is_finite(length(gradients))
            bad = tf.cast(~fine, self.kind)
            marks = tf.one_hot(replica, self.replicas, dtype=self.kind) * bad
        zeros = self.tally_size - HEAD - self.replicas
        requests = tf.cast(numbers[ASKED_STOP : ASKED_SAVE + 1], self.kind)
        more = tf.concat([tf.zeros(3, self.kind), requests, marks, tf.zeros(zeros, self.kind)], 0)
        return gradients, tally + more, magnitude

    def _micro(
        self, pieces: Micro, batch: Any, key: Any, numbers: Any, poison: Any
    ) -> tuple[list[Any], Any, Any]:
        """Forward and backward of one micro-batch: its gradients, its part of the tally and of
        the size of the losses.
        """
        samples = sum(piece.samples for piece in pieces)
        task = self.task
        with passing(GraphPass(pieces, samples, key)) as now:
            with tf.GradientTape() as tape:
                output = self.model(task.inputs(batch), training=True)
                losses, weights = weighted_losses(task, output, batch, samples, self.kind)
                total = tf.reduce_sum(losses) * poison
                factor = numbers[SCALE] / numbers[NOMINAL]
                scaled = total * tf.cast(factor, self.kind)
            gradients = tape.gradient(scaled, [v.value for v in self.variables])
        check_layer_losses(self.model)
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        moments = [
            tf.cast(now.moments[norm.shard_index], self.kind)
            if norm.shard_index in now.moments
            else tf.zeros(norm.moment_size, self.kind)
            for norm in self.norms
        ]
        counts = [total, tf.cast(weights, self.kind), tf.cast(samples, self.kind)]
        zeros = tf.zeros(HEAD - len(counts) + self.replicas, self.kind)
        tally = tf.concat([tf.stack(counts), zeros, *moments], 0)
        return gradients, tally, tf.reduce_sum(tf.abs(losses))

    def _reduced(self, gradients: list[Any], tally: Any) -> tuple[list[Any], Any]:
        """Sums over all replicas; gradients that are `None` are skipped."""
        there = [g for g in gradients if g is not None]
        context = tf.distribute.get_replica_context()
        *sums, tally = context.all_reduce(SUM, [*there, tally], self.options)
        summed = iter(sums)
        return [None if g is None else next(summed) for g in gradients], tally

    def _finished(
        self, gradients: list[Any], tally: Any, numbers: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """The gradients to apply, the row for the host, the moments, what was on the way to them.

        No communication.
        """
        kind, task = self.kind, self.task
        loss, weight = tally[LOSS], tally[WEIGHT]
        nominal = tf.cast(numbers[NOMINAL], kind)
        factor = nominal / weight / tf.cast(numbers[SCALE], kind)
        gradients = times(gradients, factor)
        loss, gradients = self._regularized(loss / weight, gradients)
        norm = length(gradients)
        inside = named("gradient", gradients)
        if task.clip_norm is not None:
            limit = tf.cast(task.clip_norm, norm.dtype)
            ratio = tf.minimum(limit / (norm + 1e-6), 1.0)
            gradients = times(gradients, ratio)
            inside |= named("clipped gradient", gradients)
        fine = tf.math.is_finite(loss) & tf.math.is_finite(norm)
        fine &= norm <= tf.cast(numbers[LIMIT], norm.dtype)
        rate = numbers[RATE] if self.has_schedule else self.optimizer.learning_rate
        judged = [tf.cast(tf.convert_to_tensor(x), tf.float64) for x in (norm, fine, rate)]
        row = [
            tf.cast(tf.concat([[loss], tally[1:HEAD]], 0), tf.float64),
            tf.stack(judged),
            tf.cast(tally[HEAD : HEAD + self.replicas], tf.float64),
        ]
        return gradients, tf.concat(row, 0), tally[HEAD + self.replicas :], inside

    def _regularized(self, loss: Any, gradients: list[Any]) -> tuple[Any, list[Any]]:
        """With the regularizer of the task, which is the same on every replica."""
        with tf.GradientTape() as tape:
            value = self.task.regularizer(self.model)
        if value is None:
            return loss, gradients
        of_regularizer = tape.gradient(value, [v.value for v in self.variables])
        gradients = [added(g, f) for g, f in zip(gradients, of_regularizer, strict=True)]
        return loss + tf.cast(value, loss.dtype), gradients

    def _update(self, gradients: list[Any], used: list[Any], moments: Any) -> Any:
        """Across replicas: each copy of each variable takes the gradient of its own device."""
        self.distribution.run(lambda local: self.optimizer.apply(local, used), args=(gradients,))
        start = 0
        for norm in self.norms:
            norm.update_moving(moments[start : start + norm.moment_size])
            start += norm.moment_size
        return tf.constant(0)


def _replica_number() -> int:
    """Which of all replicas the graph is being made for."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return number if isinstance(number, int) else int(tf.get_static_value(number))


# --- step result ---------------------------------------------------------------------------------
# The sums of one step become its `StepResult`: overflow, bad-step policy, loss scale.
#
# All ranks hold the same sums after a step, so all decide alike without a message.


class StepResultBuilder:
    """Makes the results of one job's steps. `whose` names the owner of a part: rank, replica."""

    def __init__(self, job: Job, whose: str) -> None:
        self.whose = whose
        self.guard = Guard(job.on_bad_step, job.spike, self._who)
        self.loss_scale = parse_loss_scale(job.loss_scale) if job.precision == "fp16" else None
        self.updates_bad = job.on_bad_step == "warn" and self.loss_scale is None
        self._bad: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """The factor of the next step's loss."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def result(self, batch: ReplicaBatch, sums: StepSums) -> StepResult:
        """The result of a step. Raises `BadStep` where the job ends with it."""
        if sums.weight <= 0:
            raise weightless(batch, sums.weight)
        scale, updated, text = self.loss_scale, sums.fine, ""
        overflow = scale is not None and scale.explains(sums.loss, sums.norm)
        used = None if scale is None else scale.value
        if not overflow:
            self._bad = sums.bad
            bad = self.guard.judge(sums.loss, sums.norm)
            if bad is not None:
                text = self.guard.decide(batch, bad).text
            updated = sums.fine or self.updates_bad
        if scale is not None and overflow:
            scale.overflowed()
        elif scale is not None and updated:
            scale.went_well()
        return StepResult(
            batch_index=batch.index,
            epoch=batch.epoch,
            loss=sums.loss,
            samples=sums.samples,
            weight=sums.weight,
            learning_rate=sums.rate,
            updated=updated,
            grad_norm=sums.norm,
            asked=RankRequests(sums.stop, sums.save),
            bad=text,
            loss_scale=used,
            overflow=overflow,
        )

    def _who(self, batch: Any, spiked: bool) -> tuple[BadStepFinding, ...]:
        """The replicas whose part made a step bad, from their marks in the sum."""
        if spiked or not self._bad:
            return ()
        names = ", ".join(f"{self.whose} {number}" for number in self._bad)
        return (BadStepFinding(f"it came in with {names}"),)
