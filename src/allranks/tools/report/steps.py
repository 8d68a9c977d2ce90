"""Where the time within steps went, of each rank, where the job was run with `--log phases`.

Ranks that make the same collectives come to their k-th exchange of a step at different moments. The
time from a rank's coming until the last one comes is called waiting, the rest of the exchange
communication. It is a bound for ranks that send while they compute: who comes last may have sent
its part before. Told apart only where all ranks share one clock, and have as many exchanges, and
where these hold no computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from allranks.tools.report.records import Run
from allranks.tools.report.timeline import Timeline

EXCHANGE, WAITING, COMMUNICATION = "exchange", "waiting", "communication"
KINDS = {
    "data": "input",
    "compute": "compute",
    COMMUNICATION: "communication",
    WAITING: "waiting for the last rank",
    EXCHANGE: "communication and waiting",
    "evaluate": "evaluation",
    "save": "checkpoints",
}
COLUMNS = {**KINDS, WAITING: "waiting"}
ONE_CLOCK_S = 0.002
SHOWN_STEPS = 3
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Piece:
    """A rank in one phase, in seconds since the start of the run."""

    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Step:
    """One step of one rank; `number` steps are done with it."""

    rank: int
    attempt: int
    number: int
    start_s: float
    end_s: float
    pieces: tuple[Piece, ...]

    def seconds(self, phase: str) -> float:
        """The time that it spent in a phase."""
        return sum(piece.end_s - piece.start_s for piece in self.pieces if piece.phase == phase)


def steps_of(run: Run, timeline: Timeline) -> tuple[Step, ...]:
    """The steps whose phases were recorded, of all ranks, in order of rank and time."""
    found = []
    for rank, rows in run.phases.items():
        ahead = _ahead(run, rank)
        for row in rows:
            start = timeline.at(row["from"] + ahead.get(row["attempt"], 0.0))
            pieces = tuple(
                Piece(phase, start + a / MICROSECONDS, start + (a + us) / MICROSECONDS)
                for phase, a, us in row["spans"]
            )
            end = pieces[-1].end_s if pieces else start
            found.append(Step(rank, row["attempt"], row["step"] + 1, start, end, pieces))
    return _told_apart(run, tuple(found))


def _ahead(run: Run, rank: int) -> dict[int, float]:
    """By how much the wall clock is ahead of the monotonic one on its host, by attempt."""
    said = run.of("ready", rank)
    return {int(e.get("attempt", 0)): e["time"] - float(e["monotonic"]) for e in said}


def share_a_clock(run: Run) -> bool:
    """Whether all ranks with phases read one monotonic clock: they run on one machine."""
    ahead = [value for rank in run.phases for value in list(_ahead(run, rank).values())[-1:]]
    return len(ahead) == len(run.phases) and max(ahead) - min(ahead) < ONE_CLOCK_S


def _told_apart(run: Run, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same with exchanges as waiting and communication, where that can be known."""
    if len(run.phases) < 2 or run.is_one_graph or not share_a_clock(run):
        return steps
    together: dict[tuple[int, int], list[Step]] = {}
    for step in steps:
        together.setdefault((step.attempt, step.number), []).append(step)
    came: dict[tuple[int, int], list[float]] = {}
    for key, same in together.items():
        starts = [[p.start_s for p in step.pieces if p.phase == EXCHANGE] for step in same]
        if len(same) == len(run.phases) and len({len(one) for one in starts}) == 1:
            came[key] = [max(places) for places in zip(*starts, strict=True)]
    return tuple(
        _split(step, came[step.attempt, step.number])
        if (step.attempt, step.number) in came
        else step
        for step in steps
    )


def _split(step: Step, last_came: Sequence[float]) -> Step:
    """One step with each exchange cut at the moment when the last rank came to it."""
    pieces, place = [], 0
    for piece in step.pieces:
        if piece.phase != EXCHANGE:
            pieces.append(piece)
            continue
        cut = min(max(last_came[place], piece.start_s), piece.end_s)
        place += 1
        parts = (Piece(WAITING, piece.start_s, cut), Piece(COMMUNICATION, cut, piece.end_s))
        pieces += [part for part in parts if part.end_s > part.start_s]
    return replace(step, pieces=tuple(pieces))


def complete(steps: Sequence[Step]) -> list[Step]:
    """The steps that every rank has recorded, but for the first one of an attempt.

    That one pays for what is set up once; one that a fault cut short has lost a rank.
    """
    ranks = {step.rank for step in steps}
    counts = Counter((step.attempt, step.number) for step in steps)
    firsts: dict[int, int] = {}
    for step in steps:
        firsts[step.attempt] = min(step.number, firsts.get(step.attempt, step.number))
    return [
        step
        for step in steps
        if counts[step.attempt, step.number] == len(ranks) and step.number > firsts[step.attempt]
    ]


def seconds_per_step(steps: Sequence[Step]) -> dict[int, dict[str, float]]:
    """The mean seconds of a `complete` step in each phase, by rank."""
    found: dict[int, list[Step]] = {}
    for step in complete(steps):
        found.setdefault(step.rank, []).append(step)
    return {
        rank: {kind: mean(step.seconds(kind) for step in own) for kind in KINDS}
        for rank, own in found.items()
    }


def window(steps: Sequence[Step]) -> tuple[Step, ...]:
    """A few steps to look at closely, of all ranks: those in a row that took the median time.

    Of the last attempt. Fewer than `SHOWN_STEPS` where there are not as many.
    """
    own = complete(steps)
    last = max((step.attempt for step in own), default=0)
    by_number: dict[int, list[Step]] = {}
    for step in own:
        if step.attempt == last:
            by_number.setdefault(step.number, []).append(step)
    numbers = sorted(by_number)
    length = min(SHOWN_STEPS, len(numbers))
    rows = [numbers[i : i + length] for i in range(len(numbers) - length + 1)]
    timed = sorted(
        (sum(step.end_s - step.start_s for number in row for step in by_number[number]), row)
        for row in rows
        if row and row[-1] - row[0] == length - 1
    )
    if not timed:
        return ()
    _, chosen = timed[(len(timed) - 1) // 2]
    return tuple(step for number in chosen for step in by_number[number])
