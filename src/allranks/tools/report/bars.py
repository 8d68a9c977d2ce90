"""Bars of the page: where the time of each rank went, and what each holds in memory."""

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
    """A piece of a bar: how wide in percent, what kind, and what it says."""

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
    """One bar for each rank, on one scale; `legend` names the kinds, `left_out` counts ranks."""

    legend: Mapping[str, str]
    bars: tuple[Bar, ...]
    table: Table
    left_out: int = 0


def phase_seconds(run: RecordedRun) -> dict[int, dict[str, float]]:
    """The seconds of each phase by rank, of the attempt with which the run ended.

    Of the ranks that wrote them, which they do when they are done.
    """
    found = {}
    for rank in run.speakers:
        done = [event for event in run.of("done", rank) if event.get("seconds")]
        if done:
            found[rank] = {name: float(value) for name, value in done[-1]["seconds"].items()}
    return found


def waited_at_least(seconds: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """What a rank spent in exchanges beyond the rank that spent least in them.

    Where sending takes all ranks as long, that much of it was waiting for others.
    """
    spent = {rank: one.get("exchange", 0.0) for rank, one in seconds.items()}
    least = min(spent.values(), default=0.0)
    return {rank: value - least for rank, value in spent.items()}


def time_bars(run: RecordedRun) -> Bars | None:
    """Where the time of each rank went; `None` where no rank has said."""
    seconds = phase_seconds(run)
    if not seconds:
        return None
    kinds = {**TIMES, "exchange": ONE_GRAPH} if run.is_one_graph else TIMES
    bars = _bars(seconds, kinds, "rank {}".format, format_seconds)
    waited = waited_at_least(seconds)
    rows = []
    for rank, one in seconds.items():
        total = sum(one.values()) or 1.0
        cells = [f"{format_seconds(one.get(n, 0))} ({_share(one, n, total)})" for n in TIMES]
        rows.append(
            (str(rank), *cells, UNKNOWN if run.is_one_graph else format_seconds(waited[rank]))
        )
    head = ("rank", *kinds.values(), "of it waiting, at least")
    table = Table(head, tuple(rows), (RIGHT,) * len(head))
    return Bars(kinds, bars, table, len(seconds) - len(bars))


def _share(one: Mapping[str, float], name: str, total: float) -> str:
    return format_percent(one.get(name, 0.0) / total)


def memory_bars(run: RecordedRun) -> Bars | None:
    """What each rank holds between its steps; `None` where no rank has said."""
    held: dict[int, dict[str, float]] = {}
    unknown = set()
    for one in run.placements:
        sizes = dict.fromkeys(MEMORY, 0.0)
        for total in one.totals:
            for name in MEMORY:
                value = getattr(total, name)
                sizes[name] += value or 0
                if value is None:
                    unknown.add((one.rank, name))
        held[one.rank] = sizes
    if not held:
        return None
    kinds = {n: text for n, text in MEMORY.items() if any(one[n] for one in held.values())}
    on_device = any(one.device_bytes is not None for one in run.held.values())
    peaks = PEAKS if on_device else {HOST: PEAKS[HOST]}
    rows = [
        (
            str(rank),
            *(UNKNOWN if (rank, n) in unknown else format_bytes(one[n]) for n in kinds),
            format_bytes(sum(one.values())),
            *(_peak(run, rank, which) for which in peaks),
        )
        for rank, one in held.items()
    ]
    head = ("rank", *kinds.values(), "together", *peaks.values())
    bars = _bars(held, kinds, "rank {}".format, format_bytes)
    table = Table(head, tuple(rows), (RIGHT,) * len(head))
    return Bars(kinds, bars, table, len(held) - len(bars))


def _peak(run: RecordedRun, rank: int, which: str) -> str:
    peak = getattr(run.held.get(rank), which, None)
    return UNKNOWN if peak is None else format_bytes(peak)


def _bars(
    values: Mapping[int, Mapping[str, float]],
    kinds: Mapping[str, str],
    name_of: Callable[[int], str],
    said: Callable[[float], str],
) -> tuple[Bar, ...]:
    """A bar for each rank, the longest of them over the whole width."""
    longest = max((sum(one.get(k, 0) for k in kinds) for one in values.values()), default=0) or 1
    found = []
    for rank in list(values)[:MOST_LANES]:
        one = values[rank]
        total = sum(one.get(kind, 0) for kind in kinds)
        parts = tuple(
            BarPart(round(100 * one.get(kind, 0) / longest, 3), kind, f"{text}: {said(one[kind])}")
            for kind, text in kinds.items()
            if one.get(kind, 0) > 0
        )
        found.append(Bar(name_of(rank), parts, said(total)))
    return tuple(found)


GAUGES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "busy_percent": ("busy", lambda value: f"{value:.0f} %"),
    "celsius": ("temperature", lambda value: f"{value:.0f} °C"),
    "watts": ("power", lambda value: f"{value:.0f} W"),
    "used_bytes": ("memory in use", format_bytes),
}


def gauges(run: RecordedRun) -> Table | None:
    """What the gauges of the devices showed, mean and most by rank; `None`: there are none."""
    rows = []
    for rank in run.speakers:
        seen = run.of("gauges", rank)
        if not seen:
            continue
        cells = [str(rank), str(len(seen))]
        for name, (_, said) in GAUGES.items():
            known = [float(one[name]) for one in seen if one.get(name) is not None]
            mean = sum(known) / len(known) if known else 0.0
            cells.append(f"{said(mean)}, most {said(max(known))}" if known else UNKNOWN)
        rows.append(tuple(cells))
    head = ("rank", "looks", *(title for title, _ in GAUGES.values()))
    return Table(head, tuple(rows), (RIGHT,) * len(head)) if rows else None


def bars_to_data(run: RecordedRun) -> dict[str, Any]:
    """The numbers behind the bars, for `--json`."""
    return {
        "seconds_per_phase": {str(rank): one for rank, one in phase_seconds(run).items()},
        "held_bytes": {str(one.rank): one.all_bytes for one in run.placements},
        "peak_bytes": {str(rank): one.to_data() for rank, one in run.held.items()},
    }


def lanes_of(ranks: Sequence[int]) -> Sequence[int]:
    """The ranks that have a lane of their own in a picture."""
    return ranks[:MOST_LANES]
