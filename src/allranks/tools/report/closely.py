"""A close view of a few steps, and the mean step of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allranks.tools.report.bars import ONE_GRAPH, lanes_of
from allranks.tools.report.numbers import counted, format_seconds
from allranks.tools.report.plot import Tick, nice_ticks
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
    steps_of,
    window,
)


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
    steps = steps_of(run, timeline)
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
    ranks = lanes_of(sorted({step.rank for step in shown}))
    numbers = sorted({step.number for step in shown})
    which = f"{numbers[0]:,} to {numbers[-1]:,}" if len(numbers) > 1 else f"{numbers[0]:,}"
    present = {piece.phase for step in shown for piece in step.pieces} | set(kinds)
    return Closely(
        title=f"Step{'s' if len(numbers) > 1 else ''} {which}, {format_seconds(length)}",
        legend={kind: text for kind, text in names.items() if kind in present},
        lanes={rank: _bits(rank, shown, begin, length, names) for rank in ranks},
        ends={rank: _ends(rank, shown, begin, length) for rank in ranks},
        ticks=_ticks(length),
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


def _ticks(length_s: float) -> tuple[Tick, ...]:
    milliseconds = 1e3 * length_s
    places = [t for t in nice_ticks(0, milliseconds, 5) if t <= milliseconds]
    return tuple(Tick(round(100 * t / milliseconds, 3), f"{t:g} ms" if t else "0") for t in places)
