"""What a person sees while a job runs, as plain lines on stderr; and its result at the end.

On a terminal `display` takes the place of the lines: `progress_here` gives what suits.
"""

from __future__ import annotations

import os
import select
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import click

from allranks.catalog import load
from allranks.cli.display.following import NOT_SEEN, FollowedJob, Follower, not_in_the_run_folder
from allranks.errors import printable
from allranks.job.run_folder import REMOVED
from allranks.job.units import format_bytes, format_count
from allranks.launcher.plan import LaunchPlan

# --- say -----------------------------------------------------------------------------------------
# What a verb tells a person, on standard error.


def say(text: str) -> None:
    """Write the lines of `text` to standard error; a reader that is gone ends nothing."""
    with suppress(OSError, ValueError):
        for line in text.splitlines():
            click.echo(printable(line), err=True)


MOST_OF_A_LINE = 1000  # in UTF-8 within what a writable pipe takes whole
DISPLAY = "allranks.cli.display.live:open_display"
DUMB_TERMINALS = ("", "dumb", "unknown")


class ProgressDisplay(ABC):
    """Shows what is new of a running job every `every_s` seconds; no method blocks on its reader.

    It begins once the run folder is there.
    """

    every_s: float

    def __init__(self) -> None:
        self._follower: Follower | None = None
        self._next = 0.0

    @abstractmethod
    def started(self, plan: LaunchPlan) -> None:
        """The run folder is there and the ranks are about to start."""

    @abstractmethod
    def _show(self, follower: Follower) -> None:
        """Show what is new."""

    def tick(self) -> None:
        """Show what is new, if it is time; called all the while."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self.every_s
            self._show_if_started()

    def close(self) -> None:
        """No rank is left: show what is new still. Also called where nothing was started."""
        self._show_if_started()

    def _show_if_started(self) -> None:
        if self._follower is not None:
            self._show(self._follower)


def progress_here() -> ProgressDisplay:
    """A live display where standard error is a terminal that can be drawn on, else plain lines."""
    if sys.stderr.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS:
        with suppress(OSError):  # a terminal that cannot be opened once more
            display: ProgressDisplay = load(DISPLAY)(sys.stderr)
            return display
    return Lines()


def opening_words(plan: LaunchPlan) -> list[str]:
    """The lines to print before the first step."""
    job = plan.job
    ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
    first = f"{job.program} on {ranks}, {job.strategy}: {job.run_dir}"
    return [first, *(f"note: {note}" for note in plan.notes)]


class Lines(ProgressDisplay):
    """A line for each thing that happens, and one a second for the newest step."""

    every_s = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, Any] | None = None

    def started(self, plan: LaunchPlan) -> None:
        self._follower = Follower(plan)
        for line in opening_words(plan):
            _say_at_once(line)

    def _show(self, follower: Follower) -> None:
        for line in follower.look():
            _say_at_once(line)
        state = follower.state
        if state.row is not None and state.row is not self._shown:
            self._shown = state.row
            _say_at_once(step_in_words(state, state.row))


def step_in_words(state: FollowedJob, row: dict[str, Any]) -> str:
    """`epoch   3  step    119  loss 0.0075  18,324 samples/s`: 119 is done, in epoch 3; from 1."""
    line = f"epoch {row['epoch'] + 1:>3}  step {row['step'] + 1:>6}  loss {float(row['loss']):.4f}"
    if state.samples_per_s is not None:
        line += f"  {format_count(state.samples_per_s)} samples/s"
    return line


def _say_at_once(line: str) -> None:
    """Print a line; drop it if stderr is not writable, which would block the supervisor."""
    with suppress(OSError, ValueError):
        _, writable, _ = select.select([], [sys.stderr], [], 0)
        if not writable:
            return
    say(line[:MOST_OF_A_LINE])


def follows_ranks(summary: dict[str, Any]) -> list[str]:
    """What makes a result follow the number of ranks, a sentence each; nothing if it does not."""
    causes: list[str] = list(summary.get("witness", {}).get("found", ()))
    buffers = [n for n in summary["user_buffers"] if not any(repr(n) in text for text in causes)]
    if buffers:
        kinds = "buffers that the model writes itself, and what is computed from them"
        causes.append(f"{kinds}: {', '.join(buffers)}")
    if summary["user_randomness"] and not summary.get("bitwise"):
        names = ", ".join(summary["user_randomness"])
        causes.append(f"layers that draw for a micro-batch: {names} (--bitwise covers them)")
    return causes


def not_kept_here(summary: dict[str, Any]) -> list[str]:
    """What is not in the run folder because its disk was full, a sentence each."""
    elsewhere, lost = summary.get("kept_elsewhere", {}), summary.get("not_kept", {})
    texts = [not_in_the_run_folder(name, where) for name, where in elsewhere.items()]
    texts += [not_in_the_run_folder(name, None, part) for name, part in lost.items()]
    logs = summary.get("incomplete_logs", ())
    return [*texts, *(f"{name} lacks its end, as the disk is full" for name in logs)]


def lost_in(summary: dict[str, Any]) -> str:
    """The error of a job that came to its end and could not keep what it computed."""
    lost = summary["not_kept"]
    names, removed = ", ".join(lost), set(lost.values()) == {REMOVED}
    why = "" if removed else "its disk is full, and "
    fate = "was removed while it ran" if removed else "could not be kept"
    return f"the training came to its end, but {why}{names} {fate}"


def _regrouped(summary: dict[str, Any]) -> str:
    """`3 ranks at the end: they formed another group once, and 1 step was made again`."""
    ranks, groups, again = (summary[name] for name in ("world_size", "groups", "steps_again"))
    size = "1 rank" if ranks == 1 else f"{ranks} ranks"
    times = "once" if groups == 1 else f"{groups} times"
    steps = "1 step was" if again == 1 else f"{again or 'no'} steps were"
    return f"{size} at the end: ranks formed another group {times}, and {steps} made again"


def in_sentences(summary: dict[str, Any]) -> str:
    """The result of a job for a person."""
    lines = [f"{printable(name):<10} {float(value):.4f}" for name, value in summary["eval"].items()]
    if summary["train_loss"] is not None:
        lines.append(f"train loss {float(summary['train_loss']):.4f} over the last epoch")
    if summary["samples_per_s"] is not None:
        lines.append(
            f"{format_count(summary['samples_per_s'])} samples/s, {summary['steps']} steps"
        )
    elif summary["resumed_from_step"] is not None:
        done = summary["resumed_from_step"]
        lines.append(
            f"nothing was trained: the run had ended after step {done} (--steps says more)"
        )
    if summary["sent_bytes"] and summary["sent_bytes"]["gradients"]:
        steps = summary["steps"] - (summary["resumed_from_step"] or 0)
        per_step = summary["sent_bytes"]["gradients"] / max(steps, 1)
        lines.append(f"{format_bytes(per_step)} sent by rank 0 in each step")
    lines += [f"note       {note}" for note in summary.get("model_notes", ())]
    lines += [f"NOT equal on other numbers of ranks: {text}" for text in follows_ranks(summary)]
    if (proof := summary.get("proof")) is not None:
        lines.append(f"{'proved' if proof['proved'] else 'NOT proved'}: {proof['why']}")
    if looks := summary.get("witness", {}).get("looks"):
        batches = "one micro-batch" if looks == 1 else f"{looks} micro-batches"
        lines.append(f"the witness computed {batches} again")
    unseen = summary.get("witness", {}).get("unseen", ())
    lines += [f"note       {NOT_SEEN}: {text}" for text in unseen]
    if summary.get("groups"):
        lines.append(_regrouped(summary))
    if summary["restarts"]:
        times = "once" if summary["restarts"] == 1 else f"{summary['restarts']} times"
        lines.append(f"started again {times} after a fault")
        if samples := summary.get("micro_batch"):
            lines.append(f"micro-batch {samples}: a pass of so many samples fits on every rank")
    lines.append(f"weights    sha256 {summary['weights_sha256']}")
    lines += [f"note       {text}" for text in not_kept_here(summary)]
    lines.append(f"run folder {summary['run_dir']}")
    return "\n".join(printable(line) for line in lines)
