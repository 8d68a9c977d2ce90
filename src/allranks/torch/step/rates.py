"""The learning rates of each update: those that the groups came with, times the task's schedule.

Others may set rates too: a scheduler of torch that leaves no other mark (`ReduceLROnPlateau`), a
callback. Before each update they are compared with what they were when the engine, a checkpoint or
the optimizer itself had set them, which takes a microsecond for each group.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.state import hyper_parameters
from allranks.torch.task import Task


class Rates:
    """`made` is what every group of the optimizer says beside its parameters, as it came.

    `told` is a sentence on rates that others set, from when they first do.
    """

    def __init__(self, task: Task, optimizer: Optimizer) -> None:
        self.task, self.optimizer = task, optimizer
        self.made = hyper_parameters(optimizer)
        self.told = ""
        self._are_scheduled = task.overrides("schedule") or task.overrides("plateau")
        self._is_first = True
        self._known = self._rates()

    def set(self, update: int, times: float = 1.0) -> None:
        """Set the rates for update number `update` of the job, `times` what the schedule says.

        A group that was added on the way has the rate that it came with as its own. Raises
        `RequestError` where there is a schedule, and others have set rates.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.made):
            self._note_groups()
        rates = self._rates()
        if rates != self._known and (self._are_scheduled or not self._is_first):
            pairs = zip(self._known, rates, strict=False)  # a group that is new has set nothing
            if others := [(was, now) for was, now in pairs if was != now]:
                self._others_set(update, *others[0])
        self._is_first = False
        self._known = rates
        if self._are_scheduled:
            factor = float(self.task.schedule(update)) * times
            for group, made in zip(groups, self.made, strict=True):
                group["lr"] = float(made["lr"]) * factor
            self.see()

    def see(self) -> None:
        """Whoever may set the rates has done so: the engine, a checkpoint, the optimizer itself."""
        self._known = self._rates()

    def _rates(self) -> list[Any]:
        groups = self.optimizer.param_groups
        return [
            float(rate) if isinstance(rate := group.get("lr"), Tensor) else rate for group in groups
        ]

    def _others_set(self, update: int, was: Any, now: Any) -> None:
        """Others set a rate, between two updates."""
        when = f"from {was:g} to {now:g} after {update} update{'s' * (update != 1)}"
        if self._are_scheduled:
            raise RequestError(
                asked="schedule() or plateau() of the task",
                found=f"a learning rate that was set {when}, not by the engine",
                why="the engine sets the rates before each update: what a scheduler of torch or a "
                "callback sets would be lost",
                do="say all of it in schedule(step), and in plateau() what follows a metric "
                "(allranks.training.schedules.Plateau), or leave both away",
            )
        self.told = self.told or (
            f"a learning rate was set {when}, not by the engine: a checkpoint holds the rate, and "
            "nothing of what decides on it; right for a function of the step, but a scheduler that "
            "counts (ReduceLROnPlateau) would start anew: write plateau() in the task"
        )

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
