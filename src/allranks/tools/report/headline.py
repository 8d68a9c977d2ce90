"""What stands on top of a run: what it was, how it ended, and its figures."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.job.units import format_bytes
from allranks.tools.report.curves import evaluations
from allranks.tools.report.numbers import UNKNOWN, counted, format_number, format_seconds
from allranks.tools.report.outcome import KILLED, RUNNING
from allranks.tools.report.records import Run
from allranks.tools.report.tables import sent_per_step, steps_of
from allranks.tools.report.timeline import Timeline

STATES = {
    "done": "done",
    "stopped": "stopped after a checkpoint",
    "failed": "failed",
    "interrupted": "interrupted",
    RUNNING: "running",
    KILLED: "killed: its supervisor ended without a word",
}
GOOD = ("done", "stopped")
BAD = ("failed", KILLED)


@dataclass(frozen=True)
class Figure:
    """One number with what it is; `note` says more of it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Headline:
    """A run in a few words and figures; `tone` is `good`, `bad` or `open`."""

    title: str
    words: tuple[str, ...]
    state: str
    tone: str
    figures: tuple[Figure, ...]
    weights: str


def headline_of(run: Run, timeline: Timeline) -> Headline:
    """The top of a page, or of one run among several."""
    state = run.outcome.state
    tone = "good" if state in GOOD else "bad" if state in BAD else "open"
    return Headline(
        str(run.job["program"]),
        tuple(_words(run)),
        STATES[state],
        tone,
        tuple(_figures(run, timeline)),
        str(run.summary.get("weights_sha256") or ""),
    )


def _words(run: Run) -> list[str]:
    job = run.job
    told = [counted(run.ranks, "rank")]
    nodes = int(job.get("nodes", 1))
    if nodes > 1:
        told[0] += f" on {nodes:,} nodes"
    told += [str(job[name]) for name in ("strategy", "place", "device", "precision") if name in job]
    if job.get("bitwise"):
        told.append("bitwise")
    return told


def _figures(run: Run, timeline: Timeline) -> list[Figure]:
    found = []
    for name, series in evaluations(run).items():
        at = f"after step {series.xs[-1]:,.0f}"
        found.append(Figure(f"{name}, evaluated", format_number(series.ys[-1]), at))
    if "train_loss" in run.summary and run.summary["train_loss"] is not None:
        loss = format_number(float(run.summary["train_loss"]))
        found.append(Figure("training loss", loss, "mean of the last epoch"))
    elif run.rows:
        found.append(Figure("training loss", format_number(run.rows.loss[-1]), "last step"))
    speed = run.summary.get("samples_per_s")
    if speed:
        found.append(Figure("samples/s", f"{speed:,.0f}", "of all ranks, since the last start"))
    if not run.is_command:
        steps = steps_of(run)
        is_known = steps != UNKNOWN
        found.append(Figure("steps", steps if is_known else "–", "" if is_known else UNKNOWN))
    note = "so far" if run.outcome.state == RUNNING else "with start and end"
    found.append(Figure("time", format_seconds(timeline.seconds), note))
    restarts = len(run.of("restart"))
    lost = [int(event["lost_steps"]) for event in run.of("restart") if "lost_steps" in event]
    note = f"{counted(sum(lost), 'step')} made again" if lost else ""
    found.append(Figure("restarts", str(restarts), note))
    for event in run.of("proof")[-1:]:
        figure = "proved" if event["proved"] else "not proved"
        found.append(Figure("equal to one process", figure, str(event["why"])))
    sent = sent_per_step(run)
    if sent:
        found.append(Figure("sent in a step", sent, _promised(run)))
    return found


def _promised(run: Run) -> str:
    promised = run.summary.get("card_bytes_per_step")
    return f"by rank 0; its card says {format_bytes(promised)}" if promised else "by rank 0"


def missing(run: Run) -> list[str]:
    """What a page of this run cannot show, and why: each in a sentence."""
    told = []
    if run.is_command:
        told.append(
            "A script that `allranks run` starts writes no steps, metrics or phases into the run "
            "folder: only when it began, and how each rank left."
        )
        return told
    if not run.rows:
        told.append("No step was written down: there are no curves.")
    if run.rows and not evaluations(run):
        told.append("No evaluation was made so far.")
    seconds = [
        rank for rank in range(run.ranks) if any("seconds" in e for e in run.of("done", rank))
    ]
    if len(seconds) < run.ranks:
        told.append(
            "The seconds of each phase are written by a rank when it is done; "
            f"{len(seconds)} of {counted(run.ranks, 'rank')} did."
        )
    if not run.placements:
        told.append("No rank has said what it holds, which it does after its first update.")
    return told
