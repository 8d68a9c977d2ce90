"""The output of a bench: a table, and the scaling page that computing centres require."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from allranks.errors import printable
from allranks.job.units import format_bytes
from allranks.tools.bench.plan import WEAK, BenchPlan
from allranks.tools.bench.reading import (
    RUNS_PER_HOUR,
    SAMPLES_PER_S,
    STEPS_PER_S,
    Interval,
)
from allranks.tools.bench.results import (
    ENOUGH,
    ROUNDING,
    BenchRow,
    request_of,
    undecided_of,
    verdict_of,
)

UNKNOWN = "unknown"
Column = Callable[[BenchRow], str]


def name_of(row: BenchRow) -> str:
    """`ddp`, or `hand (peer)`."""
    return f"{row.strategy} (peer)" if row.is_peer else row.strategy


def with_reach(value: Interval | None, digits: int) -> str:
    """`1.62 ± 0.04`; of a single repeat the value alone."""
    if value is None:
        return ""
    reach = value.high - value.mean
    text = f"{value.mean:,.{digits}f}"
    return text if math.isinf(reach) else f"{text} ± {reach:,.{digits}f}"


def _bytes(value: float | None) -> str:
    return "" if value is None else format_bytes(value)


def _until(row: BenchRow) -> str:
    if row.until_runs is None:
        return "not asked of it"
    if row.until_s is None:
        return "not reached"
    missed = row.until_s.repeats < (row.speed.repeats if row.speed else 0)
    return with_reach(row.until_s, 2) + (f" ({row.until_s.repeats} runs)" if missed else "")


def _loss(row: BenchRow) -> str:
    if row.loss_apart is None:
        return "" if not row.is_peer else "nothing of ours to compare"
    distance = f"{row.loss_apart:.0e}"
    return f"as ours, {distance}" if row.loss_apart <= ROUNDING else f"DIFFERS by {distance}"


def _over_base(row: BenchRow, value: Interval | None) -> str:
    if row.unit == STEPS_PER_S:
        return "unknown"
    return "1" if row.ranks == row.base else with_reach(value, 2)


COLUMNS: dict[str, Column] = {
    "strategy": name_of,
    "ranks": lambda row: str(row.ranks),
    "samples/s": lambda row: with_reach(row.speed, 0),
    "ms a step": lambda row: f"{row.step_ms:,.2f}",
    "speed-up": lambda row: _over_base(row, row.speed_up),
    "efficiency": lambda row: _over_base(row, row.efficiency),
    "samples a step": lambda row: f"{row.step_samples or 0:,.4g}",
    "exchange": lambda row: "" if row.exchange is None else f"{row.exchange:.0%}",
    "sent a step": lambda row: _bytes(row.sent_bytes),
    "by its card": lambda row: _bytes(row.card_bytes),
    "peak memory": lambda row: _bytes(row.peak_bytes),
    "s to it": _until,
    "device peak": lambda row: _bytes(row.device_peak_bytes),
    "joules": lambda row: "" if row.joules is None else f"{row.joules:,.0f}",
    "loss": _loss,
}
SCALING = tuple(COLUMNS)[:6]
ONLY_IF: dict[str, Callable[[BenchRow], bool]] = {
    "samples a step": lambda row: row.step_samples is not None,
    "s to it": lambda row: row.until_runs is not None,
    "device peak": lambda row: row.device_peak_bytes is not None,
    "joules": lambda row: row.joules is not None,
    "loss": lambda row: row.is_peer,
}
"""Columns that appear only if a row has a value in them."""


OF_TASKS = ("exchange", "sent a step", "by its card")
UNITS = {
    SAMPLES_PER_S: "",
    STEPS_PER_S: "timed by the steps of its optimizer: its samples come from no DataLoader, so "
    "how the work of a step grows with the ranks is unknown",
    RUNS_PER_HOUR: "timed as a whole, from the start of its ranks to their end: no step of an "
    "optimizer of torch was seen",
}
"""How a script was timed, for each unit."""


def unit_of(rows: Sequence[BenchRow]) -> str:
    """The unit of all speeds of a bench."""
    return next((row.unit for row in rows if row.speed is not None), SAMPLES_PER_S)


def how_timed(plan: BenchPlan, rows: Sequence[BenchRow]) -> str:
    """How a script was timed, in words; "" for a task."""
    by_steps = "timed by the steps of its optimizer and the samples of its DataLoader"
    return (UNITS[unit_of(rows)] or by_steps) if plan.command else ""


def titles_of(head: Sequence[str], rows: Sequence[BenchRow]) -> list[str]:
    """The columns under the names that fit the unit of the rows."""
    unit = unit_of(rows)
    names = {"samples/s": unit, "ms a step": "ms a run" if unit == RUNS_PER_HOUR else "ms a step"}
    ours = [row for row in rows if row.speed is not None and not row.is_peer]
    if any(row.card_bytes is None for row in ours):
        names["strategy"] = "script"
    return [names.get(name, name) for name in head]


def head_of(rows: Sequence[BenchRow]) -> tuple[str, ...]:
    """The columns of these rows."""
    names = [n for n in COLUMNS if n not in ONLY_IF or any(map(ONLY_IF[n], rows))]
    of_tasks = any(row.card_bytes is not None or row.is_peer for row in rows)
    left_out = () if of_tasks else OF_TASKS
    return tuple(name for name in names if name not in left_out)


def cells_of(row: BenchRow, head: Sequence[str]) -> list[str]:
    """The cells of a row; for one that was not measured, the problem."""
    if row.speed is None:
        return [name_of(row), str(row.ranks), row.problem]
    cells = [COLUMNS[name](row) for name in head]
    if row.problem:
        cells[-1] += f"; {row.problem}"
    return cells


def table(rows: Sequence[BenchRow]) -> str:
    """A line for each row, in columns."""
    head = head_of(rows)
    cells = [titles_of(head, rows), *(cells_of(row, head) for row in rows)]
    lines = [[printable(cell) for cell in line] for line in cells]
    whole = [line for line in lines if len(line) == len(head)]
    widths = [max(len(line[at]) for line in whole) for at in range(len(head))]
    ends = [[*widths[: len(line) - 1], 0] for line in lines]
    pairs = zip(lines, ends, strict=True)
    return "\n".join("  ".join(map(str.ljust, line, wide)).rstrip() for line, wide in pairs)


def proposal(plan: BenchPlan, rows: Sequence[BenchRow], machine: str) -> str:
    """In Markdown: scaling with intervals, the rows above the line, and the request."""
    kind = "Weak" if plan.scaling == WEAK else "Strong"
    batch = f", {plan.batch_size} samples" if plan.batch_size else ""
    each = " for each rank" if plan.scaling == WEAK else " for all ranks together"
    head = (*SCALING, "peak memory of a rank", f"above {ENOUGH:.0%}")
    steps = f"{plan.steps} steps each after {plan.warm_up} of warm-up" if plan.steps else "in full"
    lines = [
        f"# {kind} scaling of {plan.program}",
        "",
        f"Measured on {machine}: {plan.repeats} repeats in turns, {steps}"
        f"{batch + each if batch else ''}. Intervals are of 95 %, over "
        "repeats. Efficiency is the speed-up over the times as many ranks; the line is "
        f"{ENOUGH:.0%}.",
        *([f"The script is {how_timed(plan, rows)}."] if plan.command else []),
        "",
        "| " + " | ".join(titles_of(head, rows)) + " |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = cells_of(row, (*SCALING, "peak memory"))
        cells[6:] = [_bytes(row.peak_bytes) or UNKNOWN] if row.speed is not None else []
        cells += [""] * (7 - len(cells))
        lines.append("| " + " | ".join([*cells, above(row)]) + " |")
    lines += _until_lines(plan, rows)
    lines += ["", "## Request", "", request_in_words(plan, rows), ""]
    return "\n".join(lines)


def _until_lines(plan: BenchPlan, rows: Sequence[BenchRow]) -> list[str]:
    """Time and energy to the metric, for rows that trained until it."""
    if not plan.until:
        return []
    lines = [
        "",
        f"## To {plan.until}",
        "",
        "Seconds from the first step, with the evaluations on the way; joules of the processor "
        "packages of the machine over a whole run, where the machine counts them.",
        "",
        "| strategy | ranks | seconds | steps | joules |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row.until_runs is not None:
            step = "" if row.until_step is None else str(row.until_step)
            joules = UNKNOWN if row.joules_until is None else f"{row.joules_until:,.0f}"
            cells = (row.strategy, str(row.ranks), _until(row), step, joules)
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def above(row: BenchRow) -> str:
    """Whether the efficiency of a row is above the line with its whole interval."""
    if row.efficiency is None:
        return row.problem if row.speed is None else ""
    if row.ranks == row.base:
        return "the base"
    if math.isinf(row.efficiency.low):
        return "one repeat: unknown"
    return {True: "yes", False: "no", None: "undecided"}[verdict_of(row)]


def request_in_words(plan: BenchPlan, rows: Sequence[BenchRow]) -> str:
    """The request to a computing centre."""
    undecided = [f"{row.strategy} on {row.ranks}" for row in undecided_of(rows, plan)]
    if undecided:
        return (
            f"None yet: {', '.join(undecided)} may be above the line of {ENOUGH:.0%} or below. "
            f"The intervals are too wide to tell: repeat more, `--repeats {2 * plan.repeats + 3}`."
        )
    row = request_of(rows, plan)
    if plan.command and (row is None or row.unit != SAMPLES_PER_S):
        return f"Nothing: the script is {how_timed(plan, rows)}."
    if row is None or row.speed is None:
        return "Nothing was measured that a request could rest on."
    hours = 1e6 / row.speed.mean / 3600
    chosen = "the most" if plan.scaling == WEAK else "the fastest"
    ranks = "1 rank" if row.ranks == 1 else f"{row.ranks} ranks"
    with_what = f"for {row.strategy}" if plan.command else f"with `--strategy {row.strategy}`"
    memory = "unknown memory" if row.peak_bytes is None else format_bytes(row.peak_bytes)
    text = (
        f"{ranks} {with_what}: {row.speed.mean:,.0f} samples a second, so "
        f"a million samples take {hours:.2g} hours, {hours * row.ranks:.2g} rank-hours; a rank "
        f"held {memory} at most. Of what "
        f"was measured it is {chosen} whose efficiency is above the line with its whole interval."
    )
    if row.until_s is not None:
        to_it = row.until_s.mean / 3600
        text += f" To {plan.until} it takes {to_it:.2g} hours, {to_it * row.ranks:.2g} rank-hours"
        joules = row.joules_until
        text += f", {joules:,.0f} joules." if joules is not None else "; the energy is unknown."
    return text
