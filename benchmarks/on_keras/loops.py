"""The loops that `tensorflow.py` runs side by side in one process, one class each.

    hand         a loop as TensorFlow's guide to custom training has it: one tf.function that takes
                 the next batch, the gradient of the loss over the global batch, optimizer.apply
    hand-again   the same loop a second time: how much equal loops differ in this measurement
    fit          `fit` of Keras as it is, which compiles with XLA where the model allows it
    fit-no-xla   `fit` with jit_compile=False
    allranks     our Trainer; shards as many as replicas, so that BatchNormalization sees what it
                 sees in the others
    allranks-8   the same with the default of 8 shards

Each is there with 1 and with 10 steps per call of TensorFlow (`steps_per_execution`). The others
take their batches from a tf.data.Dataset that gathers them in TensorFlow and reads ahead; ours from
arrays. Ours and `hand` have a loss as a Python number: ours of each step, `hand` of each call.
`fit` reads none before its end; its times are those between two ends of calls.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from workloads import Workload, losses_of

from allranks.job.job import Job
from allranks.tensorflow.trainer import Trainer

EPOCHS = 20  # whose order is laid out; then it begins again
STEPS_LIMIT = 10**9
WARM_CALLS = 2  # of each `fit`, before its clock starts: it begins a new iterator


class Loop(ABC):
    """A training that can be run in blocks of steps; `losses` are those it has seen."""

    def __init__(self, workload: Workload, replicas: int, per_call: int) -> None:
        self.workload, self.replicas, self.per_call = workload, replicas, per_call
        self.losses: list[float] = []
        self.strategy = _strategy(replicas)
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make the model and what goes with it."""

    @abstractmethod
    def run(self, steps: int) -> float:
        """The next `steps` optimizer steps; returns how many seconds they took."""

    @abstractmethod
    def first_loss(self, steps: int) -> float:
        """The mean loss of the first `steps` steps, which this makes."""

    def close(self) -> None:
        """Let go of what holds threads."""

    def dataset(self) -> tf.data.Dataset:
        """The batches, in the order in which allranks takes them."""
        inputs, labels = (tf.constant(array) for array in self.workload.data())
        numbers = tf.data.Dataset.from_tensor_slices(self.workload.numbers(EPOCHS)).repeat()

        def rows(chosen: Any) -> Any:
            return tf.gather(inputs, chosen), tf.gather(labels, chosen)

        batches = numbers.batch(self.workload.batch, drop_remainder=True)
        return batches.map(rows, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)


def _strategy(replicas: int) -> Any:
    devices = [f"/cpu:{number}" for number in range(replicas)]
    one = tf.distribute.get_strategy
    return one() if replicas == 1 else tf.distribute.MirroredStrategy(devices)


class ByHand(Loop):
    """As in TensorFlow's guide to custom training."""

    def prepare(self) -> None:
        with self.strategy.scope():
            self.model = self.workload.model()
            self.optimizer = self.workload.make_optimizer()
            self.optimizer.build(self.model.trainable_variables)
        dataset = self.dataset()
        if self.replicas > 1:
            dataset = self.strategy.experimental_distribute_dataset(dataset)
        self.batches = iter(dataset)
        self.call = tf.function(self._one if self.per_call == 1 else self._several)

    def _replica(self, batch: Any) -> Any:
        inputs, labels = batch
        with tf.GradientTape() as tape:
            losses = losses_of(labels, self.model(inputs, training=True))
            loss = tf.reduce_sum(losses) / self.workload.batch
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def _one(self, batches: Any) -> Any:
        losses = self.strategy.run(self._replica, args=(next(batches),))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def _several(self, batches: Any) -> Any:
        total = tf.zeros(())
        for _ in tf.range(self.per_call):
            total += self._one(batches)
        return total / self.per_call

    def run(self, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps // self.per_call):
            self.losses.append(float(self.call(self.batches)))
        return time.perf_counter() - start

    def first_loss(self, steps: int) -> float:
        self.run(steps)
        return sum(self.losses) / len(self.losses)


class Clock(keras.callbacks.Callback):
    """When the calls `first` and `last` of a `fit` ended, each with so many steps."""

    async_safe = True  # it looks at no value, so `fit` need not wait for any

    def __init__(self, per_call: int, first: int, last: int) -> None:
        super().__init__()
        self.at: dict[int, float] = {}
        self.ends = {(number + 1) * per_call - 1: number for number in (first, last)}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch in self.ends:
            self.at[self.ends[batch]] = time.perf_counter()


class Fit(Loop):
    """`fit` of Keras."""

    jit: str | bool = "auto"

    def prepare(self) -> None:
        with self.strategy.scope():
            self.model = self.workload.model()
            self.model.compile(
                self.workload.make_optimizer(),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                steps_per_execution=self.per_call,
                jit_compile=self.jit,
            )
        self.batches = self.dataset()

    def run(self, steps: int) -> float:
        calls = WARM_CALLS + steps // self.per_call
        clock = Clock(self.per_call, WARM_CALLS - 1, calls - 1)
        self._fit(calls * self.per_call, [clock])
        return clock.at[calls - 1] - clock.at[WARM_CALLS - 1]

    def _fit(self, steps: int, callbacks: list[Any]) -> float:
        done = self.model.fit(
            self.batches,
            steps_per_epoch=steps,
            callbacks=callbacks,
            verbose=0,
            shuffle=False,
        )
        return float(done.history["loss"][0])

    def first_loss(self, steps: int) -> float:
        return self._fit(steps, [])


class FitNoXLA(Fit):
    """`fit` with graphs as TensorFlow runs them."""

    jit = False


class AllRanks(Loop):
    """The Trainer, from a script."""

    def shards(self) -> int:
        return self.replicas

    def prepare(self) -> None:
        name = "single" if self.replicas == 1 else f"mirrored:replicas={self.replicas}"
        job = Job(strategy=name, steps=STEPS_LIMIT, steps_per_call=self.per_call)
        self.trainer = Trainer(self.workload.task(self.shards()), job)
        self.calls: Iterator[Any] = self.trainer.calls()

    def run(self, steps: int) -> float:
        start = time.perf_counter()
        done = 0
        while done < steps:  # a call ends with its epoch, so some have fewer steps
            results = self.trainer.steps(next(self.calls))
            self.losses += [result.loss for result in results]
            done += len(results)
        return (time.perf_counter() - start) / done * steps

    def first_loss(self, steps: int) -> float:
        self.run(steps)
        return sum(self.losses[:steps]) / steps

    def close(self) -> None:
        self.trainer.close()


class AllRanks8(AllRanks):
    """With the default number of shards."""

    def shards(self) -> int:
        return 8


LOOPS = {
    "hand": ByHand,
    "hand-again": ByHand,
    "fit": Fit,
    "fit-no-xla": FitNoXLA,
    "allranks": AllRanks,
    "allranks-8": AllRanks8,
}
