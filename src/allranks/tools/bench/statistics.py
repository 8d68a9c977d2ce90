"""Statistics of step times: speed, its uncertainty, and the jitter of steps. Pure arithmetic.

Within a run, as tf_cnn_benchmarks counts: with B samples in each of n steps of times t,

    speed = B / mean(t)  ± std(B / t) / sqrt(n)   jitter = 1.4826 · median |B/t - median(B/t)|

Steps of one run are not independent: runs differ by more than their steps suggest. So repeats are
compared: an interval is Student's for the mean of the repeats, and a ratio is taken turn by turn,
between consecutive runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAD_TO_STD = 1.4826
STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Of the two-sided 95 % interval, by degrees of freedom from 1."""
STUDENT_BEYOND = 2.086


@dataclass(frozen=True)
class StepSpeeds:
    """Of the steps of one run, in samples per second."""

    speed: float
    uncertainty: float
    jitter: float


def of_steps(samples: Sequence[float], seconds: Sequence[float]) -> StepSpeeds:
    """The speed of steps with so many `samples` that took so many `seconds` each."""
    speeds = [b / t for b, t in zip(samples, seconds, strict=True)]
    middle = statistics.median(speeds)
    jitter = MAD_TO_STD * statistics.median(abs(speed - middle) for speed in speeds)
    uncertainty = statistics.pstdev(speeds) / math.sqrt(len(speeds))
    return StepSpeeds(sum(samples) / sum(seconds), uncertainty, jitter)


@dataclass(frozen=True)
class Interval:
    """The mean of `repeats` measurements and its 95 % interval; for one repeat it is infinite."""

    mean: float
    low: float
    high: float
    repeats: int

    def agrees_with(self, other: Interval) -> bool:
        """Whether the intervals have a value in common."""
        return self.low <= other.high and other.low <= self.high


def interval(values: Sequence[float]) -> Interval:
    """The interval of independent measurements of one quantity."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    student = STUDENT_95[count - 2] if count - 2 < len(STUDENT_95) else STUDENT_BEYOND
    reach = student * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - reach, mean + reach, count)


def ratio(of: Sequence[float], over: Sequence[float]) -> Interval:
    """The ratio of `of` to `over`, turn by turn."""
    return interval([a / b for a, b in zip(of, over, strict=True)])
