"""What may be done between the steps of a training: a small protocol, every method of it optional.

`Task.callbacks()` returns some, and `Trainer(…, callbacks=…)` takes more. Every rank calls every
method, in the order of the list, so a callback may communicate if it does so on all ranks alike.
What it raises ends the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from allranks.training.progress import StepResult


class Callback:
    """Does nothing. Derive from it, and write what you need; `trainer` is the `Trainer`.

    With `state_dict()` and `load_state_dict(state)` beside these its state is in every checkpoint.
    It is loaded after `on_start`.
    """

    def on_start(self, trainer: Any) -> None:
        """The first step follows; a checkpoint is loaded if there was one."""

    def on_step(self, trainer: Any, batch: Any, result: StepResult) -> None:
        """A step was made, or skipped (`result.updated` is false)."""

    def on_evaluation(self, trainer: Any, metrics: dict[str, float]) -> None:
        """An evaluation on the way (`--eval-every`) is done."""

    def on_evaluation_start(self, trainer: Any) -> None:
        """An evaluation follows: any of them, also for `--best`, and that of the end."""

    def on_evaluation_end(self, trainer: Any) -> None:
        """The evaluation is over that `on_evaluation_start` was called before."""

    def on_save(self, trainer: Any) -> None:
        """A checkpoint of the weights as they are now follows."""

    def on_end(self, trainer: Any) -> None:
        """No step follows: the training came to its end, or was asked to stop."""


@contextmanager
def around_evaluation(trainer: Any) -> Iterator[None]:
    """Within, the trainer evaluates: its callbacks hear before and after."""
    for callback in trainer.callbacks:
        callback.on_evaluation_start(trainer)
    yield
    for callback in trainer.callbacks:
        callback.on_evaluation_end(trainer)
