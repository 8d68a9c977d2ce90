"""What a person sees while a job runs: a few plain lines on stderr, and a result at the end."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from allranks.places.base import Plan
from allranks.record import rank_events_path, rank_log_path
from allranks.units import format_bytes, format_count, printable

EVERY_S = 1.0
MOST_AT_ONCE = 1 << 20
LONGEST_LINE = 1 << 16
MOST_OF_A_LINE = 1000  # in UTF-8 within what a writable pipe takes whole
EVENTS = ("leader", "job")


class Progress:
    """Follows the metrics and the events of a running job, and the output of its leader."""

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        self._read: dict[str, tuple[int, int]] = {}  # inode and offset
        self._last: dict[str, Any] | None = None
        self._shown: dict[str, Any] | None = None
        self._next = 0.0
        self._samples = 0  # since the last line that was shown

    def started(self, plan: Plan) -> None:
        """The run folder is there and the ranks are about to start."""
        run_dir = Path(plan.job.run_dir)
        self._files = {
            "log": rank_log_path(run_dir, 0),
            "job": run_dir / "events.jsonl",
            "leader": rank_events_path(run_dir, 0),
            "metrics": run_dir / "metrics.jsonl",
        }
        for name, path in self._files.items():  # of a run that goes on, only what is new
            if path.exists():
                self._read[name] = path.stat().st_ino, path.stat().st_size
        job = plan.job
        ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
        _say(f"{job.program} on {ranks}, {job.strategy}: {run_dir}")
        for note in plan.notes:
            _say(f"note: {note}")

    def tick(self, last: bool = False) -> None:
        """Show what is new, at most once a second; called all the while."""
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + EVERY_S
        for line in self._new_lines("log"):
            _say(f"rank 0: {line}")
        events = [event for name in EVENTS for event in self._new_rows(name)]
        for event in sorted(events, key=lambda event: float(event["monotonic"])):
            for told in in_words(event):
                _say(told)
        for row in self._new_rows("metrics"):
            self._last = row
            self._samples += row["samples"]
        if self._last is not None and self._last is not self._shown:
            self._show(self._last)

    def _show(self, row: dict[str, Any]) -> None:
        before, self._shown = self._shown, row
        line = f"epoch {row['epoch']:>3}  step {row['step']:>6}  loss {float(row['loss']):.4f}"
        if before is not None and row["monotonic"] > before["monotonic"]:
            rate = self._samples / (row["monotonic"] - before["monotonic"])
            line += f"  {format_count(rate)} samples/s"
        self._samples = 0
        _say(line)

    def _new_rows(self, name: str) -> list[dict[str, Any]]:
        """The new lines as JSON; what is none (a file written anew, read from its midst) is left."""
        rows = []
        for line in self._new_lines(name):
            with suppress(ValueError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]

    def _new_lines(self, name: str) -> list[str]:
        """The whole lines that were added to a file since the last call.

        A new attempt writes the metrics anew, without the steps that were lost: what is left of
        them is known, so reading goes on at its end. A line longer than `LONGEST_LINE` is told in
        pieces.
        """
        path = self._files.get(name)
        if path is None or not path.is_file():
            return []
        with open(path, "rb") as file:
            inode, size = os.fstat(file.fileno()).st_ino, file.seek(0, os.SEEK_END)
            known, start = self._read.get(name, (inode, 0))
            if inode != known:
                start = size
            file.seek(start)
            new = file.read(MOST_AT_ONCE)
        whole = new[: new.rfind(b"\n") + 1] or (new if len(new) > LONGEST_LINE else b"")
        self._read[name] = inode, start + len(whole)
        return whole.decode(errors="replace").splitlines()


def _say(line: str) -> None:
    """Write a line to standard error; drop it where nobody reads, or the supervisor would stand."""
    text = printable(line[:MOST_OF_A_LINE])
    with suppress(OSError, ValueError):
        _, writable, _ = select.select([], [sys.stderr], [], 0)
        if not writable:
            return
    click.echo(text, err=True)


def in_words(event: dict[str, Any]) -> list[str]:
    """What a person should hear of an event while the job runs; most events are for the record."""
    name = event["event"]
    if name == "resumed":
        told = f"goes on after step {event['step']}, from {event['path']}"
        changes = {**event["changes"], **event["differs"]}
        return [told, *(f"note: {n} was {was}, is {now}" for n, (was, now) in changes.items())]
    if name == "restart":
        first, *rest = event["report"].splitlines()
        if first.startswith("no sign of life"):
            first = f"{first}: {next(iter(rest), '')}"
        return [
            first,
            f"starting again from step {event['resumes_from']}: {event['lost_steps']} steps lost",
        ]
    if name == "checkpoint_failed":
        where = f"rank {event['rank']}: {event['error']}"
        return [f"note: no checkpoint of step {event['step']} ({where}); training goes on"]
    if name == "checkpoint_skipped":
        return [f"note: {event['path']} is damaged, and passed over: {event['problems'][0]}"]
    if name == "bad_step":
        return [f"note: {event['bad']}"]
    if name == "straggler":
        own, usual = 1e3 * event["seconds_per_step"], 1e3 * event["usual_seconds_per_step"]
        who = f"rank {event['rank']} on {event['host']} is slow in `{event['phase']}`"
        return [f"note: {who}: {own:.1f} ms per step, the others {usual:.1f} ms"]
    return []


def in_sentences(summary: dict[str, Any]) -> str:
    """The result of a job for a person."""
    lines = [f"{printable(name):<10} {float(value):.4f}" for name, value in summary["eval"].items()]
    if summary["train_loss"] is not None:
        lines.append(f"train loss {float(summary['train_loss']):.4f} over the last epoch")
    if summary["samples_per_s"] is not None:
        lines.append(
            f"{format_count(summary['samples_per_s'])} samples/s, {summary['steps']} steps"
        )
    if summary["sent_bytes"]["gradients"]:
        steps = summary["steps"] - (summary["resumed_from_step"] or 0)
        sent = summary["sent_bytes"]["gradients"] / max(steps, 1)
        lines.append(f"{format_bytes(sent)} sent by rank 0 in each step")
    if summary["user_randomness"]:
        names = ", ".join(summary["user_randomness"])
        lines.append(f"equal but for user randomness: {names} (--bitwise covers them)")
    if summary["user_buffers"]:
        names = ", ".join(summary["user_buffers"])
        lines.append(f"equal but for buffers that the model writes itself: {names}")
    if summary["restarts"]:
        times = "once" if summary["restarts"] == 1 else f"{summary['restarts']} times"
        lines.append(f"started again {times} after a fault")
    lines.append(f"weights    sha256 {summary['weights_sha256']}")
    lines.append(f"run folder {summary['run_dir']}")
    return "\n".join(printable(line) for line in lines)
