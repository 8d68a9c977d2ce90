"""A run as a Chrome trace: a file that chrome://tracing and ui.perfetto.dev open.

Format: the "JSON Object Format" of the Trace Event Format (Google, 2016). A process is a node, a
thread a rank. Complete events (`X`) are the phases of ranks, the steps that the leader wrote down,
and with `--log phases` the steps of every rank with what it did in them; instants (`i`) are
evaluations, faults and restarts; a counter (`C`) is the loss.
Times are microseconds since the start of the run.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

from allranks.tools.report.records import Run
from allranks.tools.report.steps import Step, steps_of
from allranks.tools.report.timeline import Timeline, timeline_of

MICROSECONDS = 1e6
SUPERVISOR = "supervisor"


def trace_of(runs: Sequence[Run]) -> dict[str, Any]:
    """All runs in one trace; nodes of several runs are processes of their own."""
    events: list[dict[str, Any]] = []
    first_pid = 0
    for run in runs:
        name = f"{run.label}: " if len(runs) > 1 else ""
        events += _events(run, first_pid, name)
        first_pid += len(run.nodes) + 1
    other = {run.label: {"program": run.job["program"], "ranks": run.ranks} for run in runs}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _events(run: Run, first_pid: int, prefix: str) -> Iterator[dict[str, Any]]:
    """The events of one run, whose nodes are the processes from `first_pid` on."""
    timeline = timeline_of(run)
    pids = {rank: first_pid + run.nodes.index(host) for rank, host in run.hosts.items()}
    above = first_pid + len(run.nodes)  # what no node is known of
    for number, host in enumerate(run.nodes):
        yield _named("process_name", first_pid + number, 0, f"{prefix}node {number}: {host}")
    yield _named("process_name", above, 0, f"{prefix}{SUPERVISOR}")
    for rank in run.speakers:
        yield _named("thread_name", pids.get(rank, above), rank, f"rank {rank}")
    for span in timeline.spans:
        yield {
            **_at("X", pids.get(span.rank, above), span.rank, span.phase, span.start_s),
            "dur": _microseconds(span.end_s - span.start_s),
            "cat": "phase",
            "args": {"attempt": span.attempt, "goes_on": span.open},
        }
    for mark in timeline.marks:
        pid = above if mark.rank is None else pids.get(mark.rank, above)
        yield {
            **_at("i", pid, mark.rank or 0, mark.kind, mark.at_s),
            "s": "g" if mark.rank is None else "t",
            "cat": "event",
            "args": {"text": mark.text},
        }
    near = steps_of(run, timeline)
    for step in near:
        yield from _closely(step, pids.get(step.rank, above))
    known = {(step.attempt, step.number) for step in near if step.rank == 0}
    yield from _steps(run, timeline, pids.get(0, above), known)


def _closely(step: Step, pid: int) -> Iterator[dict[str, Any]]:
    """A step whose phases were recorded, and within it its phases."""
    length = _microseconds(step.end_s - step.start_s)
    args = {"attempt": step.attempt}
    at = _at("X", pid, step.rank, f"step {step.number}", step.start_s)
    yield {**at, "dur": length, "cat": "step", "args": args}
    for piece in step.pieces:
        at = _at("X", pid, step.rank, piece.phase, piece.start_s)
        yield {**at, "dur": _microseconds(piece.end_s - piece.start_s), "cat": "within"}


def _steps(
    run: Run, timeline: Timeline, pid: int, known: Container[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """The steps between two rows of one attempt, but for those `known` as (attempt, step).

    The first of an attempt has no begin.
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
            yield {
                **_at("X", pid, 0, f"step {row.step}", before),
                "dur": _microseconds(at - before),
                "cat": "step",
                "args": {"epoch": row.epoch, "loss": row.loss, "samples": row.samples},
            }
        if math.isfinite(row.loss):
            yield {**_at("C", pid, 0, "loss", at), "args": {"loss": row.loss}}
        before = at


def _at(ph: str, pid: int, tid: int, name: str, seconds: float) -> dict[str, Any]:
    return {"ph": ph, "pid": pid, "tid": tid, "name": name, "ts": _microseconds(seconds)}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "ts": 0.0, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * MICROSECONDS, 3)
