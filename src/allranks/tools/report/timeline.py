"""The phases of each rank over time, and what happened, from the events of a run.

A rank writes when it is ready, when it has made its first step, and when it is done; the supervisor
writes when an attempt begins, and how it ended. So each attempt of a rank has three spans, and so
has each process that joins an elastic job, which may have the number of one that left it:

    starting    from the attempt, or from `joins`, to `ready`: the process, the framework, the
                model, the data
    preparing   from `ready` to `training`: a checkpoint is loaded, and the first step made
    training    from there to its own end, or to that of the attempt

Events carry the wall clock of their host. Time in which nothing ran, between a stop and a later
resume, is cut out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import Any

from allranks.tools.report.records import ENDS, RUNNING, Event, RecordedRun

STARTING, PREPARING, TRAINING = "starting", "preparing", "training"
SERVING, SCRIPT = "serving", "running"
PHASES = {
    STARTING: "from the start of the processes until the model is built",
    PREPARING: "loading a checkpoint if there is one, and the first step",
    TRAINING: "steps, with the evaluations and checkpoints between them",
    SERVING: "a process beside the ranks that train",
    SCRIPT: "a script, of which only the start and end of the attempt are known",
}
OVER = (*ENDS, "restart")
RANK_OVER = ("done", "stopped", "failed", "left")
MARKED = ("evaluated", "bad_step", "failed", "straggler", "worker_lost", "learner_lost", "scaled")


@dataclass(frozen=True)
class TimelineSpan:
    """One rank in one phase, in seconds since the start of the run; `open` while it lasts."""

    rank: int
    phase: str
    start_s: float
    end_s: float
    attempt: int
    open: bool = False


@dataclass(frozen=True)
class TimelineMark:
    """An event at one moment; `rank` `None` is the supervisor."""

    rank: int | None
    at_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class IdleGap:
    """Time in which nothing ran, cut out at `at_s`."""

    at_s: float
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """All spans and marks of a run; `seconds` is its length without the idle gaps."""

    seconds: float
    spans: tuple[TimelineSpan, ...]
    marks: tuple[TimelineMark, ...]
    cuts: tuple[IdleGap, ...]
    at: Callable[[float], float]
    """Seconds since the start, from a wall clock."""


def timeline_of(run: RecordedRun) -> Timeline:
    """The timeline of a run up to its end, or for a running one up to `read_at`."""
    begins = [event["time"] for event in run.events if event["event"] == "started"]
    start = begins[0] if begins else run.events[0]["time"]
    last = run.read_at if run.outcome.state == RUNNING else run.events[-1]["time"]
    gaps = _gaps(run)

    def at(wall: float) -> float:
        cut = sum(min(max(wall - a, 0.0), b - a) for a, b in gaps)
        return float(wall - start - cut)

    spans = tuple(span for attempt in _attempts(run, last) for span in _spans(run, *attempt, at))
    marks = tuple(
        TimelineMark(event["rank"], at(event["time"]), event["event"], _marked(event))
        for event in run.events
        if event["event"] in MARKED or event["event"] == "restart"
    )
    cuts = tuple(IdleGap(at(a), b - a) for a, b in gaps)
    return Timeline(max(at(last), 1e-9), spans, marks, cuts, at)


def _gaps(run: RecordedRun) -> list[tuple[float, float]]:
    """Idle times between the last event of one start of the job and the next, by the wall clock."""
    gaps = []
    for before, event in pairwise(run.events):
        if event["event"] == "started" and event["rank"] is None:
            gaps.append((before["time"], event["time"]))
    return [gap for gap in gaps if gap[1] > gap[0]]


def _attempts(run: RecordedRun, last: float) -> list[tuple[int, float, float, bool]]:
    """(number, begin, end, whether it goes on) of each attempt, by the wall clock."""
    attempts: list[tuple[int, float, float, bool]] = []
    number, began = -1, None
    for event in run.events:
        if event["rank"] is not None:
            continue
        if event["event"] == "attempt":
            if began is not None:
                attempts.append((number, began, event["time"], False))
            number, began = int(event["attempt"]), event["time"]
        elif event["event"] in OVER and began is not None:
            attempts.append((number, began, event["time"], False))
            began = None
    if began is not None:
        attempts.append((number, began, last, run.outcome.state == RUNNING))
    return attempts


def _spans(
    run: RecordedRun,
    number: int,
    began: float,
    ended: float,
    goes_on: bool,
    at: Callable[[float], float],
) -> Iterable[TimelineSpan]:
    for rank in run.speakers:
        mine = [e for e in run.events if e["rank"] == rank and e.get("attempt", 0) == number]
        mine = [e for e in mine if began <= e["time"] <= ended]
        begins = [e["time"] for e in mine if e["event"] == "joins"]
        if rank < run.ranks or not begins:
            begins.insert(0, began)
        for begin, until in pairwise([*begins, math.inf]):
            life = [e for e in mine if begin <= e["time"] < until]
            span = (begin, min(until, ended))
            for phase, a, b, is_over in _phases(run, life, *span):
                yield TimelineSpan(rank, phase, at(a), at(b), number, goes_on and not is_over)


def _phases(
    run: RecordedRun, mine: list[Event], began: float, ended: float
) -> Iterable[tuple[str, float, float, bool]]:
    """(phase, begin, end, whether it has ended) of a process, from its events."""
    ends = (*RANK_OVER, "worker_lost") if run.job.get("elastic") else RANK_OVER
    ready, training = _first(mine, "ready"), _first(mine, "training")
    over = next((e["time"] for e in mine if e["event"] in ends), None)
    end = ended if over is None else over
    if ready is None:
        phases = [(SCRIPT if run.is_command else STARTING, began, end)]
    elif training is None:
        waits = any("role" in e for e in mine if e["event"] == "ready")
        phases = [(STARTING, began, ready), (SERVING if waits else PREPARING, ready, end)]
    else:
        phases = [(STARTING, began, ready), (PREPARING, ready, training)]
        phases.append((TRAINING, training, end))
    for place, (phase, a, b) in enumerate(phases):
        yield phase, a, b, over is not None or place < len(phases) - 1


def _first(events: list[Event], name: str) -> float | None:
    return next((event["time"] for event in events if event["event"] == name), None)


def _marked(event: dict[str, Any]) -> str:
    """The text of a mark."""
    name, step = event["event"], event.get("step")
    after = f" after step {step}" if step is not None else ""
    if name == "evaluated":
        values = ", ".join(f"{n} {float(v):.4g}" for n, v in event["metrics"].items())
        return f"evaluated{after}: {values}"
    if name == "restart":
        first = str(event.get("report", "")).partition("\n")[0]
        resumes = event.get("resumes_from")
        return first if resumes is None else f"{first}; again from step {resumes}"
    if name == "failed":
        report = event.get("report") or f"{event.get('kind', '')}: {event.get('message', '')}"
        return f"failed: {str(report).partition(chr(10))[0]}"
    if name == "bad_step":
        return f"bad step {step}: {event['bad']}"
    if name == "scaled":
        return f"{event['ranks']} ranks train from step {event['from_step']} on"
    if name == "straggler":
        return f"slow in {event.get('phase')}"
    return f"lost: {event.get('cause') or event.get('why') or ''}"


# --- steps ---------------------------------------------------------------------------------------
# How each rank spent its time within steps, for jobs with `--log phases`.
#
# Ranks that make the same collectives enter the k-th exchange of a step at different moments. From
# a rank's entry until the last rank's entry the time is called waiting, after that communication.
# For ranks that send while they compute this is a bound: the last rank may have sent its part
# before. The split is made only if all ranks share one clock and have equally many exchanges, and
# these contain no computation.


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
class PhasePiece:
    """A rank in one phase, in seconds since the start of the run."""

    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTime:
    """One step of one rank; `number` counts from 1."""

    rank: int
    attempt: int
    number: int
    start_s: float
    end_s: float
    pieces: tuple[PhasePiece, ...]

    def seconds(self, phase: str) -> float:
        """The time that it spent in a phase."""
        return sum(piece.end_s - piece.start_s for piece in self.pieces if piece.phase == phase)


def timed_steps(run: RecordedRun, timeline: Timeline) -> tuple[StepTime, ...]:
    """The steps with recorded phases, in order of rank and time."""
    steps = []
    for rank, rows in run.phases.items():
        ahead = _ahead(run, rank)
        for row in rows:
            start = timeline.at(row["from"] + ahead.get(row["attempt"], 0.0))
            pieces = tuple(
                PhasePiece(phase, start + a / MICROSECONDS, start + (a + us) / MICROSECONDS)
                for phase, a, us in row["spans"]
            )
            end = pieces[-1].end_s if pieces else start
            steps.append(StepTime(rank, row["attempt"], row["step"] + 1, start, end, pieces))
    return _with_waiting(run, tuple(steps))


def _ahead(run: RecordedRun, rank: int) -> dict[int, float]:
    """The wall clock minus the monotonic clock of the rank's host, by attempt."""
    events = run.of("ready", rank)
    return {int(e.get("attempt", 0)): e["time"] - float(e["monotonic"]) for e in events}


def share_a_clock(run: RecordedRun) -> bool:
    """Whether all ranks with phases share one monotonic clock, as on one machine."""
    ahead = [value for rank in run.phases for value in list(_ahead(run, rank).values())[-1:]]
    return len(ahead) == len(run.phases) and max(ahead) - min(ahead) < ONE_CLOCK_S


def _with_waiting(run: RecordedRun, steps: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
    """The same steps, with exchanges split into waiting and communication where possible."""
    if len(run.phases) < 2 or run.is_one_graph or not share_a_clock(run):
        return steps
    by_step: dict[tuple[int, int], list[StepTime]] = {}
    for step in steps:
        by_step.setdefault((step.attempt, step.number), []).append(step)
    came: dict[tuple[int, int], list[float]] = {}
    for key, same in by_step.items():
        starts = [[p.start_s for p in step.pieces if p.phase == EXCHANGE] for step in same]
        if len(same) == len(run.phases) and len({len(times) for times in starts}) == 1:
            came[key] = [max(places) for places in zip(*starts, strict=True)]
    return tuple(
        _split(step, came[step.attempt, step.number])
        if (step.attempt, step.number) in came
        else step
        for step in steps
    )


def _split(step: StepTime, last_came: Sequence[float]) -> StepTime:
    """One step, with each exchange cut at the moment when the last rank entered it."""
    pieces, place = [], 0
    for piece in step.pieces:
        if piece.phase != EXCHANGE:
            pieces.append(piece)
            continue
        cut = min(max(last_came[place], piece.start_s), piece.end_s)
        place += 1
        parts = (
            PhasePiece(WAITING, piece.start_s, cut),
            PhasePiece(COMMUNICATION, cut, piece.end_s),
        )
        pieces += [part for part in parts if part.end_s > part.start_s]
    return replace(step, pieces=tuple(pieces))


def complete(steps: Sequence[StepTime]) -> list[StepTime]:
    """The steps that every rank has recorded, without the first one of each attempt.

    The first step includes one-time setup; a step that a fault interrupted lacks a rank.
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


def seconds_per_step(steps: Sequence[StepTime]) -> dict[int, dict[str, float]]:
    """The mean seconds of a `complete` step in each phase, by rank."""
    by_rank: dict[int, list[StepTime]] = {}
    for step in complete(steps):
        by_rank.setdefault(step.rank, []).append(step)
    return {
        rank: {kind: mean(step.seconds(kind) for step in local_steps) for kind in KINDS}
        for rank, local_steps in by_rank.items()
    }


def window(steps: Sequence[StepTime]) -> tuple[StepTime, ...]:
    """`SHOWN_STEPS` consecutive steps of the last attempt whose total time is the median.

    Fewer if there are not as many.
    """
    whole = complete(steps)
    last = max((step.attempt for step in whole), default=0)
    by_number: dict[int, list[StepTime]] = {}
    for step in whole:
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


# --- trace ---------------------------------------------------------------------------------------
# A run as a Chrome trace: a file that chrome://tracing and ui.perfetto.dev open.
#
# Format: the "JSON Object Format" of the Trace Event Format (Google, 2016). A process is a node, a
# thread a rank. Complete events (`X`) are the phases of ranks, the steps that the leader wrote
# down, and with `--log phases` the steps of every rank with what it did in them; instants (`i`) are
# evaluations, faults and restarts; a counter (`C`) is the loss. Times are microseconds since the
# start of the run.


SUPERVISOR = "supervisor"


def trace_of(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """All runs in one trace; nodes of several runs are processes of their own."""
    events: list[dict[str, Any]] = []
    first_pid = 0
    for run in runs:
        name = f"{run.label}: " if len(runs) > 1 else ""
        events += _events(run, first_pid, name)
        first_pid += len(run.nodes) + 1
    other = {run.label: {"program": run.job["program"], "ranks": run.ranks} for run in runs}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _events(run: RecordedRun, first_pid: int, prefix: str) -> Iterator[dict[str, Any]]:
    """The events of one run, whose nodes are the processes from `first_pid` on."""
    timeline = timeline_of(run)
    pids = {rank: first_pid + run.nodes.index(host) for rank, host in run.hosts.items()}
    above = first_pid + len(run.nodes)  # for ranks on an unknown node
    for number, host in enumerate(run.nodes):
        yield _named("process_name", first_pid + number, 0, f"{prefix}node {number}: {host}")
    yield _named("process_name", above, 0, f"{prefix}{SUPERVISOR}")
    for rank in run.speakers:
        yield _named("thread_name", pids.get(rank, above), rank, f"rank {rank}")
    for span in timeline.spans:
        at = _span(pids.get(span.rank, above), span.rank, span.phase, span.start_s, span.end_s)
        yield {**at, "cat": "phase", "args": {"attempt": span.attempt, "goes_on": span.open}}
    for mark in timeline.marks:
        pid = above if mark.rank is None else pids.get(mark.rank, above)
        yield {
            **_at("i", pid, mark.rank or 0, mark.kind, mark.at_s),
            "s": "g" if mark.rank is None else "t",
            "cat": "event",
            "args": {"text": mark.text},
        }
    near = timed_steps(run, timeline)
    for step in near:
        yield from _closely(step, pids.get(step.rank, above))
    known = {(step.attempt, step.number) for step in near if step.rank == 0}
    yield from _steps(run, timeline, pids.get(0, above), known)


def _closely(step: StepTime, pid: int) -> Iterator[dict[str, Any]]:
    """A step whose phases were recorded, and within it its phases."""
    at = _span(pid, step.rank, f"step {step.number}", step.start_s, step.end_s)
    yield {**at, "cat": "step", "args": {"attempt": step.attempt}}
    for piece in step.pieces:
        yield {**_span(pid, step.rank, piece.phase, piece.start_s, piece.end_s), "cat": "within"}


def _steps(
    run: RecordedRun, timeline: Timeline, pid: int, known: Container[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """The steps between two rows of one attempt, without those `known` as (attempt, step).

    The first step of an attempt has no start time.
    """
    ahead_s, before, attempt = 0.0, None, 0
    for row in run.rows if run.starts else ():
        start = run.starts.get(row.step - 1)
        if start is not None:
            ahead_s, before = start["time"] - start["monotonic"], None
            attempt = int(start.get("attempt", 0))
        at = timeline.at(row.monotonic + ahead_s)
        is_new = (attempt, row.step) not in known
        if before is not None and at >= before and is_new:
            args = {"epoch": row.epoch, "loss": row.loss, "samples": row.samples}
            yield {**_span(pid, 0, f"step {row.step}", before, at), "cat": "step", "args": args}
        if math.isfinite(row.loss):
            yield {**_at("C", pid, 0, "loss", at), "args": {"loss": row.loss}}
        before = at


def _at(ph: str, pid: int, tid: int, name: str, seconds: float) -> dict[str, Any]:
    return {"ph": ph, "pid": pid, "tid": tid, "name": name, "ts": _microseconds(seconds)}


def _span(pid: int, tid: int, name: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {**_at("X", pid, tid, name, start_s), "dur": _microseconds(end_s - start_s)}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "ts": 0.0, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * MICROSECONDS, 3)
