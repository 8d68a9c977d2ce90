"""Goodput where processes die, one is slow and a link is cut: `decoupled` beside restarted `ddp`.

    python benchmarks/goodput.py --seconds 25 --mean-s 6

Four simulated nodes with a rank each train `digits`; each step takes `--step-s` more, so that the
ranks share a processor as they would not share a node's. Three runs:

    undisturbed  ddp, nothing happens: what the others are divided by
    ddp          a rank is killed with a mean of `--mean-s` seconds between two kills, rank 0 is
                 five times slower, the link of one node is cut for a while; it starts again from
                 its checkpoint of every 10 steps
    decoupled    the same acts on its learners, which are started again one by one

Goodput is useful samples (each that is in the weights at the end, once) by the seconds from the
first step to the last, over the same of `undisturbed`. Needs root, as simulated nodes do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import RECORDS, finish_record, say, start_record

from allranks.job.run_folder import read_events

RANKS, BATCH = 4, 256
BAR, LOSS_BAR = 0.88, 0.005
DECOUPLED = "decoupled:every=4,quorum=2,grace_s=1,lr=1,momentum=0,rejoins=1000"


def main() -> None:
    """Three runs, one after the other; the record has what each has said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--mean-s", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default=DECOUPLED)
    given = parser.parse_args()
    record = start_record("goodput", vars(given))
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "undisturbed": run(given, Path(folder) / "undisturbed", "ddp", disturbed=False),
            "decoupled": run(given, Path(folder) / "decoupled", given.strategy, disturbed=True),
            "ddp": run(given, Path(folder) / "ddp", "ddp", disturbed=True),
        }
    whole = runs["undisturbed"]
    for name, found in runs.items():
        found["goodput"] = found["samples_per_s"] / whole["samples_per_s"]
        found["loss_gap"] = found["eval"].get("loss", 0.0) / whole["eval"]["loss"] - 1
        say(f"{name}: {json.dumps(found)}")
    record |= {"runs": runs, "bars": {"goodput": BAR, "loss_gap": LOSS_BAR}}
    finish_record(record, [], RECORDS)


def run(
    given: argparse.Namespace, folder: Path, strategy: str, *, disturbed: bool
) -> dict[str, Any]:
    """One training, with what happens to it."""
    first = int(strategy != "ddp")  # the process of learner 0
    slow = [
        f"slow@rank={first + rank},seconds={given.step_s * (5 if disturbed and not rank else 1)}"
        ",attempt=-1"
        for rank in range(RANKS)
    ]
    # a rank that was started again has another number of attempts, up to a bound: -1 is every one
    acts = [*slow, *([f"cut@node=2,step={given.steps // 4},seconds=3"] if disturbed else [])]
    command = [sys.executable, "-m", "allranks.cli.main", "train", "digits", "--json"]
    command += ["--ranks", str(RANKS), "--nodes", str(RANKS), "--place", "simulated:link=1gbit"]
    command += ["--strategy", strategy, "--steps", str(given.steps), "--run-dir", str(folder)]
    command += ["--checkpoint-every", "10", "--max-restarts", "1000"]
    command += [word for act in acts for word in ("--inject", act)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    kills = _disturb(process, folder, given, first) if disturbed else 0
    answer, _ = process.communicate()
    assert process.returncode == 0, f"{strategy} ended with {process.returncode}"
    summary = json.loads(answer.splitlines()[-1])
    seconds = _seconds(folder)
    return {
        "seconds": seconds,
        "samples_per_s": given.steps * BATCH / seconds,
        "kills": kills,
        "eval": summary["eval"],
        "restarts": summary["restarts"],
    }


def _disturb(
    process: subprocess.Popen[str], folder: Path, given: argparse.Namespace, first: int
) -> int:
    """Kill a rank now and then while the training lasts; returns how many were."""
    chance, kills = random.Random(given.seed), 0
    while process.poll() is None and not any(row["event"] == "training" for row in _events(folder)):
        time.sleep(0.1)
    due = time.monotonic() + chance.expovariate(1 / given.mean_s)
    while process.poll() is None:
        time.sleep(0.05)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + chance.expovariate(1 / given.mean_s)
        kills += _kill(folder / "logs" / f"rank-{first + chance.randrange(1, RANKS):03}.log")
    return kills


def _kill(log: Path) -> int:
    """Kill the process that writes this log; whether there was one."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == str(log):
                os.kill(int(entry.name), signal.SIGKILL)
                return 1
        except OSError:
            continue
    return 0


def _events(folder: Path) -> list[dict[str, Any]]:
    return list(read_events(folder)) if folder.is_dir() else []


def _seconds(folder: Path) -> float:
    """From the first step of the first attempt to the end of the training."""
    rows = _events(folder)
    begun = min(row["monotonic"] for row in rows if row["event"] == "training")
    ended = max(row["monotonic"] for row in rows if row["event"] == "done")
    return float(ended - begun)


if __name__ == "__main__":
    main()
