"""`parameter-server`: servers hold the weights, workers pull them and push gradients on their own.

The processes of the job are a chief, workers (`--ranks` of them), servers and perhaps an evaluator.
This class is the chief's end: it makes the variables, which lie on the servers, and hands out the
steps (`parameter_server.trainer`). Workers and servers run TensorFlow's own server and nothing of
ours (`parameter_server.server`). Keras' own `fit` does not run under this strategy with Keras 3:
its optimizer sums gradients over replicas, which has no meaning here. A step whose graph is made
outside of the scope of the strategy knows of no replicas, and its updates still go to where the
variables lie.

A variable may be cut along its first axis over the servers. Keras' optimizers know nothing of such
variables, so each part is a variable of its own for them (`trained`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from allranks.errors import RequestError
from allranks.tensorflow.parameter_server.server import CHIEF, FAIL_FAST, cluster_of
from allranks.tensorflow.rendezvous import meet
from allranks.tensorflow.strategies.base import TensorFlowStrategy

KIB = 1024


class ParameterServerChief(TensorFlowStrategy):
    """The chief of a job with servers. `distribution` is that of the chief alone: it evaluates."""

    name = "parameter-server"

    def join(self) -> None:
        world = self.world
        if world.role != CHIEF:
            raise RequestError(
                asked="--strategy parameter-server in a process that was started alone",
                found="no servers and no workers beside it",
                why="each of them is a process of the job, which its launcher starts",
                do="allranks train --strategy parameter-server, or Job(strategy='single')",
            )
        tf.config.set_visible_devices([], "GPU")  # the chief computes no step
        os.environ.update(FAIL_FAST)
        ports = meet(world)
        process_set = self.job.strategy_spec.process_set
        accelerators = {"GPU": 1} if self.job.device == "cuda" else {}
        self.distribution = tf.distribute.get_strategy()
        self.served = tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(cluster_of(process_set, ports.addresses)),
                task_type="chief",
                task_id=0,
                rpc_layer="grpc",
                num_accelerators=accelerators,
            ),
            variable_partitioner=partitioner(self.options),
        )
        ports.close()
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.served)
        self._parts: dict[int, list[Any]] = {}

    @property
    def most_under_way(self) -> int:
        """How many batches may be handed out and not done."""
        return int(self.options["in_flight"]) * self.job.ranks

    def scope(self) -> Any:
        return self.served.scope()

    def trained(self, model: Any) -> list[Any]:
        """A Keras variable for each part of each variable that is trained, in their order."""
        return [
            part
            for variable in model.trainable_variables
            for part in self._parts.setdefault(id(variable), parts_of(variable))
        ]


def partitioner(options: Mapping[str, Any]) -> Any:
    """TensorFlow's partitioner for the options of the card; `None` cuts nothing."""
    servers, part_bytes = options["servers"], int(options["part_kb"] * KIB)
    there = tf.distribute.experimental.partitioners
    partitioners: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "fixed": lambda: there.FixedShardsPartitioner(servers),
        "min-size": lambda: there.MinSizePartitioner(part_bytes, max_shards=servers),
        "max-size": lambda: there.MaxSizePartitioner(part_bytes),
    }
    return partitioners[options["partition"]]()


def parts_of(variable: Any) -> list[Any]:
    """The parts of a Keras variable that is cut over servers, each as one; else itself alone."""
    parts = pieces_of(variable.value)
    if len(parts) == 1:
        return [variable]
    name = variable.path.replace("/", "_")
    return [
        keras.Variable(part, name=f"{name}_part_{number}_of_{len(parts)}", trainable=True)
        for number, part in enumerate(parts)
    ]


def pieces_of(value: Any) -> list[Any]:
    """The variables of TensorFlow that one is made of: several where it is cut over servers."""
    parts = getattr(value, "variables", None)
    return list(parts) if isinstance(parts, (list, tuple)) else [value]
