"""The protocol of every engine's trainer, for the shared loop and the shared rank program.

An engine writes its own class; nothing derives from this. The public names mean in each what its
docstrings say: see the `EngineTrainer` of `allranks.torch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

from allranks.checkpoint.commit import Ranks
from allranks.job.faults import Faults
from allranks.job.job import Job
from allranks.launcher.heartbeat import Heartbeat
from allranks.launcher.world import World
from allranks.training.callback import Callback
from allranks.training.evaluation_plan import EvaluationPlan
from allranks.training.progress import Progress, StepResult
from allranks.training.task_fields import TaskFields


class TrainerRanks(Ranks, Protocol):
    """The ranks that train together."""

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...


class Loop(Protocol):
    """What a training loop needs; one call is one step, or several that an engine fuses."""

    @property
    def callbacks(self) -> Sequence[Callback]: ...

    def calls(self) -> Iterator[list[Any]]:
        """The batches that come next, in groups for one call."""
        ...

    def steps(self, batches: list[Any]) -> list[StepResult]:
        """The steps of one call."""
        ...

    def evaluate_if_due(self) -> dict[str, float] | None: ...

    def save_if_due(self, result: StepResult) -> bool: ...

    def finish(self) -> bool: ...


class EngineTrainer(Loop, Protocol):
    """What the program of a rank needs besides, from `rehearse` to `close`.

    `weights` gives all of them by name in sorted order, each with its `nbytes`;
    every rank calls it.
    """

    progress: Progress

    @property
    def job(self) -> Job: ...
    @property
    def task(self) -> TaskFields: ...
    @property
    def world(self) -> World: ...
    @property
    def comm(self) -> TrainerRanks: ...
    @property
    def evaluation_plan(self) -> EvaluationPlan: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def faults(self) -> Faults: ...
    @property
    def built(self) -> Any: ...
    @property
    def task_data(self) -> Any: ...
    @property
    def model_notes(self) -> Sequence[str]: ...
    @property
    def user_buffers(self) -> list[str]: ...
    @property
    def total_steps(self) -> int | None: ...

    def rehearse(self) -> None: ...

    def resume(self) -> int | None: ...

    def evaluate(self) -> dict[str, float]: ...

    def weights(self) -> Iterator[tuple[str, Any]]: ...

    def save(self, *, wait: bool = True, evaluate: bool = True) -> bool: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None: ...
