"""A chart as geometry: paths, ticks and labels in percent of its frame, the same as a table.

The frame is stretched to any width by the page, and text is laid over it as text: so letters keep
their size on a phone, and can be read aloud, searched and selected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, pairwise

from allranks.tools.report.numbers import (
    Series,
    column,
    evaluations,
    format_number,
    means,
    samples_per_s,
    thinned,
)
from allranks.tools.report.records import RATES, RecordedRun

FRAME = 1000.0
LOG_FROM = 50.0  # the largest over the smallest value, all of them positive
MARGIN = 0.05
LARGEST = 1e100
TABLE_ROWS = 24
MOST_DOTS = 60
ENOUGH = 0.7  # of the distance between ticks that their number would need
LABEL_APART = 7.5  # percent of the height
LINE, FAINT, DOTS, IDEAL = "line", "faint", "dots", "ideal"


@dataclass(frozen=True)
class PlotLine:
    """One curve of a chart; `colour` is the number of its run, `label` the name in its tooltip."""

    label: str
    series: Series
    colour: int = 0
    style: str = LINE
    letter: str = ""
    ranges: tuple[tuple[float, float], ...] = ()
    """The interval of each point, drawn with it; empty if points have none."""


@dataclass(frozen=True)
class Tick:
    """A label at `place` percent from the left, or from the top."""

    place: float
    text: str


@dataclass(frozen=True)
class Path:
    """The SVG paths of one line: the line, its dots, and marks below points that are not finite."""

    d: str
    dots: str
    gaps: str
    colour: int
    style: str
    ranges: str = ""


@dataclass(frozen=True)
class EndLabel:
    """The letter of a run at the end of its curve."""

    place: float
    letter: str
    colour: int


@dataclass(frozen=True)
class Chart:
    """Curves over one axis, of steps or of `x_title`. `from_zero`: the axis of values begins at 0.

    `x_ticks_at` are the only labelled places; with `x_is_log` the axis is logarithmic.
    """

    title: str
    lines: tuple[PlotLine, ...]
    unit: str = ""
    note: str = ""
    from_zero: bool = False
    x_title: str = "step"
    x_ticks_at: tuple[float, ...] = ()
    x_is_log: bool = False
    scale: Scale = field(init=False)

    def __post_init__(self) -> None:
        lines = tuple(
            replace(line, series=thinned(line.series)) for line in self.lines if line.series
        )
        object.__setattr__(self, "lines", lines)
        object.__setattr__(self, "scale", _scale_of(lines, self.from_zero, self.x_is_log))

    @property
    def is_log(self) -> bool:
        return self.scale.is_log

    @property
    def paths(self) -> list[Path]:
        """The paths in the order of drawing: faint lines first."""
        order = {FAINT: 0, IDEAL: 0, LINE: 1, DOTS: 2}
        lines = sorted(self.lines, key=lambda line: order[line.style])
        return [_path(line, self.scale) for line in lines]

    @property
    def x_ticks(self) -> list[Tick]:
        if self.x_ticks_at:
            return [Tick(self.scale.x_percent(x), f"{x:,g}") for x in self.x_ticks_at]
        low, high = self.scale.x
        places = [x for x in nice_ticks(low, high, 6) if float(x).is_integer() and low <= x <= high]
        return [Tick(self.scale.x_percent(x), f"{x:,.0f}") for x in places]

    @property
    def y_ticks(self) -> list[Tick]:
        low, high = self.scale.y
        values = log_ticks(low, high) if self.is_log else nice_ticks(low, high, 5)
        return [
            Tick(self.scale.y_percent(v), format_number(v))
            for v in values
            if low <= v <= high * (1 + 1e-9)
        ]

    @property
    def end_labels(self) -> list[EndLabel]:
        """Letters at the ends of the curves, moved so that they do not overlap."""
        ends = {}
        for line in sorted(
            self.lines, key=lambda line: (IDEAL, FAINT, DOTS, LINE).index(line.style)
        ):
            finite = [y for y in line.series.ys if is_drawn(y)]
            if line.letter and finite:
                ends[line.letter] = (self.scale.y_percent(finite[-1]), line.letter, line.colour)
        ordered = sorted(ends.values())
        places = [top for top, _, _ in ordered]
        for i in range(1, len(places)):
            places[i] = max(places[i], places[i - 1] + LABEL_APART)
        below = 100.0
        for i in reversed(range(len(places))):  # and up again from the floor
            places[i] = min(places[i], below)
            below = places[i] - LABEL_APART
        return [
            EndLabel(place, letter, colour)
            for place, (_, letter, colour) in zip(places, ordered, strict=True)
        ]

    @property
    def alt(self) -> str:
        """The chart in words: a sentence for each line."""
        sentences = [f"{self.title}{f' in {self.unit}' if self.unit else ''} by {self.x_title}."]
        for line in self.lines:
            points = [p for p in zip(line.series.xs, line.series.ys, strict=True)]
            finite = [(x, y) for x, y in points if is_drawn(y)]
            if finite:
                (x0, y0), (x1, y1) = finite[0], finite[-1]
                low = min(finite, key=lambda point: point[1])
                high = max(finite, key=lambda point: point[1])
                sentences.append(
                    f"{line.label}: {format_number(y0)} at {x0:,.0f}, {format_number(y1)} at "
                    f"{x1:,.0f}; lowest {format_number(low[1])} at {low[0]:,.0f}, "
                    f"highest {format_number(high[1])} at {high[0]:,.0f}."
                )
            if len(finite) < len(points):
                count = len(points) - len(finite)
                sentences.append(f"{line.label}: {count} points not finite, or too large to draw.")
        return " ".join(sentences)

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """The head and some evenly spaced rows; each cell is the nearest point."""
        xs = sorted({x for line in self.lines for x in line.series.xs})
        count = min(TABLE_ROWS, len(xs))
        shown = [xs[round(i * (len(xs) - 1) / max(count - 1, 1))] for i in range(count)]
        reach = max((b - a for a, b in pairwise(shown)), default=1.0) / 2
        rows = []
        for x in dict.fromkeys(shown):
            cells = []
            for line in self.lines:
                point = line.series.nearest(x)
                is_near = point is not None and abs(point[0] - x) <= reach
                cells.append(format_number(point[1], 5) if point and is_near else "")
            rows.append([f"{x:,.0f}", *cells])
        return [self.x_title, *(line.label for line in self.lines)], rows

    @property
    def data(self) -> dict[str, object]:
        """The data from which the page's script shows the values under the pointer."""
        lines = [
            {
                "label": line.label,
                "colour": line.colour,
                "x": list(line.series.xs),
                "y": [float(f"{y:.6g}") for y in line.series.ys],
            }
            for line in self.lines
        ]
        values = {"x": list(self.scale.x), "x_title": self.x_title, "lines": lines}
        return values | ({"x_is_log": True} if self.x_is_log else {})


@dataclass(frozen=True)
class Scale:
    """Maps numbers to percent of the frame, from its left and its top."""

    x: tuple[float, float]
    y: tuple[float, float]
    is_log: bool
    x_is_log: bool = False

    def x_percent(self, x: float) -> float:
        low, high = self.x
        if self.x_is_log:
            low, high, x = math.log10(low), math.log10(high), math.log10(x)
        return round(100 * (x - low) / (high - low), 3)

    def y_percent(self, y: float) -> float:
        low, high = self.y
        if self.is_log:
            low, high, y = math.log10(low), math.log10(high), math.log10(y)
        return round(100 * (1 - (y - low) / (high - low)), 3)


def is_drawn(y: float) -> bool:
    """Whether a number has a place on an axis: finite, and small enough to compute with."""
    return math.isfinite(y) and abs(y) < LARGEST


def _scale_of(lines: Iterable[PlotLine], from_zero: bool, x_is_log: bool) -> Scale:
    xs = [x for line in lines for x in line.series.xs] or [0.0, 1.0]
    bounds = chain.from_iterable(chain.from_iterable(line.ranges for line in lines))
    ys = [y for y in chain(*(line.series.ys for line in lines), bounds) if is_drawn(y)]
    ys = ys or [0.0, 1.0]
    first, last = min(xs), max(xs)
    if first == last:
        first, last = (first / 1.5, last * 1.5) if x_is_log else (first - 0.5, last + 0.5)
    low, high = min(ys), max(ys)
    if low > 1 / LARGEST and high / low >= LOG_FROM and not from_zero:
        room = (high / low) ** MARGIN
        return Scale((first, last), (low / room, high * room), True, x_is_log)
    if from_zero:
        low = min(low, 0.0)
    room = MARGIN * (high - low) or abs(high) * MARGIN or 0.5
    below = low if from_zero and low == 0 else low - room
    return Scale((first, last), (below, high + room), False, x_is_log)


def _path(line: PlotLine, scale: Scale) -> Path:
    """The path of a line, with a gap where a number is not finite; dots are short strokes."""
    parts, gaps, dots, pen_down = [], [], [], False
    for x, y in zip(line.series.xs, line.series.ys, strict=True):
        across = scale.x_percent(x) * FRAME / 100
        if not is_drawn(y):
            gaps.append(f"M{across:.1f} {FRAME:.0f}v{-0.04 * FRAME:.0f}")
            pen_down = False
            continue
        at = f"{across:.1f} {scale.y_percent(y) * FRAME / 100:.1f}"
        parts.append(f"{'L' if pen_down else 'M'}{at}")
        dots.append(f"M{at}h0")
        pen_down = True
    shown = dots if len(dots) == 1 or (line.style == DOTS and len(dots) <= MOST_DOTS) else []
    drawn = "".join(parts), "".join(shown), "".join(gaps)
    return Path(*drawn, line.colour, line.style, _ranges(line, scale))


def _ranges(line: PlotLine, scale: Scale) -> str:
    """An upright stroke over the interval of each point that has one."""
    if len(line.ranges) != len(line.series.xs):
        return ""
    strokes = []
    for x, (low, high) in zip(line.series.xs, line.ranges, strict=True):
        if is_drawn(low) and is_drawn(high) and high > low:
            across, top, bottom = scale.x_percent(x), scale.y_percent(high), scale.y_percent(low)
            unit = FRAME / 100
            strokes.append(f"M{across * unit:.1f} {top * unit:.1f}V{bottom * unit:.1f}")
    return "".join(strokes)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power."""
    rough = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= ENOUGH * rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{n * step:.10g}") for n in range(first, last + 1)]


def ticks_over(length: float, unit: str) -> tuple[Tick, ...]:
    """About five places from 0 to `length`, which is the whole width."""
    places = [x for x in nice_ticks(0, length, 5) if x <= length]
    return tuple(Tick(round(100 * x / length, 3), f"{x:g} {unit}" if x else "0") for x in places)


def log_ticks(low: float, high: float) -> Sequence[float]:
    """Powers of ten; also 2 and 5 times those if there would be few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10.0**n for n in powers if low <= 10.0**n <= high]
    if len(tens) > 3:
        return tens
    return [float(f"{m}e{n}") for n in powers for m in (1, 2, 5) if low <= m * 10.0**n <= high]


# --- charts --------------------------------------------------------------------------------------
# Which curves the page draws: loss, each metric of the evaluations, samples per second, rates,
# and of one run the shards of each rank.


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = 8
NONE = Series("", (), ())


def letter_of(number: int) -> str:
    """The letter of a run in a page of several: A, B, …, Z, A2, B2."""
    turn, place = divmod(number, len(LETTERS))
    return LETTERS[place] + (str(turn + 1) if turn else "")


def charts_of(runs: Sequence[RecordedRun]) -> list[Chart]:
    """The charts of these runs, with their curves overlaid; empty charts are left out."""
    charts = [_loss(runs), *_metrics(runs), _speed(runs), *_rates(runs), *_shares(runs)]
    return [chart for chart in charts if chart.lines]


def constants_of(runs: Sequence[RecordedRun]) -> list[str]:
    """In words, the rates that are constant in all runs: they need no chart."""
    sentences = []
    for name, title in RATES.items():
        values = _first_values([column(run, name) for run in runs])
        if len(values) == 1:
            sentences.append(f"{title}: {values.pop()} at every step.")
    return sentences


def _first_values(series: Sequence[Series]) -> set[str]:
    """The first two distinct values as they are printed, so that 0.003 equals itself in 32 bits."""
    values: set[str] = set()
    for curve in series:
        for y, _ in groupby(curve.ys):
            values.add(format_number(y, 5))
            if len(values) > 1:
                return values
    return values


def _lines(
    runs: Sequence[RecordedRun],
    series: Sequence[Series],
    label: str,
    styles: Sequence[str] | str = LINE,
) -> list[PlotLine]:
    """A line for each run with this series; with several runs, each has its letter."""
    several = len(runs) > 1
    each = [styles] * len(runs) if isinstance(styles, str) else styles
    lines = []
    for number, (curve, style) in enumerate(zip(series, each, strict=True)):
        letter = letter_of(number) if several else ""
        if curve:
            name = f"{letter} {label}".strip()
            lines.append(PlotLine(name, curve, number % COLOURS, style, letter))
    return lines


def _loss(runs: Sequence[RecordedRun]) -> Chart:
    each = [column(run, "loss") for run in runs]
    mean = [means(curve) for curve in each]
    evaluated = [evaluations(run).get("loss", NONE) for run in runs]
    notes = []
    if any(mean):
        windows = ", ".join(str(n) for n in sorted({curve.window for curve in mean if curve}))
        notes.append(f"thin: each step; line: mean of {windows} steps")
    if any(evaluated):
        notes.append("dots: evaluation")
    lines = (
        *_lines(runs, each, "training", [FAINT if curve else LINE for curve in mean]),
        *_lines(runs, mean, "training, mean"),
        *_lines(runs, evaluated, "evaluation", DOTS),
    )
    return Chart("Loss", lines, note="; ".join(notes))


def _metrics(runs: Sequence[RecordedRun]) -> list[Chart]:
    metrics = [evaluations(run) for run in runs]
    names = dict.fromkeys(
        name
        for by_name in metrics
        for name, series in by_name.items()
        if name != "loss" and len(series.xs) > 1  # the tables show single numbers
    )
    return [
        Chart(
            f"Evaluation: {name}",
            tuple(_lines(runs, [by_name.get(name, NONE) for by_name in metrics], name, DOTS)),
        )
        for name in names
    ]


def _speed(runs: Sequence[RecordedRun]) -> Chart:
    series = [samples_per_s(run) for run in runs]
    windows = ", ".join(str(n) for n in sorted({curve.window for curve in series if curve}))
    note = f"mean of {windows} steps"
    lines = tuple(_lines(runs, series, "samples/s"))
    return Chart("Throughput", lines, unit="samples/s", note=note, from_zero=True)


def _rates(runs: Sequence[RecordedRun]) -> list[Chart]:
    charts = []
    for name, title in RATES.items():
        series = [column(run, name) for run in runs]
        if len(_first_values(series)) > 1:
            charts.append(Chart(title, tuple(_lines(runs, series, title))))
    return charts


def _shares(runs: Sequence[RecordedRun]) -> list[Chart]:
    """How many shards of a step each rank of one run had, where they changed since its start."""
    every = [event for event in runs[0].events if event["event"] == "shares"]
    tables = [event for event in every if event["attempt"] == every[-1]["attempt"]]
    if len(tables) < 2 or len(runs) > 1:
        return []
    ends = [*(event["step"] for event in tables[1:]), max([*runs[0].rows.steps, 0])]
    curves: dict[int, tuple[list[float], list[float]]] = {}
    for event, end in zip(tables, ends, strict=True):
        for rank, count in zip(event["ranks"], event["shares"], strict=True):
            xs, ys = curves.setdefault(rank, ([], []))
            xs += [event["step"], end]
            ys += [count, count]
    lines = [
        PlotLine(f"rank {rank}", Series("", xs, ys), number % COLOURS, LINE, str(rank))
        for number, (rank, (xs, ys)) in enumerate(sorted(curves.items()))
    ]
    return [Chart("Shards of a step", tuple(lines), note="by rank: --share", from_zero=True)]
