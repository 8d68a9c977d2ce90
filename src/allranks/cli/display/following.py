"""A running job, read from its run folder: what is known of it now, and what is new.

`Follower` reads the files that the job writes and makes a `FollowedJob` of them. That is plain
data: what shows it, as lines, on a terminal or in a notebook, reads no file. `Follower` writes
nothing and never waits. Below it: what each event means, in words for a person.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from allranks.errors import FaultKind
from allranks.job.limits import elastic_range
from allranks.job.run_folder import REMOVED, rank_events_path, rank_log_path
from allranks.launcher.plan import LaunchPlan
from allranks.strategies.card import APART

MOST_AT_ONCE = 1 << 20
LONGEST_LINE = 1 << 16
ETA_OVER_S = 60.0  # evaluations and saves among the steps are part of what is left


@dataclass(frozen=True)
class Evaluation:
    """The metrics after so many steps, and whether they are the best so far."""

    step: int
    metrics: dict[str, float]
    best: bool = False


@dataclass(frozen=True)
class Anomaly:
    """A problem of a rank (`None`: of the whole job); `times` counts its occurrences."""

    rank: int | None
    problem: str
    times: int = 1


@dataclass(frozen=True)
class FollowedJob:
    """What is known of a job now; what is not known is `None`.

    `row` is the newest row of the metrics, `step` the steps that are done. `agree` says whether
    that row is true of all ranks, or of rank 0 alone. `quiet_s` is the time since it was read.
    """

    ranks: int = 1
    agree: bool = True
    row: dict[str, Any] | None = None
    total_steps: int | None = None
    epochs: int | None = None
    samples_per_s: float | None = None
    seconds_left: float | None = None
    elapsed_s: float = 0.0
    quiet_s: float = 0.0
    evaluation: Evaluation | None = None
    saved_step: int | None = None
    anomalies: tuple[Anomaly, ...] = ()

    @property
    def step(self) -> int | None:
        return None if self.row is None else int(self.row["step"]) + 1


@dataclass(frozen=True)
class _Point:
    """Where the training was at a moment of the monotonic clock."""

    monotonic: float
    step: int
    samples: int


class Follower:
    """Follows one job. `look` reads what is new; `state` is what is known after it.

    Samples per second are measured over `rate_over_s`, or from one look to the next if that is 0.
    """

    def __init__(self, plan: LaunchPlan, rate_over_s: float = 0.0) -> None:
        """The run folder is there and the ranks are about to start."""
        job, run_dir = plan.job, Path(plan.job.run_dir)
        epochs = None if job.steps is not None else plan.shape.fields.get("epochs")
        agree = job.ranks == 1 or job.strategy_spec.card.state != APART
        self.state = FollowedJob(job.ranks, agree, total_steps=job.steps, epochs=epochs)
        self._log = FollowedFile(rank_log_path(run_dir, 0))
        self._metrics = FollowedFile(run_dir / "metrics.jsonl", is_rewritten=True)
        self._events: dict[int | None, FollowedFile] = {
            None: FollowedFile(run_dir / "events.jsonl")
        }
        most = elastic_range(job)[1] if job.elastic else 0
        ranks = range(max(job.ranks, len(plan.ranks), most))
        self._events |= {rank: FollowedFile(rank_events_path(run_dir, rank)) for rank in ranks}
        self._anomalies: dict[tuple[int | None, str], Anomaly] = {}  # by rank and kind
        self._points: deque[_Point] = deque()
        self._samples = 0
        self._rate_over_s = rate_over_s
        self._started = self._read_at = time.monotonic()

    def look(self) -> list[str]:
        """Read new output and events; returns the lines to print."""
        lines = [f"rank 0: {line}" for line in self._log.text().splitlines()]
        events = [
            {"rank": rank, **event} for rank, tail in self._events.items() for event in tail.rows()
        ]
        for event in sorted(events, key=lambda event: float(event["time"])):
            lines += in_words(event)
            self._note(event)
        self._count(self._metrics.rows())
        now = time.monotonic()
        self.state = dataclasses.replace(
            self.state,
            samples_per_s=self._rate(),
            seconds_left=self._left(),
            elapsed_s=now - self._started,
            quiet_s=0.0 if self.state.row is None else now - self._read_at,
            anomalies=tuple(
                sorted(self._anomalies.values(), key=lambda a: -1 if a.rank is None else a.rank)
            ),
        )
        return lines

    def _note(self, event: dict[str, Any]) -> None:
        """Update the state by an event."""
        name, known = event["event"], dict[str, Any]()
        if name == "training" and event["rank"] == 0:
            known = {"total_steps": event.get("total_steps", self.state.total_steps)}
        elif name == "evaluated" and (event["rank"] == 0 or self.state.agree):
            metrics = {metric: float(value) for metric, value in event["metrics"].items()}
            known = {"evaluation": Evaluation(event["step"], metrics, bool(event.get("best")))}
        elif name == "checkpoint":
            known = {"saved_step": event["step"]}
        elif name == "group":
            known = {"ranks": len(event["members"])}
            self._points.clear()  # another rank, perhaps on another host, may write the rows now
        elif name == "attempt":  # a slow rank may not be slow again
            items = self._anomalies.items()
            self._anomalies = {key: value for key, value in items if key[1] != "straggler"}
        self.state = dataclasses.replace(self.state, **known)
        for rank, problem in anomalies_in(event):
            if rank is None and not self.state.agree:
                rank = event["rank"]
            before = self._anomalies.get((rank, name))
            times = 1 if before is None else before.times + 1
            self._anomalies[rank, name] = Anomaly(rank, problem, times)

    def _count(self, rows: list[dict[str, Any]]) -> None:
        """Add new rows of the metrics; an attempt that goes back to an earlier step starts anew."""
        for row in rows:
            if self.state.step is not None and int(row["step"]) < self.state.step:
                self._points.clear()
            self.state = dataclasses.replace(self.state, row=row)
            self._samples += int(row["samples"])
        if rows:
            last, self._read_at = rows[-1], time.monotonic()
            at = float(last["monotonic"])
            self._points.append(_Point(at, int(last["step"]), self._samples))
            while at - self._points[0].monotonic > max(ETA_OVER_S, self._rate_over_s):
                if len(self._points) == 2:
                    break
                self._points.popleft()

    def _rate(self) -> float | None:
        """Samples per second lately; `None` before there are two points to measure between."""
        if len(self._points) < 2:
            return None
        *before, last = self._points
        since = last.monotonic - self._rate_over_s
        first = next((p for p in reversed(before) if p.monotonic <= since), before[0])
        spent_s = last.monotonic - first.monotonic
        return (last.samples - first.samples) / spent_s if spent_s > 0 else None

    def _left(self) -> float | None:
        """Seconds to the last step at the pace of late; `None` where either is not known."""
        if self.state.total_steps is None or len(self._points) < 2:
            return None
        first, last = self._points[0], self._points[-1]
        steps, spent_s = last.step - first.step, last.monotonic - first.monotonic
        ahead = max(0, self.state.total_steps - last.step - 1)
        return ahead * spent_s / steps if steps > 0 else None


@dataclass
class FollowedFile:
    """A file that grows: what was added to it since it was looked at last, `most_bytes` at once.

    A new attempt writes the metrics anew, without the steps that were lost (`is_rewritten`): what
    is left of them is known, so reading goes on at its end. Another file that is new is read from
    its beginning.
    """

    path: Path
    is_rewritten: bool = False
    most_bytes: int = MOST_AT_ONCE
    place: tuple[int, int] | None = field(init=False, default=None)
    """The inode of the file, and how far it is read."""

    def __post_init__(self) -> None:
        with suppress(OSError):  # of a resumed run, only what is new
            there = self.path.stat()
            self.place = there.st_ino, there.st_size

    def rows(self) -> list[dict[str, Any]]:
        """The new lines that are JSON; a file written anew may begin in the middle of one."""
        rows = []
        for line in self.text().splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def text(self, is_over: bool = False) -> str:
        """The whole lines that were added to the file since the last call.

        A line longer than `LONGEST_LINE` comes in pieces; if the file `is_over`, its end is a line.
        """
        try:
            there = self.path.stat()
            if (there.st_ino, there.st_size) == self.place:
                return ""
            with open(self.path, "rb") as file:
                inode, size = os.fstat(file.fileno()).st_ino, file.seek(0, os.SEEK_END)
                known, start = self.place or (inode, 0)
                if inode != known:
                    start = size if self.is_rewritten else 0
                file.seek(start)
                new = file.read(self.most_bytes)
        except OSError:
            return ""
        is_line = is_over or len(new) >= LONGEST_LINE
        whole = new[: new.rfind(b"\n") + 1] or (new if is_line else b"")
        self.place = inode, start + len(whole)
        return whole.decode(errors="replace")


# --- event text ----------------------------------------------------------------------------------
# What happens in a running job, in words for a person. Pure.
#
# An event gets its `rank` from the file that it stands in, `None` for what the supervisor saw.


NOT_SEEN = "the witness could not look at everything"
LEFT_OUT = {
    "inner_left_out": "a checkpoint without the newest optimizers",
    "rest_left_out": "the weights of the end lack the last findings",
}
LOADED_FROM = {
    "spare": "their copies of its parts",
    "replicas": "what the ranks that are left held",
    "checkpoint": "the newest checkpoint",
    "start": "new weights, as there was no checkpoint",
}


def in_words(event: dict[str, Any]) -> list[str]:
    """The lines to print for an event while the job runs; empty for most events."""
    name = event["event"]
    if name == "resumed":
        resumed = f"resumes after step {event['step']}, from {event['path']}"
        changes = {**event["changes"], **event["differs"]}
        return [resumed, *(f"note: {n} was {was}, is {now}" for n, (was, now) in changes.items())]
    if name == "program_changed":
        return [f"note: {n} was {was}, is {now}" for n, (was, now) in event["differs"].items()]
    if name in ("data_notes", "model_notes", "rate_notes", "callback_notes"):
        return [f"note: {note}" for note in event["notes"]]
    if name == "restart":
        again = f"starting again from step {event['resumes_from']}"
        micro = f" with --micro-batch {event['micro_batch']}" if "micro_batch" in event else ""
        return [_fault(event), f"{again}{micro}: {event['lost_steps']} steps lost"]
    if name == "evaluated":
        words = evaluation_in_words(event["step"], event["metrics"], bool(event.get("best")))
        return [f"{_whose(event)}evaluated {words}"]
    if name == "profiled":
        return [f"profile of steps {event['first']} to {event['last']}: {event['path']}"]
    if name == "checkpoint_failed":
        where = f"rank {event['rank']}: {event['error']}"
        return [f"note: no checkpoint of step {event['step']} ({where}); training goes on"]
    if name == "checkpoint_skipped":
        return [f"note: {event['path']} is damaged, and passed over: {event['problems'][0]}"]
    if name == "job_file_restored":
        return ["note: job.toml was removed while the job ran, and is written again"]
    if name in ("kept_elsewhere", "not_kept"):
        text = not_in_the_run_folder(event["file"], event.get("where"), event.get("error", ""))
        return [f"note: {text}"]
    if name == "bad_step":
        return [f"note: {_whose(event)}{event['bad']}"]
    if name == "witness":
        lines = [f"note: NOT equal on other numbers of ranks: {text}" for text in event["found"]]
        return [*lines, *(f"note: {NOT_SEEN}: {text}" for text in event.get("unseen", ()))]
    if name in ("not_digested", "audit", "never_due", "connection_lost", "node_back"):
        return [f"note: {event['text']}"]
    if name == "worker_lost":
        return [f"note: {event['who']} is lost: {event['cause']}; the others go on"]
    if name == "group" and event["steps_again"] > 1:
        return [f"note: {_made_again(event)}"]
    if name == "moved":
        moved = ", ".join(f"{role} from {was} to {now}" for role, was, now in event["processes"])
        return [f"note: moved to a node that is left: {moved}"]
    if name == "learner_lost" and event["freed"]:
        return [f"note: {_handed_out_again(event)}"]
    if name in LEFT_OUT:
        return [f"note: {LEFT_OUT[name]} of learners {', '.join(map(str, event['learners']))}"]
    if name == "learner_joined" and event["version"]:
        return [f"note: learner {event['learner']} joins at version {event['version']}"]
    if name == "straggler":
        return [f"note: rank {event['rank']} on {event['host']} is {_slow(event)}"]
    if name == "scaled":
        return [f"note: {scaled_in_words(event)}"]
    if name == "not_scaled":
        reason = event["report"] if "report" in event else event["request"]["found"]
        return [f"note: not done: {event['words']}: {reason}"]
    if name == "done" and event.get("note"):
        return [event["note"]]
    return []


def _made_again(event: Mapping[str, Any]) -> str:
    loaded = LOADED_FROM.get(event.get("loaded_from", ""), "the state of another rank")
    again = f"{event['steps_again']} steps are made again, from step {event['step']} on"
    return f"{again}: the new group of ranks began with {loaded}"


def scaled_in_words(event: Mapping[str, Any]) -> str:
    """`4 ranks train from step 120 on: ranks 2, 3 joined`."""
    moves = [
        f"{'rank' if len(event[name]) == 1 else 'ranks'} {', '.join(map(str, event[name]))} {name}"
        for name in ("joined", "left")
        if event[name]
    ]
    changes = f": {'; '.join(moves)}" if moves else ", as before"
    changes += f" (their node got {event['by']})" if event.get("by") in Signals.__members__ else ""
    size = event["ranks"]
    verb = "rank trains" if size == 1 else "ranks train"
    wanted = event.get("wanted", size)
    why = "; ".join(event.get("lost", ())) or "another rank was lost"
    short = f", not {wanted}, as {why}" if size != wanted else ""
    return f"{size} {verb} from step {event['from_step']} on{short}{changes}"


def anomalies_in(event: dict[str, Any]) -> list[tuple[int | None, str]]:
    """(rank, what) of an event that tells of something wrong; `None` where no one rank did it."""
    name = event["event"]
    if name == "restart":
        fault = "no sign of life" if _is_hang(event) else "failed"
        again = f"{fault}; all ranks started again from step {event['resumes_from']}"
        return [(event["first_rank"], again)]
    if name == "checkpoint_failed":
        return [(event["rank"], f"no checkpoint of step {event['step']}: {event['error']}")]
    if name == "bad_step":
        culprits = event.get("culprits", ())
        problems = [(rank, f"step {event['step']}: {text}") for rank, text in culprits]
        return [*problems] or [(event["rank"] or None, event["bad"])]
    if name == "witness":
        return [(None, f"follows the ranks: {text}") for text in event["found"]]
    if name == "digest_differs":
        again = f"step {event['step']} was made again, and has other {', '.join(event['now'])}"
        return [(None, f"{again} than before: one of the two computed wrongly")]
    if name == "audit":
        return [(event["wrong"], event["text"])]
    if name == "never_due":
        return [(None, event["text"])]
    if name == "worker_lost":
        return [(event["rank"], f"lost: {event['cause']}")]
    if name == "learner_lost":
        return [(None, _handed_out_again(event))] if event["freed"] else []
    if name == "straggler":
        return [(event["rank"], _slow(event))]
    if name == "done" and event.get("note"):
        return [(None, event["note"].removeprefix("note: "))]
    return []


def _handed_out_again(event: dict[str, Any]) -> str:
    """`learner 2 is gone at version 7: its 64 samples of steps 12 to 15 are handed out again`."""
    parts = ", ".join(
        f"{part['samples']} samples of steps {part['first']} to {part['last']}"
        for part in event["freed"]
    )
    learner = f"learner {event['learner']} is gone at version {event['version']}"
    return f"{learner}: what it had is handed out again: {parts}"


def evaluation_in_words(step: int, metrics: Mapping[str, Any], best: bool) -> str:
    """`after step 200: accuracy 0.9123 (best so far)`."""
    values = ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
    return f"after step {step}: {values or 'no metrics'}{' (best so far)' if best else ''}"


def not_in_the_run_folder(file: str, where: Mapping[str, str] | None, lost: str = "") -> str:
    """A sentence about a file that was not kept: the disk was full, or the file was removed."""
    if lost == REMOVED:
        return f"{file} has LOST {lost} while the job ran; what came since is there"
    if where is None:
        return f"{file} is LOST ({lost}): the disk is full, and nowhere else was room"
    copy = f"{where['path']} on {where['host']} has {where['holds']}"
    return f"{file} is NOT in the run folder, whose disk is full: {copy}"


def _whose(event: dict[str, Any]) -> str:
    """A prefix with the rank, except for the leader, which writes for all ranks."""
    return f"rank {event['rank']}: " if event["rank"] else ""


def _slow(event: dict[str, Any]) -> str:
    its, usual = 1e3 * event["seconds_per_step"], 1e3 * event["usual_seconds_per_step"]
    return f"slow in `{event['phase']}`: {its:.1f} ms per step, the others {usual:.1f} ms"


def _fault(event: dict[str, Any]) -> str:
    """The first line of a restart's report; for a hang, also the missing rank."""
    first, *others = event["report"].splitlines()
    return f"{first}: {next(iter(others), '')}" if _is_hang(event) else str(first)


def _is_hang(event: dict[str, Any]) -> bool:
    return event.get("fault_kind") == FaultKind.HANG
