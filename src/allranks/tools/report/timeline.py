"""When each rank was in which phase, and what happened meanwhile, as far as events tell.

A rank says when it is ready, when it has made its first step, and when it is done; the supervisor
says when an attempt begins, and how it ended. So an attempt of a rank is three spans:

    starting    from the attempt to `ready`: the process, the framework, the model, the data
    preparing   from `ready` to `training`: a checkpoint is loaded, and the first step made
    training    from there to its own end, or to that of the attempt

Events carry the wall clock of their host. Time in which nothing ran, between a stop and the day on
which the job went on, is cut out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from allranks.tools.report.outcome import ENDS, RUNNING
from allranks.tools.report.records import Event, Run

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
RANK_OVER = ("done", "stopped", "failed")
MARKED = ("evaluated", "bad_step", "failed", "straggler", "worker_lost", "learner_lost")


@dataclass(frozen=True)
class Span:
    """One rank in one phase, in seconds since the start of the run; `open` while it goes on."""

    rank: int
    phase: str
    start_s: float
    end_s: float
    attempt: int
    open: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment; `rank` `None` is the supervisor."""

    rank: int | None
    at_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class Cut:
    """Time in which nothing ran, cut out at `at_s`."""

    at_s: float
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """All spans and marks of a run; `seconds` is its length without what is cut out."""

    seconds: float
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    cuts: tuple[Cut, ...]
    at: Callable[[float], float]
    """Seconds since the start, from a wall clock."""


def timeline_of(run: Run) -> Timeline:
    """The timeline of a run up to its end, or to the moment at which a running one was read."""
    begins = [event["time"] for event in run.events if event["event"] == "started"]
    start = begins[0] if begins else run.events[0]["time"]
    last = run.read_at if run.outcome.state == RUNNING else run.events[-1]["time"]
    gaps = _gaps(run)

    def at(wall: float) -> float:
        cut = sum(min(max(wall - a, 0.0), b - a) for a, b in gaps)
        return float(wall - start - cut)

    spans = tuple(span for attempt in _attempts(run, last) for span in _spans(run, *attempt, at))
    marks = tuple(
        Mark(event["rank"], at(event["time"]), event["event"], _marked(event))
        for event in run.events
        if event["event"] in MARKED or event["event"] == "restart"
    )
    cuts = tuple(Cut(at(a), b - a) for a, b in gaps)
    return Timeline(max(at(last), 1e-9), spans, marks, cuts, at)


def _gaps(run: Run) -> list[tuple[float, float]]:
    """From the last sign of one start of the job to the next start, by the wall clock."""
    found = []
    for before, event in pairwise(run.events):
        if event["event"] == "started" and event["rank"] is None:
            found.append((before["time"], event["time"]))
    return [gap for gap in found if gap[1] > gap[0]]


def _attempts(run: Run, last: float) -> list[tuple[int, float, float, bool]]:
    """(number, begin, end, whether it goes on) of each attempt, by the wall clock."""
    found: list[tuple[int, float, float, bool]] = []
    number, began = -1, None
    for event in run.events:
        if event["rank"] is not None:
            continue
        if event["event"] == "attempt":
            if began is not None:
                found.append((number, began, event["time"], False))
            number, began = int(event["attempt"]), event["time"]
        elif event["event"] in OVER and began is not None:
            found.append((number, began, event["time"], False))
            began = None
    if began is not None:
        found.append((number, began, last, run.outcome.state == RUNNING))
    return found


def _spans(
    run: Run, number: int, began: float, ended: float, goes_on: bool, at: Callable[[float], float]
) -> Iterable[Span]:
    for rank in run.speakers:
        mine = [e for e in run.events if e["rank"] == rank and e.get("attempt", 0) == number]
        mine = [e for e in mine if began <= e["time"] <= ended]
        ready, training = _first(mine, "ready"), _first(mine, "training")
        over = next((e["time"] for e in mine if e["event"] in RANK_OVER), None)
        end = ended if over is None else over
        is_open = goes_on and over is None
        if ready is None:
            phases = [(SCRIPT if run.is_command else STARTING, began, end)]
        elif training is None:
            waits = any("role" in e for e in mine if e["event"] == "ready")
            phases = [(STARTING, began, ready), (SERVING if waits else PREPARING, ready, end)]
        else:
            phases = [(STARTING, began, ready), (PREPARING, ready, training)]
            phases.append((TRAINING, training, end))
        for place, (phase, a, b) in enumerate(phases):
            goes = is_open and place == len(phases) - 1
            yield Span(rank, phase, at(a), at(b), number, goes)


def _first(events: list[Event], name: str) -> float | None:
    return next((event["time"] for event in events if event["event"] == name), None)


def _marked(event: dict[str, Any]) -> str:
    """What a mark says in a few words."""
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
        said = event.get("report") or f"{event.get('kind', '')}: {event.get('message', '')}"
        return f"failed: {str(said).partition(chr(10))[0]}"
    if name == "bad_step":
        return f"bad step {step}: {event['bad']}"
    if name == "straggler":
        return f"slow in {event.get('phase')}"
    return f"lost: {event.get('cause') or event.get('why') or ''}"
