"""The curves of a run: loss, rates and metrics by step, and samples per second from their clock.

Steps count as people count: `step` of them are done. A row's clock is the moment at which the
leader wrote it down. What is not finite is kept as such: a plot shows where.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from allranks.job.run_folder import leaders_evaluations
from allranks.tools.report.records import RecordedRun

MEAN_FROM_STEPS = 100
MEANS = 40  # a curve of means has about as many points
LEAST_WINDOW = 5
MOST_POINTS = 600


@dataclass(frozen=True)
class Series:
    """Numbers by step; each is a mean over `window` steps."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    window: int = 1

    def __bool__(self) -> bool:
        return bool(self.xs)

    def nearest(self, x: float) -> tuple[float, float] | None:
        """The point that lies nearest to `x`."""
        if not self.xs:
            return None
        place = bisect_left(self.xs, x)
        near = [i for i in (place - 1, place) if 0 <= i < len(self.xs)]
        best = min(near, key=lambda i: abs(self.xs[i] - x))
        return self.xs[best], self.ys[best]


def column(run: RecordedRun, name: str) -> Series:
    """A column of `metrics.jsonl`, of the steps that have it."""
    return Series(name, *run.rows.column(name))


def means(series: Series) -> Series:
    """Means over windows of steps; empty for a series so short that single steps show the trend."""
    window = len(series.xs) // MEANS
    if len(series.xs) < MEAN_FROM_STEPS or window < 2:
        return Series(series.name, (), ())
    sums = array("d", accumulate(series.ys, initial=0.0))
    if not math.isfinite(sums[-1]):
        return Series(series.name, (), ())
    ends = range(window, len(series.xs) + 1, window)
    points = [(series.xs[end - 1], (sums[end] - sums[end - window]) / window) for end in ends]
    return _series(series.name, points, window)


def evaluations(run: RecordedRun) -> dict[str, Series]:
    """Each metric of the leaders' evaluations, during training and at its end.

    If a restart repeated a step, the last evaluation of that step counts.
    """
    values: dict[str, dict[int, float]] = {}
    for event in leaders_evaluations(run.events):
        for name, value in event["metrics"].items():
            values.setdefault(str(name), {})[int(event["step"])] = float(value)
    last = run.rows.steps[-1] if run.rows else run.summary.get("steps")
    for name, value in run.summary.get("eval", {}).items():
        if last is not None:
            values.setdefault(str(name), {})[int(last)] = float(value)
    return {name: _series(name, sorted(points.items())) for name, points in values.items()}


def samples_per_s(run: RecordedRun) -> Series:
    """Samples per second of all ranks, as means over a few steps.

    The time of evaluations and checkpoints between these steps counts. The first step of an attempt
    does not, because no step precedes it. No window spans a restart.
    """
    per_call = int(run.job.get("steps_per_call") or 1)
    rows = run.rows
    window = max(LEAST_WINDOW, per_call, len(rows) // MEANS)
    points, since, samples, steps = [], None, 0, 0
    for row in rows:
        if since is None or row.step - 1 in run.starts or row.monotonic < since:
            since, samples, steps = row.monotonic, 0, 0
            continue
        samples, steps = samples + row.samples, steps + 1
        if steps >= window and row.monotonic > since:
            points.append((row.step, samples / (row.monotonic - since)))
            since, samples, steps = row.monotonic, 0, 0
    return _series("samples/s", points, window)


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """The same curve with fewer points: the lowest and the highest of each stretch."""
    count = len(series.xs)
    if count <= most:
        return Series(series.name, tuple(series.xs), tuple(series.ys), series.window)
    chosen = {0, count - 1}
    stretches = most // 2
    for number in range(stretches):
        places = range(number * count // stretches, (number + 1) * count // stretches)
        finite = [i for i in places if math.isfinite(series.ys[i])]
        odd = [i for i in places if not math.isfinite(series.ys[i])][:1]
        if finite:
            value_at = series.ys.__getitem__
            chosen |= {min(finite, key=value_at), max(finite, key=value_at)}
        chosen.update(odd)
    order = sorted(chosen)
    xs, ys = ([values[i] for i in order] for values in (series.xs, series.ys))
    return Series(series.name, tuple(xs), tuple(ys), series.window)


def _series(name: str, points: Sequence[tuple[float, float]], window: int = 1) -> Series:
    return Series(name, tuple(x for x, _ in points), tuple(y for _, y in points), window)


# --- numbers -------------------------------------------------------------------------------------
# Numbers as a page shows them: few digits, seconds in words, and a text for unknown numbers.


UNKNOWN = "not recorded"
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def format_number(value: float, digits: int = 4) -> str:
    """`0.98611` -> `0.9861`, `5419.4` -> `5,419`, `3e-05` -> `3e-05`, `nan` -> `nan`."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def format_seconds(seconds: float) -> str:
    """`0.0312` -> `31 ms`, `2.93` -> `2.93 s`, `192` -> `3 min 12 s`, `3900` -> `1 h 05 min`."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if round(seconds) < MINUTE_S:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S:02d} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S:02d} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S:02d} h"


def format_percent(share: float) -> str:
    """`0.4312` -> `43.1 %`."""
    return f"{100 * share:.1f} %"


def counted(count: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
