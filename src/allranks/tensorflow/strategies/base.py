"""The base of all strategies of the TensorFlow engine: devices, a scope, and the local replicas.

The arithmetic of a step is the same for all, in `step`. A strategy only chooses where variables
are placed, which processes compute, and which strategy of TensorFlow joins the replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.strategies.card import Workload
from allranks.strategies.cards import CARDS
from allranks.tensorflow.comm import ReplicaComm
from allranks.training.keras_task import Task


class TensorFlowStrategy(ABC):
    """How the replicas of a model are joined. Its constructor takes devices, and joins the ranks.

    `distribution` is TensorFlow's strategy; `replicas` is the number of all replicas,
    `local_replicas` those of this process; `comm` joins the ranks.
    """

    name: ClassVar[str]

    distribution: Any
    replicas: int = 1
    local_replicas: range = range(1)
    comm: ReplicaComm
    collective_options: Any = None

    def __init__(self, task: Task, job: Job, world: World) -> None:
        self.task, self.job, self.world = task, job, world
        self.options: Mapping[str, Any] = job.strategy_spec.options
        self.comm = ReplicaComm()
        self.join()

    @abstractmethod
    def join(self) -> None:
        """Take the devices of this process, and join the other ranks. Every rank calls this."""

    def promised_bytes(self, message_bytes: int) -> int:
        """The bytes that the busiest rank sends in a step, by the card."""
        work = Workload((message_bytes,), self.comm.size, self.task.shards)
        return CARDS[self.name].bytes_sent(work, self.options)

    def scope(self) -> Any:
        """A context in which variables are created where this strategy places them."""
        return self.distribution.scope()

    def trained(self, model: Any) -> list[Any]:
        """The variables that the optimizer of `model` updates."""
        return list(model.trainable_variables)

    def check(self, built: BuiltKerasModel) -> None:
        """Raise `RequestError` for a model or optimizer that this strategy cannot train."""

    def feed(self, parts: list[Any]) -> Any:
        """The parts of the local replicas, in order, as a distributed value of TensorFlow."""
        if len(parts) == 1 and self.replicas == 1:
            return parts[0]
        first = self.local_replicas.start
        return self.distribution.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group - first]
        )

    def leave(self) -> None:
        """Release what `join` took."""


# --- built ---------------------------------------------------------------------------------------
# A model with its optimizer, as it was built for a training.


@dataclass(frozen=True)
class BuiltKerasModel:
    """A model and its optimizer; `swapped` names the layers that were swapped in.

    `made_rate` is the learning rate as the task made it, before any step; `None` where a schedule
    of Keras decides it. `not_pretrained` are weights that the task's
    `pretrained` does not name: none.
    """

    model: Any
    optimizer: Any
    swapped: dict[str, list[str]]
    made_rate: float | None
    not_pretrained: list[str] = field(default_factory=list)
