"""Weights & Biases and MLflow by a callback: rank 0 tells them of losses and evaluations.

    allranks train trackers.py --set tracker=wandb --eval-every epoch --ranks 2
    allranks train trackers.py --set tracker=mlflow --eval-every epoch --ranks 2

The module is imported by the one rank that uses it, when the training begins. A job that goes on
writes to a run of its own there; `run_dir` says which belong together.
"""

import importlib
from dataclasses import asdict, dataclass
from typing import Any

from allranks.programs.digits import Digits
from allranks.training.callback import Callback
from allranks.training.progress import StepResult


class Tracker(Callback):
    """Sends what rank 0 knows; every rank has one, and the others do nothing."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name, self.settings = name, settings
        self.module: Any = None

    def on_start(self, trainer: Any) -> None:
        if trainer.world.is_leader:
            self.module = importlib.import_module(self.name)
            settings = {
                **self.settings,
                "ranks": trainer.world.size,
                "run_dir": trainer.job.run_dir,
            }
            if self.name == "wandb":
                self.module.init(project="allranks", config=settings)
            else:
                self.module.start_run()
                self.module.log_params(settings)

    def send(self, values: dict[str, float], step: int) -> None:
        """`step` counts the steps that are done."""
        if self.module is not None:
            (self.module.log if self.name == "wandb" else self.module.log_metrics)(
                values, step=step
            )

    def on_step(self, trainer: Any, batch: Any, result: StepResult) -> None:
        values = {"loss": result.loss, "learning_rate": result.learning_rate}
        self.send(values, trainer.progress.batch_index)

    def on_evaluation(self, trainer: Any, metrics: dict[str, float]) -> None:
        told = {f"evaluation/{name}": value for name, value in metrics.items()}
        self.send(told, trainer.progress.batch_index)

    def on_end(self, trainer: Any) -> None:
        if self.module is not None:
            (self.module.finish if self.name == "wandb" else self.module.end_run)()


@dataclass(kw_only=True)
class Tracked(Digits):
    """Digits, with a tracker."""

    tracker: str = "wandb"

    def callbacks(self) -> list[Callback]:
        return [Tracker(self.tracker, asdict(self))]
