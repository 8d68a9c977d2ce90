"""Schedules of the learning rate: functions from the update of the job to a factor on the rate.

What `schedule(step)` of a task returns is such a factor; it multiplies the rate that each group of
the optimizer was made with. Updates are those of the *job*, counted from 0, whatever the number of
ranks; a schedule is a function of that number alone, so it has no state and resumes exactly:

    def schedule(self, step, total):
        return cosine(total, warmup=500)(step)

`total` is the number of steps of the job; a schedule that needs none leaves it out. Each name below
makes such a function. `product` multiplies schedules, `then` puts one behind another. `Plateau` is
the exception: it follows the evaluations, and is what `plateau()` returns.
Nothing here knows a framework.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from allranks.errors import RequestError
from allranks.job.recipes import warmup_done

Schedule = Callable[[int], float]
"""From the number of an update of the job, from 0, to the factor on the learning rate."""


def schedule_of(schedule: Callable[..., float], total: Callable[[], int | None]) -> Schedule:
    """`schedule` of a task as a function of the step alone; `total()` is asked for if it needs it.

    It needs it if it has a second argument without a default, or one called `total`.
    """
    arguments = inspect.signature(schedule).parameters.values()
    is_named = any(a.name == "total" and a.kind is a.KEYWORD_ONLY for a in arguments)
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    is_second = any(a.kind in positional and a.default is a.empty for a in list(arguments)[1:2])
    if not is_named and not is_second:
        return schedule

    @cache
    def known() -> int:
        steps = total()
        if steps is None:
            raise RequestError(
                asked="schedule(step, total) of the task",
                found="data that does not say how long an epoch is",
                why="the number of steps is known only when it has been read to its end",
                do="--steps N, or schedule(step) with a number of your own",
            )
        return steps

    if is_named:
        return lambda step: schedule(step, total=known())
    return lambda step: schedule(step, known())


def constant(factor: float = 1.0) -> Schedule:
    """The same factor at every update."""
    return lambda step: factor


def linear_warmup(steps: int, start: float = 0.0) -> Schedule:
    """From `start` at update 0 in even steps to 1 at update `steps`, and 1 from there on.

    With `start` 0 the first update has a rate of 0, as in the papers that write i/T.
    """
    _check_counts("linear_warmup", steps=steps)
    return lambda step: 1.0 if step >= steps else start + (1.0 - start) * step / steps


def cosine(total: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A linear warm-up from 0, then half a cosine from 1 at `warmup` to `floor` at `total`.

    `total` counts the warm-up too; from there on the factor stays at `floor`. Loshchilov and
    Hutter 2016, arXiv 1608.03983, without restarts.
    """
    _check_span("cosine", total, warmup)

    def fall(step: int) -> float:
        done = (step - warmup) / (total - warmup)
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))

    return _after_warmup(fall, total, warmup, floor)


def polynomial(total: int, power: float = 1.0, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A linear warm-up from 0, then (1 - t/T)^power from 1 at `warmup` to `floor` at `total`.

    Power 1 is a straight line; 2 is what LARS was published with.
    """
    _check_span("polynomial", total, warmup)

    def fall(step: int) -> float:
        remaining = 1.0 - (step - warmup) / (total - warmup)
        return floor + (1.0 - floor) * math.pow(remaining, power)

    return _after_warmup(fall, total, warmup, floor)


def steps(boundaries: Sequence[int], factors: float | Sequence[float]) -> Schedule:
    """1 before the first boundary; from update `boundaries[i]` on the factor is `factors[i]`.

    One number for `factors` multiplies at every boundary: `steps((30, 60), 0.1)` is
    `steps((30, 60), (0.1, 0.01))`. TensorFlow's `piecewise_constant` changes one update later.
    """
    if isinstance(factors, (int, float)):
        factors = [math.pow(factors, count + 1) for count in range(len(boundaries))]
    if len(boundaries) != len(factors) or any(a >= b for a, b in pairwise(boundaries)):
        raise RequestError(
            asked="schedule steps(boundaries, factors)",
            found=f"boundaries {list(boundaries)} and factors {list(factors)}",
            why="boundaries rise, and each has the factor that holds from there on",
            do="for example steps((30, 60), (0.1, 0.01)), or steps((30, 60), 0.1)",
        )
    edges, values = tuple(boundaries), (1.0, *map(float, factors))
    return lambda step: values[bisect_right(edges, step)]


def linear_scaling(
    batch_size: int, per: int = 256, warmup: int = 0, start: Literal["base", "zero"] = "base"
) -> Schedule:
    """The rate is meant for a batch of `per`: batch_size / per times it, after a gradual warm-up.

    During `warmup` updates the factor rises in even steps from 1, the *unscaled* rate (Goyal et
    al. 2017, arXiv 1706.02677), or from 0 with `start="zero"` (tf_cnn_benchmarks).
    """
    if start not in ("base", "zero"):
        raise RequestError(
            asked=f"schedule linear_scaling(start={start!r})",
            found=repr(start),
            why="a warm-up starts at the unscaled rate, or at zero",
            do='start="base" or start="zero"',
        )
    _check_counts("linear_scaling", batch_size=batch_size, per=per)
    _check_counts("linear_scaling", least=0, warmup=warmup)
    first, scale = (1.0 if start == "base" else 0.0), batch_size / per
    return lambda step: scale if step >= warmup else first + (scale - first) * step / warmup


def warmup_lr(
    lowest: float, highest: float, steps: int, kind: Literal["log", "linear"] = "log"
) -> Schedule:
    """DeepSpeed's WarmupLR for an optimizer whose own rate is `highest`, and `highest` after it.

    `log`: lowest + (highest - lowest) · ln(i+1) / ln(steps); `linear`: i / steps in place of the
    logarithms. `lowest` and `highest` are rates, not factors, as in DeepSpeed's configuration.
    """
    if kind not in ("log", "linear") or not 0 <= lowest <= highest or highest == 0:
        raise RequestError(
            asked=f"schedule warmup_lr({lowest}, {highest}, {steps}, {kind!r})",
            found=f"rates from {lowest} to {highest}, kind {kind!r}",
            why="it rises from the lowest rate to the highest, by log or linear",
            do='for example warmup_lr(0.0, 1e-3, 1000, "log")',
        )
    _check_counts("warmup_lr", steps=steps)
    least, rise = lowest / highest, {"steps": steps, "kind": kind}

    def factor(step: int) -> float:
        part = warmup_done(rise, step)
        return 1.0 if part is None else least + (1.0 - least) * part

    return factor


def product(*schedules: Schedule) -> Schedule:
    """All of them at once: `product(linear_scaling(8192, warmup=400), steps((900,), 0.1))`."""
    return lambda step: math.prod(schedule(step) for schedule in schedules)


def then(first: Schedule, steps: int, second: Schedule) -> Schedule:
    """`first` for `steps` updates, then `second`, which counts from 0 there."""
    _check_counts("then", steps=steps)
    return lambda step: first(step) if step < steps else second(step - steps)


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """When a metric gets no better, the rate falls: what `plateau()` of a task returns.

    After more than `patience` evaluations in a row that did not better `rule` ("min:loss",
    "max:accuracy") by `threshold`, a share of the best, the rate is multiplied by `factor`, down to
    `floor` times that of the optimizer; then `cooldown` evaluations are not counted. It is torch's
    `ReduceLROnPlateau`, counted in evaluations on the way (`--eval-every`), and multiplies what
    `schedule(step)` says. Its state is in every checkpoint, and the same on all ranks.
    """

    rule: str = "min:loss"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    cooldown: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        sign, colon, metric = self.rule.partition(":")
        if sign not in ("min", "max") or not colon or not metric or not 0 < self.factor < 1:
            raise RequestError(
                asked=f"Plateau(rule={self.rule!r}, factor={self.factor})",
                found="no rule min:METRIC or max:METRIC, or a factor that does not lower a rate",
                why="the rate is multiplied by a factor between 0 and 1 when METRIC gets no better",
                do='for example Plateau(rule="min:loss", factor=0.1, patience=3)',
            )
        _check_counts("Plateau", least=0, patience=self.patience, cooldown=self.cooldown)


@dataclass
class PlateauState:
    """How far a `Plateau` is: `factor` is what the rate is multiplied by now."""

    rule: Plateau
    factor: float = 1.0
    best: float | None = None
    in_vain: int = 0
    cooling: int = 0

    def take(self, metrics: Mapping[str, float]) -> bool:
        """Take in the next evaluation; whether it is better: never without a number."""
        sign, _, metric = self.rule.rule.partition(":")
        value = metrics.get(metric, math.nan)
        better = self._is_better(value, -1.0 if sign == "min" else 1.0)
        if better:
            self.best, self.in_vain = value, 0
        else:
            self.in_vain += 1
        if self.cooling:
            self.cooling, self.in_vain = self.cooling - 1, 0
        if self.in_vain > self.rule.patience:
            self.factor = max(self.factor * self.rule.factor, self.rule.floor)
            self.cooling, self.in_vain = self.rule.cooldown, 0
        return better

    def _is_better(self, value: float, sign: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        return sign * value > sign * self.best * (1.0 + sign * self.rule.threshold)

    def state(self) -> dict[str, Any]:
        """What later rates depend on, as plain values."""
        return {
            "factor": self.factor,
            "best": self.best,
            "in_vain": self.in_vain,
            "cooling": self.cooling,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned."""
        self.factor, self.best = float(state["factor"]), state["best"]
        self.in_vain, self.cooling = int(state["in_vain"]), int(state["cooling"])


def _after_warmup(fall: Schedule, total: int, warmup: int, floor: float) -> Schedule:
    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return fall(step) if step < total else floor

    return factor


def _check_span(name: str, total: int, warmup: int) -> None:
    _check_counts(name, total=total)
    _check_counts(name, least=0, warmup=warmup)
    if warmup >= total:
        raise RequestError(
            asked=f"schedule {name}(total={total}, warmup={warmup})",
            found="a warm-up as long as the whole",
            why="total counts the updates of the job, those of the warm-up too",
            do=f"a warm-up shorter than {total}",
        )


def _check_counts(name: str, least: int = 1, **counts: int) -> None:
    for setting, count in counts.items():
        if count < least:
            raise RequestError(
                asked=f"schedule {name}({setting}={count})",
                found=str(count),
                why=f"{setting} is a count of at least {least}",
                do=f"{setting}={least} or more",
            )
