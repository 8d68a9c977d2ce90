"""What a person sees while a job runs: a few plain lines on stderr, and a result at the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from allranks.places.base import Plan
from allranks.record import rank_log_path
from allranks.units import format_bytes, format_count, printable

EVERY_S = 1.0


class Progress:
    """Follows the metrics of a running job and the output of its leader."""

    def __init__(self) -> None:
        self._metrics = Path()
        self._log = Path()
        self._read = {"metrics": 0, "log": 0}
        self._last: dict[str, Any] | None = None
        self._shown: dict[str, Any] | None = None
        self._next = 0.0
        self._samples = 0  # since the last line that was shown

    def started(self, plan: Plan) -> None:
        """The run folder is there and the ranks are about to start."""
        run_dir = Path(plan.job.run_dir)
        self._metrics, self._log = run_dir / "metrics.jsonl", rank_log_path(run_dir, 0)
        job = plan.job
        ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
        click.echo(f"{job.program} on {ranks}, {job.strategy}: {run_dir}", err=True)
        for note in plan.notes:
            click.echo(f"note: {note}", err=True)

    def tick(self, last: bool = False) -> None:
        """Show what is new, at most once a second; called all the while."""
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + EVERY_S
        for line in self._new_lines("log", self._log):
            click.echo(f"rank 0: {printable(line)}", err=True)
        for line in self._new_lines("metrics", self._metrics):
            self._last = json.loads(line)
            self._samples += self._last["samples"]
        if self._last is not None and self._last is not self._shown:
            self._show(self._last)

    def _show(self, row: dict[str, Any]) -> None:
        before, self._shown = self._shown, row
        line = f"epoch {row['epoch']:>3}  step {row['step']:>6}  loss {float(row['loss']):.4f}"
        if before is not None and row["monotonic"] > before["monotonic"]:
            rate = self._samples / (row["monotonic"] - before["monotonic"])
            line += f"  {format_count(rate)} samples/s"
        self._samples = 0
        click.echo(line, err=True)

    def _new_lines(self, name: str, path: Path) -> list[str]:
        """The whole lines that were added to a file since the last call."""
        if not path.is_file():
            return []
        with open(path, "rb") as file:
            file.seek(self._read[name])
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[name] += len(whole)
        return whole.decode(errors="replace").splitlines()


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
        sent = summary["sent_bytes"]["gradients"] / max(summary["steps"], 1)
        lines.append(f"{format_bytes(sent)} sent by rank 0 in each step")
    if summary["user_randomness"]:
        names = ", ".join(summary["user_randomness"])
        lines.append(f"equal but for user randomness: {names} (--bitwise covers them)")
    if summary["user_buffers"]:
        names = ", ".join(summary["user_buffers"])
        lines.append(f"equal but for buffers that the model writes itself: {names}")
    lines.append(f"weights    sha256 {summary['weights_sha256']}")
    lines.append(f"run folder {summary['run_dir']}")
    return "\n".join(lines)
