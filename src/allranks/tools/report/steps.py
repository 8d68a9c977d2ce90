"""Where the time within steps went, of each rank, where the job was run with `--log phases`.

Ranks that make the same collectives come to their k-th exchange of a step at different moments. The
time from a rank's coming until the last one comes is called waiting, the rest of the exchange
communication. It is a bound for ranks that send while they compute: who comes last may have sent
its part before. Told apart only where all ranks share one clock, and have as many exchanges.
"""

from __future__ import annotations

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
    if len(run.phases) < 2 or not share_a_clock(run):
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


def seconds_per_step(steps: Sequence[Step]) -> dict[int, dict[str, float]]:
    """The mean seconds of a step in each phase, by rank; of the first step of an attempt nothing.

    That one pays for what is set up once.
    """
    first = {attempt: min(s.number for s in steps if s.attempt == attempt) for attempt in
             {s.attempt for s in steps}}  # fmt: skip
    found: dict[int, list[Step]] = {}
    for step in steps:
        if step.number > first[step.attempt]:
            found.setdefault(step.rank, []).append(step)
    return {
        rank: {kind: mean(step.seconds(kind) for step in own) for kind in KINDS}
        for rank, own in found.items()
    }


def window(steps: Sequence[Step]) -> tuple[Step, ...]:
    """A few steps to look at closely, of all ranks: the same ones, about the middle.

    Of the last attempt, and without the first step if there are others.
    """
    if not steps:
        return ()
    last = max(step.attempt for step in steps)
    own = [step for step in steps if step.attempt == last]
    ranks = {step.rank for step in own}
    counts: dict[int, int] = {}
    for step in own:
        counts[step.number] = counts.get(step.number, 0) + 1
    shared = sorted(number for number, count in counts.items() if count == len(ranks))
    shared = shared[1:] or shared
    begin = max(0, (len(shared) - SHOWN_STEPS) // 2)
    chosen = set(shared[begin : begin + SHOWN_STEPS])
    return tuple(step for step in own if step.number in chosen)
