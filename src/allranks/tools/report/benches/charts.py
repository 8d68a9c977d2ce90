"""The charts of a bench: a curve for each strategy over its numbers of ranks, and of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from allranks.tools.bench.figure import sweep_curves
from allranks.tools.bench.plan import WEAK
from allranks.tools.bench.results import ENOUGH, Row
from allranks.tools.bench.statistics import Interval
from allranks.tools.bench.tables import name_of
from allranks.tools.report.benches.records import Bench
from allranks.tools.report.numbers import Series
from allranks.tools.report.plot import COLOURS, IDEAL, Chart, Line

Value = Callable[[Row], Interval | float | None]
LOG_FROM = 8.0  # the largest over the smallest value of a sweep


def colours_of(bench: Bench) -> dict[str, int]:
    """A colour for each strategy, in the order of the record."""
    names = dict.fromkeys(name_of(row) for row in bench.rows)
    return {name: number % COLOURS for number, name in enumerate(names)}


def legend_of(bench: Bench) -> dict[str, int]:
    """The name and the colour of each curve."""
    if bench.plan.swept:
        curves = sweep_curves(bench.plan, bench.rows)
        return {curve.name: number % COLOURS for number, curve in enumerate(curves)}
    return colours_of(bench)


def charts_of_bench(bench: Bench) -> list[Chart]:
    """Those with anything to show: a sweep, or more than one number of ranks."""
    if bench.plan.swept:
        found = [_sweep(bench)]
    elif len({row.ranks for row in bench.measured}) < 2:
        return []
    else:
        kind = "weak" if bench.plan.scaling == WEAK else "strong"
        found = [
            _over_ranks(bench, f"Speed-up, {kind} scaling", _speed_up, "dashed: the ideal", _ideal),
            _over_ranks(
                bench, "Efficiency", _efficiency, f"dashed: {ENOUGH:.0%}", lambda n: ENOUGH
            ),
            _over_ranks(bench, "Samples per second", lambda row: row.speed),
            _over_ranks(
                bench,
                "Peak memory of a rank, MiB",
                lambda row: None if row.peak_bytes is None else row.peak_bytes / 2**20,
            ),
            _over_ranks(
                bench,
                "Part of the time in exchange, %",
                lambda row: None if row.exchange is None else 100 * row.exchange,
            ),
        ]
    return [chart for chart in found if any(line.style != IDEAL for line in chart.lines)]


def _speed_up(row: Row) -> Interval | None:
    return Interval(1, 1, 1, 1) if row.ranks == row.base == 1 else row.speed_up


def _efficiency(row: Row) -> Interval | None:
    return Interval(1, 1, 1, 1) if row.ranks == row.base else row.efficiency


def _ideal(ranks: float) -> float:
    return ranks


def _over_ranks(
    bench: Bench,
    title: str,
    value: Value,
    note: str = "",
    beside: Callable[[float], float] | None = None,
) -> Chart:
    """A line for each strategy, with the intervals of its points."""
    colours = colours_of(bench)
    ranks = sorted({row.ranks for row in bench.measured})
    lines = []
    for name, colour in colours.items():
        rows = [row for row in bench.measured if name_of(row) == name]
        points = [(row.ranks, found) for row in rows if (found := value(row)) is not None]
        if points:
            lines.append(_line(name, points, colour))
    if beside is not None:
        ideal = Series("", tuple(map(float, ranks)), tuple(map(beside, ranks)))
        lines.append(Line("ideal" if beside is _ideal else f"{ENOUGH:.0%}", ideal, 0, IDEAL))
    several = any(low < high for line in lines for low, high in line.ranges)
    told = [note, "wide strokes: intervals of 95 %" if several else ""]
    note = "; ".join(filter(None, told))
    ticks = tuple(map(float, ranks))
    return Chart(title, tuple(lines), note=note, from_zero=True, x_title="ranks", x_ticks_at=ticks)


def _line(name: str, points: Sequence[tuple[int, Interval | float]], colour: int) -> Line:
    xs, ys, ranges = [], [], []
    for ranks, found in sorted(points, key=lambda point: point[0]):
        known = found if isinstance(found, Interval) else Interval(found, found, found, 1)
        xs.append(float(ranks))
        ys.append(known.mean)
        bounded = not math.isinf(known.low)
        ranges.append((known.low, known.high) if bounded else (known.mean, known.mean))
    return Line(name, Series(name, tuple(xs), tuple(ys)), colour, ranges=tuple(ranges))


def _sweep(bench: Bench) -> Chart:
    """Milliseconds of a step by the value of the swept option."""
    curves = sweep_curves(bench.plan, bench.rows)
    lines = [
        Line(
            curve.name,
            Series(
                curve.name, tuple(p[0] for p in curve.points), tuple(p[1] for p in curve.points)
            ),
            number % COLOURS,
            ranges=tuple((p[2], p[3]) for p in curve.points),
        )
        for number, curve in enumerate(curves)
    ]
    sizes = sorted({x for line in lines for x in line.series.xs})
    is_log = bool(sizes) and sizes[0] > 0 and sizes[-1] / sizes[0] >= LOG_FROM
    return Chart(
        f"Milliseconds of a step, by {bench.plan.swept}",
        tuple(lines),
        from_zero=True,
        x_title=bench.plan.swept,
        x_ticks_at=tuple(sizes),
        x_is_log=is_log,
    )
