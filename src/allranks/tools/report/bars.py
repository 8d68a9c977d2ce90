"""Bars of the page: how each rank spent its time, and what it holds in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from allranks.job.units import format_bytes
from allranks.tools.report.numbers import UNKNOWN, counted, format_percent, format_seconds
from allranks.tools.report.plot import Tick, ticks_over
from allranks.tools.report.records import RecordedRun
from allranks.tools.report.tables import RIGHT, Table
from allranks.tools.report.timeline import (
    COLUMNS,
    EXCHANGE,
    KINDS,
    StepTime,
    Timeline,
    complete,
    seconds_per_step,
    share_a_clock,
    timed_steps,
    window,
)

MOST_LANES = 64
TIMES = {
    "compute": "compute",
    "exchange": "communication and waiting",
    "data": "input",
    "evaluate": "evaluation",
    "save": "checkpoints",
    "start": "start",
}
ONE_GRAPH = "computation and communication in one graph"
MEMORY = {
    "bytes": "weights and buffers",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "gathered_bytes": "gathered within a step",
}

HOST = "host_bytes"
PEAKS = {HOST: "process, at most", "device_bytes": "device, at most"}


@dataclass(frozen=True)
class BarPart:
    """A piece of a bar: its width in percent, its kind, and its tooltip."""

    width: float
    kind: str
    text: str


@dataclass(frozen=True)
class Bar:
    """One rank."""

    name: str
    parts: tuple[BarPart, ...]
    total: str


@dataclass(frozen=True)
class Bars:
    """One bar per rank, on one scale; `legend` names the kinds, `left_out` counts further ranks."""

    legend: Mapping[str, str]
    bars: tuple[Bar, ...]
    table: Table
    left_out: int = 0


def phase_seconds(run: RecordedRun) -> dict[int, dict[str, float]]:
    """The seconds of each phase by rank, in the last attempt of the run.

    A rank writes them when it is done; others are missing.
    """
    seconds = {}
    for rank in run.speakers:
        done = [event for event in run.of("done", rank) if event.get("seconds")]
        if done:
            seconds[rank] = {name: float(value) for name, value in done[-1]["seconds"].items()}
    return seconds


def waited_at_least(seconds: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """The seconds that each rank spent in exchanges beyond the rank that spent least in them.

    If sending takes all ranks equally long, this much was waiting for others.
    """
    spent = {rank: phases.get("exchange", 0.0) for rank, phases in seconds.items()}
    least = min(spent.values(), default=0.0)
    return {rank: value - least for rank, value in spent.items()}


def time_bars(run: RecordedRun) -> Bars | None:
    """How each rank spent its time; `None` if no rank has written it."""
    seconds = phase_seconds(run)
    if not seconds:
        return None
    kinds = {**TIMES, "exchange": ONE_GRAPH} if run.is_one_graph else TIMES
    bars = _bars(seconds, kinds, format_seconds)
    waited = waited_at_least(seconds)
    rows = []
    for rank, phases in seconds.items():
        total = sum(phases.values()) or 1.0
        spent = [phases.get(name, 0.0) for name in TIMES]
        cells = [f"{format_seconds(s)} ({format_percent(s / total)})" for s in spent]
        cells.append(UNKNOWN if run.is_one_graph else format_seconds(waited[rank]))
        rows.append((str(rank), *cells))
    head = ("rank", *kinds.values(), "of it waiting, at least")
    table = Table(head, tuple(rows), (RIGHT,) * len(head))
    return Bars(kinds, bars, table, len(seconds) - len(bars))


def memory_bars(run: RecordedRun) -> Bars | None:
    """The bytes that each rank holds between steps; `None` if no rank has written them."""
    by_rank: dict[int, dict[str, float]] = {}
    unknown = set()
    for placement in run.placements:
        sizes = dict.fromkeys(MEMORY, 0.0)
        for total in placement.totals:
            for name in MEMORY:
                value = getattr(total, name)
                sizes[name] += value or 0
                if value is None:
                    unknown.add((placement.rank, name))
        by_rank[placement.rank] = sizes
    if not by_rank:
        return None
    kinds = {n: text for n, text in MEMORY.items() if any(sizes[n] for sizes in by_rank.values())}
    on_device = any(peak.device_bytes is not None for peak in run.memory_peaks.values())
    peaks = PEAKS if on_device else {HOST: PEAKS[HOST]}
    rows = [
        (
            str(rank),
            *(UNKNOWN if (rank, n) in unknown else format_bytes(sizes[n]) for n in kinds),
            format_bytes(sum(sizes.values())),
            *(_peak(run, rank, which) for which in peaks),
        )
        for rank, sizes in by_rank.items()
    ]
    head = ("rank", *kinds.values(), "together", *peaks.values())
    bars = _bars(by_rank, kinds, format_bytes)
    table = Table(head, tuple(rows), (RIGHT,) * len(head))
    return Bars(kinds, bars, table, len(by_rank) - len(bars))


def _peak(run: RecordedRun, rank: int, which: str) -> str:
    peak = getattr(run.memory_peaks.get(rank), which, None)
    return UNKNOWN if peak is None else format_bytes(peak)


def _bars(
    values: Mapping[int, Mapping[str, float]],
    kinds: Mapping[str, str],
    in_words: Callable[[float], str],
) -> tuple[Bar, ...]:
    """A bar for each rank; the longest has the whole width."""
    longest = max((sum(each.get(k, 0) for k in kinds) for each in values.values()), default=0) or 1
    bars = []
    for rank in list(values)[:MOST_LANES]:
        sizes = values[rank]
        total = sum(sizes.get(kind, 0) for kind in kinds)
        parts = tuple(
            BarPart(round(100 * sizes[kind] / longest, 3), kind, f"{text}: {in_words(sizes[kind])}")
            for kind, text in kinds.items()
            if sizes.get(kind, 0) > 0
        )
        bars.append(Bar(f"rank {rank}", parts, in_words(total)))
    return tuple(bars)


GAUGES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "busy_percent": ("busy", lambda value: f"{value:.0f} %"),
    "celsius": ("temperature", lambda value: f"{value:.0f} °C"),
    "watts": ("power", lambda value: f"{value:.0f} W"),
    "used_bytes": ("memory in use", format_bytes),
}


def gauges(run: RecordedRun) -> Table | None:
    """The mean and the maximum of each device gauge, by rank; `None` if there are none."""
    rows = []
    for rank in run.speakers:
        looks = run.of("gauges", rank)
        if not looks:
            continue
        cells = [str(rank), str(len(looks))]
        for name, (_, in_words) in GAUGES.items():
            known = [float(look[name]) for look in looks if look.get(name) is not None]
            mean = sum(known) / len(known) if known else 0.0
            cells.append(f"{in_words(mean)}, most {in_words(max(known))}" if known else UNKNOWN)
        rows.append(tuple(cells))
    head = ("rank", "looks", *(title for title, _ in GAUGES.values()))
    return Table(head, tuple(rows), (RIGHT,) * len(head)) if rows else None


def bars_to_data(run: RecordedRun) -> dict[str, Any]:
    """The numbers behind the bars, for `--json`."""
    return {
        "seconds_per_phase": {str(rank): phases for rank, phases in phase_seconds(run).items()},
        "held_bytes": {str(placement.rank): placement.all_bytes for placement in run.placements},
        "peak_bytes": {str(rank): peaks.to_data() for rank, peaks in run.memory_peaks.items()},
    }


# --- closely -------------------------------------------------------------------------------------
# A close view of a few steps, and the mean step of each rank.


@dataclass(frozen=True)
class Bit:
    """A phase in a lane: its start and width in percent, and its tooltip."""

    start: float
    width: float
    kind: str
    text: str


@dataclass(frozen=True)
class Closely:
    """Some steps of each rank on one scale, and a table of the mean step."""

    title: str
    legend: Mapping[str, str]
    lanes: Mapping[int, tuple[Bit, ...]]
    ends: Mapping[int, tuple[float, ...]]
    ticks: tuple[Tick, ...]
    table: Table
    note: str


def closely(run: RecordedRun, timeline: Timeline) -> Closely | None:
    """The view of the recorded steps; `None` if none was recorded."""
    steps = timed_steps(run, timeline)
    shown = window(steps)
    if not shown:
        return None
    begin, end = min(s.start_s for s in shown), max(s.end_s for s in shown)
    length = max(end - begin, 1e-9)
    mean = seconds_per_step(steps)
    names = {**KINDS, EXCHANGE: ONE_GRAPH} if run.is_one_graph else KINDS
    columns = {**COLUMNS, EXCHANGE: names[EXCHANGE]}
    kinds = [kind for kind in names if any(seconds[kind] for seconds in mean.values())]
    head = ("rank", *(columns[kind] for kind in kinds), "together")
    rows = tuple(
        (
            str(rank),
            *(format_seconds(seconds[kind]) for kind in kinds),
            format_seconds(sum(seconds[kind] for kind in kinds)),
        )
        for rank, seconds in mean.items()
    )
    ranks = sorted({step.rank for step in shown})[:MOST_LANES]
    numbers = sorted({step.number for step in shown})
    which = f"{numbers[0]:,} to {numbers[-1]:,}" if len(numbers) > 1 else f"{numbers[0]:,}"
    present = {piece.phase for step in shown for piece in step.pieces} | set(kinds)
    return Closely(
        title=f"Step{'s' if len(numbers) > 1 else ''} {which}, {format_seconds(length)}",
        legend={kind: text for kind, text in names.items() if kind in present},
        lanes={rank: _bits(rank, shown, begin, length, names) for rank in ranks},
        ends={rank: _ends(rank, shown, begin, length) for rank in ranks},
        ticks=ticks_over(1e3 * length, "ms"),
        table=Table(head, rows, (RIGHT,) * len(head)),
        note=_note(run, steps),
    )


def _note(run: RecordedRun, steps: tuple[StepTime, ...]) -> str:
    whole = complete(steps)
    count = len({(step.attempt, step.number) for step in whole})
    note = (
        f"Shown are steps in a row that took the median time. The table is the mean of "
        f"{counted(count, 'step')}: all that every rank recorded, but the first of an attempt."
    )
    if run.is_one_graph:
        return f"{note} What happens within the graph of a step, TensorFlow does not tell."
    if len(run.phases) < 2:
        return note
    if not any(step.seconds(EXCHANGE) for step in whole):
        return (
            f"{note} A rank waits from the moment it comes to an exchange until the last rank has "
            "come; the rest of the exchange is communication."
        )
    unlike = "make unlike numbers of exchanges" if share_a_clock(run) else "have unlike clocks"
    return f"{note} Waiting is not told from communication everywhere: the ranks {unlike}."


def _bits(
    rank: int, steps: tuple[StepTime, ...], begin: float, length: float, names: Mapping[str, str]
) -> tuple[Bit, ...]:
    return tuple(
        Bit(
            round(100 * (piece.start_s - begin) / length, 3),
            round(100 * (piece.end_s - piece.start_s) / length, 3),
            piece.phase,
            f"rank {rank}, step {step.number:,}, {names.get(piece.phase, piece.phase)}: "
            f"{format_seconds(piece.end_s - piece.start_s)}",
        )
        for step in steps
        if step.rank == rank
        for piece in step.pieces
    )


def _ends(rank: int, steps: tuple[StepTime, ...], begin: float, length: float) -> tuple[float, ...]:
    """Where one step ends and the next begins."""
    local_steps = [step for step in steps if step.rank == rank]
    return tuple(round(100 * (step.end_s - begin) / length, 3) for step in local_steps[:-1])
