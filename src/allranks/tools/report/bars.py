"""Bars of the page: how each rank spent its time, and what it holds in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.job.units import format_bytes
from allranks.tools.report.numbers import UNKNOWN, format_percent, format_seconds
from allranks.tools.report.records import RecordedRun
from allranks.tools.report.tables import RIGHT, Table

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
    bars = _bars(seconds, kinds, "rank {}".format, format_seconds)
    waited = waited_at_least(seconds)
    rows = []
    for rank, phases in seconds.items():
        total = sum(phases.values()) or 1.0
        cells = [f"{format_seconds(phases.get(n, 0))} ({_share(phases, n, total)})" for n in TIMES]
        rows.append(
            (str(rank), *cells, UNKNOWN if run.is_one_graph else format_seconds(waited[rank]))
        )
    head = ("rank", *kinds.values(), "of it waiting, at least")
    table = Table(head, tuple(rows), (RIGHT,) * len(head))
    return Bars(kinds, bars, table, len(seconds) - len(bars))


def _share(phases: Mapping[str, float], name: str, total: float) -> str:
    return format_percent(phases.get(name, 0.0) / total)


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
    bars = _bars(by_rank, kinds, "rank {}".format, format_bytes)
    table = Table(head, tuple(rows), (RIGHT,) * len(head))
    return Bars(kinds, bars, table, len(by_rank) - len(bars))


def _peak(run: RecordedRun, rank: int, which: str) -> str:
    peak = getattr(run.memory_peaks.get(rank), which, None)
    return UNKNOWN if peak is None else format_bytes(peak)


def _bars(
    values: Mapping[int, Mapping[str, float]],
    kinds: Mapping[str, str],
    name_of: Callable[[int], str],
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
        bars.append(Bar(name_of(rank), parts, in_words(total)))
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


def lanes_of(ranks: Sequence[int]) -> Sequence[int]:
    """The ranks that have a lane of their own in a picture."""
    return ranks[:MOST_LANES]
