"""The learning rates of each update: those that the groups came with, times the task's schedule."""

from __future__ import annotations

from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.on_torch.state import hyper_parameters
from allranks.on_torch.task import Task


class Rates:
    """`made` is what every group of the optimizer says beside its parameters, as it came."""

    def __init__(self, task: Task, optimizer: Optimizer) -> None:
        self.task, self.optimizer = task, optimizer
        self.made = hyper_parameters(optimizer)
        self._are_scheduled = task.overrides("schedule") or task.overrides("plateau")

    def set(self, update: int, times: float = 1.0) -> None:
        """Set the rates for update number `update` of the job, `times` what the schedule says.

        A group that was added on the way has the rate that it came with as its own.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.made):
            self._note_groups()
        if self._are_scheduled:
            factor = float(self.task.schedule(update)) * times
            for group, made in zip(groups, self.made, strict=True):
                group["lr"] = float(made["lr"]) * factor

    def _note_groups(self) -> None:
        now = hyper_parameters(self.optimizer)
        if len(now) < len(self.made):
            raise RequestError(
                asked="to go on training",
                found=f"{len(now)} groups in the optimizer, where there were {len(self.made)}",
                why="rates and checkpoints go by the number of a group",
                do="freeze what is not to be trained any more: requires_grad_(False)",
            )
        self.made += now[len(self.made) :]
