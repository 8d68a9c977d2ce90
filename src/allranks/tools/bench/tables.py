"""What people read of a bench: a table, and the page that a computing centre asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from allranks.errors import printable
from allranks.job.units import format_bytes
from allranks.tools.bench.plan import WEAK, Plan
from allranks.tools.bench.results import ENOUGH, Row, request_of
from allranks.tools.bench.statistics import Interval

HEAD = (
    *("strategy", "ranks", "samples/s", "ms a step", "speed-up", "efficiency", "exchange"),
    *("sent a step", "by its card"),
)


def cells_of(row: Row) -> list[str]:
    """What each column says of a row."""
    first = [row.strategy, str(row.ranks)]
    if row.speed is None:
        return [*first, row.problem]
    return [
        *first,
        _with_reach(row.speed, 0),
        f"{row.step_ms:.2f}",
        "1" if row.ranks == row.base else _with_reach(row.speed_up, 2),
        "1" if row.ranks == row.base else _with_reach(row.efficiency, 2),
        "" if row.exchange is None else f"{row.exchange:.0%}",
        format_bytes(row.sent_bytes),
        format_bytes(row.card_bytes) + (f"; {row.problem}" if row.problem else ""),
    ]


def _with_reach(value: Interval | None, digits: int) -> str:
    """`1.62 ± 0.04`; of a single repeat the value alone."""
    if value is None:
        return ""
    reach = value.high - value.mean
    text = f"{value.mean:,.{digits}f}"
    return text if math.isinf(reach) else f"{text} ± {reach:,.{digits}f}"


def table(rows: Sequence[Row]) -> str:
    """A line for each row, in columns."""
    lines = [[printable(cell) for cell in cells] for cells in [list(HEAD), *map(cells_of, rows)]]
    whole = [cells for cells in lines if len(cells) == len(HEAD)]
    widths = [max(len(cells[at]) for cells in whole) for at in range(len(HEAD))]
    ends = [[*widths[: len(cells) - 1], 0] for cells in lines]
    pairs = zip(lines, ends, strict=True)
    return "\n".join("  ".join(map(str.ljust, cells, own)).rstrip() for cells, own in pairs)


def proposal(plan: Plan, rows: Sequence[Row], machine: str) -> str:
    """Scaling with intervals, which rows are above the line, and what to ask for, in Markdown."""
    kind = "Weak" if plan.scaling == WEAK else "Strong"
    batch = f", {plan.batch_size} samples" if plan.batch_size else ""
    each = " for each rank" if plan.scaling == WEAK else " for all ranks together"
    head = (*HEAD[:6], f"above {ENOUGH:.0%}")
    lines = [
        f"# {kind} scaling of {plan.program}",
        "",
        f"Measured on {machine}: {plan.repeats} repeats in turns, {plan.steps} steps each after "
        f"{plan.warm_up} of warm-up{batch + each if batch else ''}. Intervals are of 95 %, over "
        "repeats. Efficiency is the speed-up over the times as many ranks; the line is "
        f"{ENOUGH:.0%}.",
        "",
        "| " + " | ".join(head) + " |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = cells_of(row)[:6]
        cells += [""] * (6 - len(cells))
        lines.append("| " + " | ".join([*cells, _above(row)]) + " |")
    lines += ["", "## Request", "", _request(plan, rows), ""]
    return "\n".join(lines)


def _above(row: Row) -> str:
    if row.efficiency is None:
        return row.problem if row.speed is None else ""
    if row.ranks == row.base:
        return "the base"
    if math.isinf(row.efficiency.low):
        return "one repeat: nobody knows"
    if row.efficiency.low >= ENOUGH:
        return "yes"
    return "no" if row.efficiency.high < ENOUGH else "undecided"


def _request(plan: Plan, rows: Sequence[Row]) -> str:
    found = request_of(rows, plan)
    if found is None or found.speed is None:
        return "Nothing was measured that a request could rest on."
    hours = 1e6 / found.speed.mean / 3600
    chosen = "the most" if plan.scaling == WEAK else "the fastest"
    ranks = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks"
    return (
        f"{ranks} with `--strategy {found.strategy}`: {found.speed.mean:,.0f} samples a second, so "
        f"a million samples take {hours:.2g} hours, {hours * found.ranks:.2g} rank-hours. Of what "
        f"was measured it is {chosen} whose efficiency is above the line with its whole interval."
    )
