"""Trainings by each method, for `quality.py` and `slow_link.py`: losses after equal samples.

Each is a command of its own, on 4 ranks of this machine: the loss of a method does not follow from
where its ranks are.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import say

HERE = Path(__file__).resolve().parent
RANKS = 4
STEPS = 320
EVALUATIONS = 10
METHODS = (
    *("ddp", "ddp:reduce=bf16", "ddp:late=1"),
    *("local-sgd:every=4", "local-sgd:every=16", "diloco:every=50", "sparse-loco:every=30"),
)


@dataclass(frozen=True)
class Curves:
    """Of each method the evaluated losses at the same steps."""

    steps: list[int]
    losses: dict[str, list[float]]

    def final(self, method: str) -> float:
        return self.losses[method][-1]

    def steps_to(self, method: str, loss: float) -> float | None:
        """Steps until the loss is that low, on a line between evaluations; `None`: it is not."""
        before = (0, self.losses[method][0])
        for step, now in zip(self.steps, self.losses[method], strict=True):
            if now <= loss:
                height = before[1] - now
                part = 1.0 if height <= 0 else (before[1] - loss) / height
                return before[0] + part * (step - before[0])
            before = (step, now)
        return None


def trained(model: str, task: str, methods: tuple[str, ...] = METHODS) -> Curves:
    """One training by each method, from one seed."""
    runs = {method: losses_of(task, method) for method in methods}
    steps = [step for step, _ in runs[methods[0]]]
    losses = {method: [metrics["loss"] for _, metrics in run] for method, run in runs.items()}
    say(
        f"{model}, loss at the end: " + "  ".join(f"{m} {own[-1]:.4f}" for m, own in losses.items())
    )
    return Curves(steps, losses)


def curves_in(record: Path, task: str) -> Curves:
    """Those of the first seed in a record of `quality.py`."""
    samples = json.loads(record.read_text())["samples"]
    (ends,) = [sample["ends"] for sample in samples if sample["task"] == task]
    runs = {method: own[0]["losses"] for method, own in ends.items()}
    steps = [step for step, _ in next(iter(runs.values()))]
    return Curves(steps, {method: [loss for _, loss in run] for method, run in runs.items()})


@dataclass(frozen=True)
class Ran:
    """One training: (step, metrics) of every evaluation, and what the busiest rank sent a step."""

    evaluations: list[tuple[int, dict[str, float]]]
    sent_bytes: float


def losses_of(
    task: str, method: str, seed: int = 0, steps: int = STEPS, settings: tuple[str, ...] = ()
) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of every evaluation of one training on 4 ranks."""
    return ran(task, method, seed, steps, settings).evaluations


def ran(
    task: str, method: str, seed: int = 0, steps: int = STEPS, settings: tuple[str, ...] = ()
) -> Ran:
    """One training on 4 ranks."""
    with tempfile.TemporaryDirectory(prefix="benchmark-trainings-") as folder:
        run = Path(folder) / "run"
        program = task if task.islower() else f"{HERE / 'sending_tasks.py'}:{task}"
        command = [sys.executable, "-m", "allranks.cli.main", "train", program, "--json"]
        command += ["--ranks", str(RANKS), "--steps", str(steps), "--strategy", method]
        command += ["--seed", str(seed), "--eval-every", str(steps // EVALUATIONS)]
        command += ["--run-dir", str(run), "--witness", "off"]
        command += [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{task} by {method}: {done.stderr[-2000:]}")
        lines = (run / "events-0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    summary = json.loads(done.stdout.splitlines()[-1])
    found = [(row["step"], row["metrics"]) for row in rows if row["event"] == "evaluated"]
    return Ran(found, summary["sent_bytes"]["gradients"] / steps)
