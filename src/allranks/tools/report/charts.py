"""Which curves the page draws: loss, each metric of the evaluations, samples per second, rates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from allranks.tools.report.curves import Series, column, evaluations, means, samples_per_s
from allranks.tools.report.numbers import format_number
from allranks.tools.report.plot import DOTS, FAINT, LINE, Chart, Line
from allranks.tools.report.records import RATES, Run

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = 8
NONE = Series("", (), ())


def letter_of(number: int) -> str:
    """A, B, …, Z, A2, B2: what a run is called in the curves of several."""
    turn, place = divmod(number, len(LETTERS))
    return LETTERS[place] + (str(turn + 1) if turn else "")


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts of these runs, curves overlaid; those without a number are left out."""
    found = [_loss(runs), *_metrics(runs), _speed(runs), *_rates(runs)]
    return [chart for chart in found if chart.lines]


def constants_of(runs: Sequence[Run]) -> list[str]:
    """The rates that were the same at every step of all runs, in words: they need no chart."""
    told = []
    for name, title in RATES.items():
        values = _first_values([column(run, name) for run in runs])
        if len(values) == 1:
            told.append(f"{title}: {values.pop()} at every step.")
    return told


def _first_values(series: Sequence[Series]) -> set[str]:
    """The value of all as a person reads it, or the first two: 0.003 is the same in 32 bits."""
    found: set[str] = set()
    for one in series:
        for y, _ in groupby(one.ys):
            found.add(format_number(y, 5))
            if len(found) > 1:
                return found
    return found


def _lines(
    runs: Sequence[Run], series: Sequence[Series], what: str, styles: Sequence[str] | str = LINE
) -> list[Line]:
    """A line for each run that has one, named after its run where there are several."""
    several = len(runs) > 1
    each = [styles] * len(runs) if isinstance(styles, str) else styles
    found = []
    for number, (one, style) in enumerate(zip(series, each, strict=True)):
        letter = letter_of(number) if several else ""
        if one:
            found.append(Line(f"{letter} {what}".strip(), one, number % COLOURS, style, letter))
    return found


def _loss(runs: Sequence[Run]) -> Chart:
    each = [column(run, "loss") for run in runs]
    mean = [means(one) for one in each]
    evaluated = [evaluations(run).get("loss", NONE) for run in runs]
    told = []
    if any(mean):
        windows = ", ".join(str(n) for n in sorted({one.window for one in mean if one}))
        told.append(f"thin: each step; line: mean of {windows} steps")
    if any(evaluated):
        told.append("dots: evaluation")
    lines = (
        *_lines(runs, each, "training", [FAINT if one else LINE for one in mean]),
        *_lines(runs, mean, "training, mean"),
        *_lines(runs, evaluated, "evaluation", DOTS),
    )
    return Chart("Loss", lines, note="; ".join(told))


def _metrics(runs: Sequence[Run]) -> list[Chart]:
    found = [evaluations(run) for run in runs]
    names = dict.fromkeys(
        name
        for one in found
        for name, series in one.items()
        if name != "loss" and len(series.xs) > 1  # of one number the tables tell
    )
    return [
        Chart(
            f"Evaluation: {name}",
            tuple(_lines(runs, [one.get(name, NONE) for one in found], name, DOTS)),
        )
        for name in names
    ]


def _speed(runs: Sequence[Run]) -> Chart:
    series = [samples_per_s(run) for run in runs]
    windows = ", ".join(str(n) for n in sorted({one.window for one in series if one}))
    note = f"mean of {windows} steps"
    lines = tuple(_lines(runs, series, "samples/s"))
    return Chart("Throughput", lines, unit="samples/s", note=note, from_zero=True)


def _rates(runs: Sequence[Run]) -> list[Chart]:
    charts = []
    for name, title in RATES.items():
        series = [column(run, name) for run in runs]
        if len(_first_values(series)) > 1:
            charts.append(Chart(title, tuple(_lines(runs, series, title))))
    return charts
