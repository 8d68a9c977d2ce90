"""The page of one or several benches: results, the ideal, and how many ranks to request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.job.units import format_bytes
from allranks.tools.bench.figure import sweep_curves
from allranks.tools.bench.machine import in_words
from allranks.tools.bench.plan import WEAK, BenchPlan
from allranks.tools.bench.reading import (
    COMPUTE,
    EXCHANGE,
    INPUT,
    RUNS_PER_HOUR,
    SAMPLES_PER_S,
    STEPS_PER_S,
    Interval,
)
from allranks.tools.bench.results import ENOUGH, ROUNDING, SCHEMA, BenchRow, request_of, row_from
from allranks.tools.bench.tables import (
    SCALING,
    above,
    cells_of,
    head_of,
    how_timed,
    name_of,
    request_in_words,
    titles_of,
    unit_of,
    with_reach,
)
from allranks.tools.report.bars import Bar, BarPart, Bars
from allranks.tools.report.numbers import Series, counted, format_number, format_percent
from allranks.tools.report.page import Figure, rendered
from allranks.tools.report.plot import COLOURS, IDEAL, Chart, PlotLine, letter_of
from allranks.tools.report.records import BENCH_RECORD
from allranks.tools.report.tables import LEFT, RIGHT, Table

# --- charts --------------------------------------------------------------------------------------
# The charts of a bench: a curve for each strategy over its numbers of ranks, and of a sweep.


Value = Callable[[BenchRow], Interval | float | None]
SPEEDS = {
    SAMPLES_PER_S: "Samples per second",
    STEPS_PER_S: "Steps per second",
    RUNS_PER_HOUR: "Runs per hour",
}
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
    """The charts of a sweep, or of more than one number of ranks; else none."""
    if bench.plan.swept:
        charts = [_sweep(bench)]
    elif len({row.ranks for row in bench.measured}) < 2:
        return []
    else:
        kind = "weak" if bench.plan.scaling == WEAK else "strong"
        charts = [
            _over_ranks(
                bench,
                f"Speed-up, {kind} scaling",
                lambda row: 1.0 if row.ranks == row.base == 1 else row.speed_up,
                "dashed: the ideal",
                _ideal,
            ),
            _over_ranks(
                bench,
                "Efficiency",
                lambda row: 1.0 if row.ranks == row.base else row.efficiency,
                f"dashed: {ENOUGH:.0%}",
                lambda ranks: ENOUGH,
            ),
            _over_ranks(bench, SPEEDS[unit_of(bench.rows)], lambda row: row.speed),
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
    return [chart for chart in charts if any(line.style != IDEAL for line in chart.lines)]


def _ideal(ranks: float) -> float:
    return ranks


def _over_ranks(
    bench: Bench,
    title: str,
    value: Value,
    note: str = "",
    dashed: Callable[[float], float] | None = None,
) -> Chart:
    """A line for each strategy, with the intervals of its points."""
    colours = colours_of(bench)
    ranks = sorted({row.ranks for row in bench.measured})
    lines = []
    for name, colour in colours.items():
        rows = [row for row in bench.measured if name_of(row) == name]
        points = [(row.ranks, number) for row in rows if (number := value(row)) is not None]
        if points:
            lines.append(_line(name, points, colour))
    if dashed is not None:
        ideal = Series("", tuple(map(float, ranks)), tuple(map(dashed, ranks)))
        lines.append(PlotLine("ideal" if dashed is _ideal else f"{ENOUGH:.0%}", ideal, 0, IDEAL))
    several = any(low < high for line in lines for low, high in line.ranges)
    notes = [note, "wide strokes: intervals of 95 %" if several else ""]
    note = "; ".join(filter(None, notes))
    ticks = tuple(map(float, ranks))
    return Chart(title, tuple(lines), note=note, from_zero=True, x_title="ranks", x_ticks_at=ticks)


def _line(name: str, points: Sequence[tuple[float, Interval | float]], colour: int) -> PlotLine:
    xs, ys, ranges = [], [], []
    for x, number in sorted(points, key=lambda point: point[0]):
        known = number if isinstance(number, Interval) else Interval(number, number, number, 1)
        xs.append(float(x))
        ys.append(known.mean)
        bounded = not math.isinf(known.low)
        ranges.append((max(known.low, 0.0), known.high) if bounded else (known.mean, known.mean))
    return PlotLine(name, Series(name, tuple(xs), tuple(ys)), colour, ranges=tuple(ranges))


def _sweep(bench: Bench) -> Chart:
    """Milliseconds of a step by the value of the swept option."""
    curves = sweep_curves(bench.plan, bench.rows)
    lines = []
    for number, curve in enumerate(curves):
        points = [(x, Interval(middle, low, high, 1)) for x, middle, low, high in curve.points]
        lines.append(_line(curve.name, points, number % COLOURS))
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


SHARES = {COMPUTE: "compute", EXCHANGE: "communication and waiting", INPUT: "input"}


@dataclass(frozen=True)
class BenchView:
    """All that the page shows of one bench."""

    bench: Bench
    letter: str
    words: tuple[str, ...]
    figures: tuple[Figure, ...]
    colours: dict[str, int]
    table: Table
    shares: Bars | None
    charts: tuple[tuple[int, Chart], ...]
    machine: str
    request: str
    problems: tuple[str, ...]


def page_of_benches(benches: Sequence[Bench]) -> str:
    """The page of these benches, as text."""
    views, charts = [], list[Chart]()
    for number, bench in enumerate(benches):
        bench_charts = charts_of_bench(bench)
        numbered = tuple(enumerate(bench_charts, start=len(charts)))
        charts += bench_charts
        views.append(_view(bench, letter_of(number) if len(benches) > 1 else "", numbered))
    programs = dict.fromkeys(bench.plan.program for bench in benches)
    title = ", ".join(programs)
    if len(benches) > 1:
        title = f"{len(benches)} benches of {title}"
    comparison = _compared(views) if len(views) > 1 else None
    return rendered("benches.html", title, charts, views=views, comparison=comparison)


def _view(bench: Bench, letter: str, charts: tuple[tuple[int, Chart], ...]) -> BenchView:
    plan, rows = bench.plan, bench.rows
    kind = "weak scaling" if plan.scaling == WEAK else "strong scaling"
    numbers = sorted({row.ranks for row in rows})
    ranks = ", ".join(map(str, numbers)) + (" rank" if numbers == [1] else " ranks")
    strategies = len({row.strategy for row in rows})
    measured = counted(strategies, "strategy").replace("strategys", "strategies")
    words = [f"{'a script' if plan.command else measured} on {ranks}"]
    by_samples = unit_of(rows) == SAMPLES_PER_S
    words += [*([kind] if by_samples else []), counted(plan.repeats, "turn")]
    by_steps = plan.steps and unit_of(rows) != RUNS_PER_HOUR
    words.append(f"{counted(plan.steps, 'step')} each" if by_steps else "to the end")
    words += [f"until {plan.until}"] if plan.until else []
    words += [f"a sweep of {plan.swept}"] if plan.swept else []
    words += [" ".join(plan.words)] if plan.words else []
    words += [how_timed(plan, rows)] if plan.command else []
    problems = tuple(f"{name_of(r)} on {r.ranks}: {r.problem}" for r in rows if r.problem)
    return BenchView(
        bench,
        letter,
        tuple(words),
        tuple(_figures(bench)),
        legend_of(bench) if charts else {},
        _table(rows, swept=bool(plan.swept)),
        None if plan.swept else _shares(bench),
        charts,
        in_words(dict(bench.machine)),
        request_in_words(plan, rows),
        problems,
    )


def _figures(bench: Bench) -> list[Figure]:
    rows = [row for row in bench.measured if not (row.is_peer or row.problem)]
    figures = []
    fastest = max(rows, key=lambda row: row.speed.mean if row.speed else 0.0, default=None)
    if fastest is not None and fastest.speed is not None:
        where = f"{fastest.strategy} on {fastest.ranks}"
        figures.append(Figure(f"{unit_of(rows)}, fastest", f"{fastest.speed.mean:,.0f}", where))
    scaled = [row for row in rows if row.efficiency is not None and row.ranks > row.base]
    if scaled:
        most = max(row.ranks for row in scaled)
        best = max(
            (row for row in scaled if row.ranks == most),
            key=lambda row: row.efficiency.mean if row.efficiency else 0.0,
        )
        assert best.efficiency is not None
        label = f"efficiency on {most}, best"
        value, _, reach = with_reach(best.efficiency, 2).partition(" ± ")
        figures.append(Figure(label, value, best.strategy + (f" ± {reach}" if reach else "")))
    request = request_of(rows, bench.plan)
    if request is not None:
        note = f"{request.strategy}, above {ENOUGH:.0%} surely"
        figures.append(Figure("ranks to ask for", str(request.ranks), note))
    peaks = [(row.peak_bytes, row) for row in rows if row.peak_bytes is not None]
    if peaks:
        peak, row = max(peaks, key=lambda pair: pair[0])
        figures.append(Figure("peak memory", format_bytes(peak), f"{row.strategy} on {row.ranks}"))
    reached = [(row.until_s.mean, row) for row in rows if row.until_s is not None]
    if reached:
        seconds, row = min(reached, key=lambda pair: pair[0])
        note = f"{row.strategy} on {row.ranks}"
        figures.append(Figure(f"seconds to {bench.plan.until}", format_number(seconds), note))
    differing = [row for row in bench.rows if (row.loss_apart or 0.0) > ROUNDING]
    compared = [row for row in bench.rows if row.loss_apart is not None]
    if compared:
        note = ", ".join(row.strategy for row in differing) or f"of {len(compared)} compared"
        figures.append(Figure("peers with another loss", str(len(differing)), note))
    return figures


def _table(rows: Sequence[BenchRow], *, swept: bool) -> Table:
    """The table of the bench; a column says whether the efficiency is above the line."""
    head = tuple(name for name in head_of(rows) if not (swept and name in SCALING[4:]))
    lines = []
    for row in rows:
        cells = cells_of(row, head)
        cells += [""] * (len(head) - len(cells))
        lines.append(cells)
    kinds = [LEFT if name in ("strategy", "loss") else RIGHT for name in head]
    names = titles_of(head, rows)
    if not swept and unit_of(rows) != STEPS_PER_S:
        behind = names.index("efficiency") + 1
        names.insert(behind, f"above {ENOUGH:.0%}")
        kinds.insert(behind, LEFT)
        for cells, row in zip(lines, rows, strict=True):
            cells.insert(behind, above(row) if row.speed is not None else "")
    return Table(tuple(names), tuple(map(tuple, lines)), tuple(kinds))


def _shares(bench: Bench) -> Bars | None:
    """How the mean rank spent its time, a bar for each combination."""
    rows = [row for row in bench.measured if row.compute is not None]
    bars, lines = [], []
    for row in rows:
        values = dict(zip(SHARES, (row.compute, row.exchange, row.input), strict=True))
        parts = tuple(
            BarPart(
                round(100 * (values[kind] or 0.0), 3),
                kind,
                f"{text}: {format_percent(values[kind] or 0)}",
            )
            for kind, text in SHARES.items()
        )
        exchange = format_percent(values[EXCHANGE] or 0.0)
        bars.append(Bar(f"{name_of(row)} on {row.ranks}", parts, exchange))
        cells = (format_percent(values[kind] or 0.0) for kind in SHARES)
        lines.append((name_of(row), str(row.ranks), *cells))
    if not bars:
        return None
    head = ("strategy", "ranks", *SHARES.values())
    table = Table(head, tuple(lines), (LEFT, *[RIGHT] * (len(head) - 1)))
    return Bars(SHARES, tuple(bars), table)


def _compared(views: Sequence[BenchView]) -> Table:
    """Samples per second of all benches, a row for each combination in any of them."""
    lines: dict[tuple[str, int], list[str]] = {}
    for place, view in enumerate(views):
        for row in view.bench.measured:
            cells = lines.setdefault((name_of(row), row.ranks), [""] * len(views))
            cells[place] = cells_of(row, ("strategy", "ranks", "samples/s"))[2]
    rows = tuple((name, str(ranks), *cells) for (name, ranks), cells in lines.items())
    heads = tuple(f"{view.letter} {view.bench.label}" for view in views)
    return Table(("strategy", "ranks", *heads), rows, (LEFT, *[RIGHT] * (1 + len(views))))


# --- record --------------------------------------------------------------------------------------
# Reads the record of a bench.


@dataclass(frozen=True)
class Bench:
    """The results of one bench; `label` distinguishes it from other benches."""

    path: Path
    label: str
    plan: BenchPlan
    machine: Mapping[str, Any]
    rows: tuple[BenchRow, ...]

    @property
    def measured(self) -> tuple[BenchRow, ...]:
        """The rows with a speed."""
        return tuple(row for row in self.rows if row.speed is not None)


def read_bench(path: Path, label: str) -> Bench:
    """The record below `path`; raises `RequestError` if this version cannot read it."""
    record = path / BENCH_RECORD
    try:
        data = json.loads(record.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, and this version reads {SCHEMA}")
        settings = dict(data["settings"])
        settings |= {name: tuple(settings.get(name, ())) for name in ("words", "command")}
        plan = BenchPlan(combinations=(), **settings)
        return Bench(path, label, plan, data["machine"], tuple(map(row_from, data["rows"])))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(
            asked=f"report {path}",
            found=f"{type(error).__name__}: {error} (in {BENCH_RECORD})",
            why="its record is not what a bench of this version writes",
            do="report it with the version of allranks that made it",
        ) from None
