"""Goodput where processes die, one is slow and a link is cut: `decoupled` beside restarted `ddp`.

    python benchmarks/goodput.py

Four simulated nodes with a rank each train `digits`; each step takes `--step-s` more, so that the
ranks share a processor as they would not share a node's. Three runs, of each of `--seeds` seeds,
which are those of the training and of the kills:

    undisturbed  ddp, nothing happens: what the others are divided by
    ddp          a rank is killed with a mean of `--mean-s` seconds between two kills, rank 0 is
                 five times slower, the link of one node is cut for a while; it starts again from
                 its checkpoint of every 10 steps; of the first seed alone, because it takes long
    decoupled    the same acts on its learners, which are started again one by one

Goodput is useful samples (each that is in the weights at the end, once) by the seconds from the
first step to the last, over the same of `undisturbed`. `loss_gap` is the held-out loss at the end
over that of `undisturbed`, less one, and `accuracy_gap` one less the accuracy over its. Needs root,
as simulated nodes do.
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

from harness import RECORDS, Comparison, finish_record, median_interval, say, start_record

from allranks.job.run_folder import read_events

RANKS, BATCH = 4, 256
BAR, LOSS_BAR = 0.88, 0.005
DECOUPLED = "decoupled:every=4,grace_s=1,rejoins=1000"


def main() -> None:
    """The runs, one after the other; the record has what each has said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--mean-s", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--strategy", default=DECOUPLED)
    parser.add_argument("--without-ddp", action="store_true", help="no restarted ddp: minutes less")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    given = parser.parse_args()
    settings = {name: value for name, value in vars(given).items() if name != "records"}
    record = start_record("goodput", settings)
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        runs = [found for seed in seeds for found in of_seed(given, Path(folder), seed)]
    record |= {"samples": runs, "bars": {"goodput": BAR, "loss_gap": LOSS_BAR}}
    record["rows"] = [{"what": f"seed {row['seed']}", **row} for row in runs]
    finish_record(record, comparisons(runs), given.records)


def of_seed(given: argparse.Namespace, folder: Path, seed: int) -> list[dict[str, Any]]:
    """The runs of a seed, each beside the undisturbed one."""
    acts = [("undisturbed", "ddp"), ("decoupled", given.strategy)]
    if seed == given.first_seed and not given.without_ddp:
        acts.append(("ddp", "ddp"))
    runs = []
    for name, strategy in acts:
        place = folder / f"{name}-{seed}"
        found = run(given, place, strategy, seed, disturbed=name != "undisturbed")
        runs.append({"seed": seed, "contender": name, **found})
        whole = runs[0]
        runs[-1] |= {
            "goodput": found["samples_per_s"] / whole["samples_per_s"],
            "loss_gap": found["loss"] / whole["loss"] - 1,
            "accuracy_gap": 1 - found["accuracy"] / whole["accuracy"],
        }
        say(json.dumps(runs[-1]))
    return runs


def comparisons(runs: list[dict[str, Any]]) -> list[Comparison]:
    """What the bars are about, over the seeds."""
    found = []
    for name in ("decoupled", "ddp"):
        own = [run for run in runs if run["contender"] == name]
        if not own:
            continue
        loss = median_interval([1 + run["loss_gap"] for run in own])
        right = median_interval([1 / (1 - run["accuracy_gap"]) for run in own])
        slower = median_interval([1 / run["goodput"] for run in own])
        rows = (("loss", loss, 1 + LOSS_BAR), ("accuracy", right, 1 + LOSS_BAR))
        for metric, interval, bar in (*rows, ("seconds", slower, 1 / BAR)):
            over = "undisturbed"
            found.append(Comparison("chaos", "ratio", metric, name, over, interval, bar))
    return found


def run(
    given: argparse.Namespace, folder: Path, strategy: str, seed: int, *, disturbed: bool
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
    command += ["--checkpoint-every", "10", "--max-restarts", "1000", "--seed", str(seed)]
    command += ["--witness", "off"]
    command += [word for act in acts for word in ("--inject", act)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    kills = _disturb(process, folder, given, first, seed) if disturbed else 0
    answer, _ = process.communicate()
    assert process.returncode == 0, f"{strategy} ended with {process.returncode}"
    summary = json.loads(answer.splitlines()[-1])
    seconds = _seconds(folder)
    return {
        "seconds": seconds,
        "samples_per_s": given.steps * BATCH / seconds,
        "kills": kills,
        "loss": summary["eval"]["loss"],
        "accuracy": summary["eval"]["accuracy"],
        "restarts": summary["restarts"],
    }


def _disturb(
    process: subprocess.Popen[str], folder: Path, given: argparse.Namespace, first: int, seed: int
) -> int:
    """Kill a rank now and then while the training lasts; returns how many were."""
    chance, kills = random.Random(seed), 0
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
