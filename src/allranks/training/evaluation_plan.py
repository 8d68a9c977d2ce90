"""After each step: evaluate now? Is it the best so far? Stop early?

All ranks see the same metrics, so all decide alike without a message. Ranks that train apart each
decide by their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from allranks.errors import RequestError, nearest
from allranks.job.job import Job
from allranks.job.limits import until_of
from allranks.training.progress import Progress
from allranks.training.schedules import Plateau, PlateauState


class EvaluationPlan:
    """What happens to `job` between its steps. `found` are the metrics of the newest evaluation."""

    def __init__(self, job: Job, plateau: Plateau | None = None) -> None:
        self.job = job
        self.last_metrics: dict[str, float] = {}
        self.found_at = -1
        self.is_best = False
        self._best = Best(job.best) if job.best else None
        self._stop = Best(job.early_stop) if job.early_stop else None
        self._until = until_of(job)
        self.reached_at: int | None = None
        """How many global batches were made when an evaluation first had what `until` asks for."""
        self._plateau = None if plateau is None else PlateauState(plateau)

    @property
    def rate_factor(self) -> float:
        """What evaluations without a better one have made of the learning rate."""
        return 1.0 if self._plateau is None else self._plateau.factor

    @property
    def is_over(self) -> bool:
        """Whether `until` is reached, or `early_stop` not bettered for `patience` evaluations."""
        if self.reached_at is not None:
            return True
        return self._stop is not None and self._stop.in_vain >= self.job.patience

    def is_due(self, done: Progress, steps_per_epoch: int | None) -> bool:
        """Whether an evaluation follows the step that was made last; a stream knows no length."""
        every = self.job.eval_every
        if not every or done.batch_index == 0:
            return False
        if every == "epoch":
            return done.step_in_epoch == (steps_per_epoch or 0)
        return done.batch_index % int(every) == 0 and done.batch_index != self.found_at

    def take(self, metrics: dict[str, float], done: Progress) -> None:
        """Record the metrics of an evaluation during training."""
        self.last_metrics, self.found_at = metrics, done.batch_index
        self.is_best = self._best is not None and self._best.take(metrics)
        if self._stop is not None:
            self._stop.take(metrics)
        until = self._until
        reached = until is not None and until.is_reached(metrics.get(until.metric, math.nan))
        if reached and self.reached_at is None:
            self.reached_at = done.batch_index
        if self._plateau is not None:
            self._plateau.take(metrics)

    def forget(self) -> None:
        """Forget the last metrics: the weights have changed since."""
        self.found_at = -1

    def metrics_of(self, done: Progress) -> dict[str, float] | None:
        """The metrics of the weights as they are now, if they are known."""
        return self.last_metrics if self.found_at == done.batch_index else None

    def wants_save(self, done: Progress) -> bool:
        """Whether the weights as they are now are the best so far, and to be kept."""
        return self.is_best and self.found_at == done.batch_index

    def state(self) -> dict[str, Any]:
        """What later decisions depend on, as plain values."""
        return {
            "found": self.last_metrics,
            "found_at": self.found_at,
            "best": None if self._best is None else self._best.state(),
            "stop": None if self._stop is None else self._stop.state(),
            "plateau": None if self._plateau is None else self._plateau.state(),
            "until": None if self._until is None else [self.job.until, self.reached_at],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.last_metrics = {name: float(score) for name, score in state["found"].items()}
        self.found_at = int(state["found_at"])
        self.is_best = False
        for judge, was in ((self._best, state["best"]), (self._stop, state["stop"])):
            if judge is not None and was is not None:
                judge.load_state(was)
        rule, reached_at = state.get("until") or ("", None)
        self.reached_at = None
        if rule == self.job.until and reached_at is not None:
            self.reached_at = int(reached_at)
        if self._plateau is not None and state.get("plateau") is not None:
            self._plateau.load_state(state["plateau"])


def check_metrics(job: Job, names: Iterable[str], plateau: Plateau | None = None) -> None:
    """Raise `RequestError` unless an evaluation has the metrics by which the job judges."""
    if plateau is not None and not job.eval_every:
        raise RequestError(
            asked=f"plateau() of the task, by {plateau.rule}",
            found="no --eval-every",
            why="it counts the evaluations on the way",
            do="--eval-every epoch, or --eval-every 100",
        )
    rules = {"--best": job.best, "--early-stop": job.early_stop}
    until, judges = until_of(job), {**rules, "Plateau": plateau.rule if plateau else ""}
    if until is not None:
        judges["--until"] = f"max:{until.metric}"
    for flag, rule in judges.items():
        metric = rule.partition(":")[2]
        if rule and metric not in names:
            raise RequestError(
                asked=f"{flag} {rule}",
                found=f"no metric {metric!r} in the evaluation of this task",
                why="what is judged by is what eval_data() and metrics() of the task give",
                do=nearest(metric, names),
            )


@dataclass
class Best:
    """`rule` is "max:METRIC" or "min:METRIC"; `in_vain` counts values in a row that are no better.

    A value that is not there, or not a number, is never better.
    """

    rule: str
    value: float | None = None
    in_vain: int = 0

    @property
    def metric(self) -> str:
        return self.rule.partition(":")[2]

    def take(self, metrics: Mapping[str, float]) -> bool:
        """Take in the next evaluation; returns whether it is the best so far."""
        value = metrics.get(self.metric, math.nan)
        sign = -1 if self.rule.startswith("min:") else 1
        better = not math.isnan(value) and (self.value is None or sign * value > sign * self.value)
        self.in_vain = 0 if better else self.in_vain + 1
        if better:
            self.value = value
        return better

    def state(self) -> dict[str, Any]:
        """What later decisions depend on, as plain values."""
        return {"rule": self.rule, "value": self.value, "in_vain": self.in_vain}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned, if it is of the same rule."""
        if state["rule"] == self.rule:
            value = state["value"]
            self.value, self.in_vain = (
                None if value is None else float(value),
                int(state["in_vain"]),
            )


# --- evaluation sets -----------------------------------------------------------------------------
# Several sets to evaluate on: `eval_data()` may return a dict from a name to the data of a set.
#
#     {"same": (images, labels), "shifted": ShiftedDigits()}   ->   same/accuracy, shifted/accuracy
#
# A dict of tensors or arrays is one set, whose batches are dicts.


def sets_of(data: Any) -> dict[str, Any]:
    """The sets by their names; one that has no name is under ""; raises `RequestError`."""
    if type(data) is not dict or all(hasattr(value, "shape") for value in data.values()):
        return {"": data}
    wrong = [name for name in data if not isinstance(name, str) or not name or "/" in name]
    arrays = [name for name, value in data.items() if hasattr(value, "shape")]
    if wrong or arrays:
        raise RequestError(
            asked="eval_data() of the task: several sets",
            found=f"the name {wrong[0]!r}" if wrong else f"{arrays[0]!r} is a tensor, others not",
            why="metrics are called NAME/METRIC, and a dict of tensors alone is one set",
            do="give each set a text without / for a name"
            if wrong
            else f"write {{{arrays[0]!r}: (tensor,), …}}",
        )
    return dict(data)


def named(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of the set `name` as they are reported."""
    return {f"{name}/{metric}" if name else metric: value for metric, value in metrics.items()}
