"""Goodput where processes die, one is slow and a link is cut: `decoupled` beside restarted `ddp`.

    python benchmarks/goodput.py
    python benchmarks/goodput.py --elastic

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

With `--elastic` there are four ranks of `ddp --elastic 1:4 --share auto --bitwise` on this machine,
without nodes or links. Each sleeps so long for every sample that a step with even shares takes
`--step-s` more: fewer ranks need longer for a step. The runs are

    undisturbed  nothing happens
    kills        ranks are killed as above, any of them; after each `allranks scale --ranks 4`
    slow         rank 0 is five times slower, and ranks are killed as well

`over_ideal` is the goodput of `slow` over the sum of the speeds, which is 0.8 of four equal ranks.
The weights must be those of `undisturbed`, bit by bit.
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
BAR, ELASTIC_BAR, LOSS_BAR = 0.88, 0.97, 0.005
SLOW, IDEAL = 5, {"kills": 1.0, "slow": (RANKS - 1 + 1 / 5) / RANKS}
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
    parser.add_argument(
        "--elastic", action="store_true", help="ranks on one machine, that come back"
    )
    parser.add_argument("--without-ddp", action="store_true", help="no restarted ddp: minutes less")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    given = parser.parse_args()
    settings = {name: value for name, value in vars(given).items() if name != "records"}
    record = start_record("goodput_elastic" if given.elastic else "goodput", settings)
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        runs = [found for seed in seeds for found in of_seed(given, Path(folder), seed)]
    bar = ELASTIC_BAR if given.elastic else BAR
    record |= {"samples": runs, "bars": {"goodput": bar, "loss_gap": LOSS_BAR}}
    record["rows"] = [{"what": f"seed {row['seed']}", **row} for row in runs]
    finish_record(record, (of_elastic if given.elastic else comparisons)(runs), given.records)


def of_seed(given: argparse.Namespace, folder: Path, seed: int) -> list[dict[str, Any]]:
    """The runs of a seed, each beside the undisturbed one."""
    acts = [("undisturbed", "ddp"), ("decoupled", given.strategy)]
    if given.elastic:
        acts = [(name, "ddp") for name in ("undisturbed", *IDEAL)]
    elif seed == given.first_seed and not given.without_ddp:
        acts.append(("ddp", "ddp"))
    runs = []
    for name, strategy in acts:
        place = folder / f"{name}-{seed}"
        found = run(given, place, strategy, seed, name)
        runs.append({"seed": seed, "contender": name, **found})
        whole = runs[0]
        runs[-1] |= {
            "goodput": found["samples_per_s"] / whole["samples_per_s"],
            "loss_gap": found["loss"] / whole["loss"] - 1,
            "accuracy_gap": 1 - found["accuracy"] / whole["accuracy"],
        }
        if name in IDEAL:
            assert found["weights_sha256"] == whole["weights_sha256"], f"seed {seed}, {name}"
            runs[-1]["over_ideal"] = runs[-1]["goodput"] / IDEAL[name]
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


def of_elastic(runs: list[dict[str, Any]]) -> list[Comparison]:
    """The seconds of each elastic run over those of the ideal."""
    return [
        Comparison("elastic", "ratio", "seconds", name, "ideal", median_interval(times), 1 / bar)
        for name, bar in dict.fromkeys(IDEAL, ELASTIC_BAR).items()
        if (times := [1 / run["over_ideal"] for run in runs if run["contender"] == name])
    ]


def run(
    given: argparse.Namespace, folder: Path, strategy: str, seed: int, name: str
) -> dict[str, Any]:
    """One training, with what happens to it."""
    disturbed, first = name != "undisturbed", int(strategy != "ddp")  # the process of learner 0
    slow = [
        f"slow@rank={first + rank},seconds={given.step_s * (5 if disturbed and not rank else 1)}"
        ",attempt=-1"
        for rank in range(RANKS)
    ]
    # a rank that was started again has another number of attempts, up to a bound: -1 is every one
    acts = [*slow, *([f"cut@node=2,step={given.steps // 4},seconds=3"] if disturbed else [])]
    command = [sys.executable, "-m", "allranks.cli.main", "train", "digits", "--json"]
    if given.elastic:
        per_sample = given.step_s * RANKS / BATCH
        acts = [f"slow@rank={rank},per_sample={per_sample},attempt=-1" for rank in range(RANKS)]
        more = per_sample * (SLOW - 1)
        acts += [f"slow@rank=0,per_sample={more},attempt=-1"] if name == "slow" else []
        command += ["--elastic", f"1:{RANKS}", "--share", "auto", "--bitwise", "--threads", "1"]
    else:
        command += ["--nodes", str(RANKS), "--place", "simulated:link=1gbit"]
        command += ["--checkpoint-every", "10", "--max-restarts", "1000"]
    command += ["--strategy", strategy, "--steps", str(given.steps), "--run-dir", str(folder)]
    command += ["--ranks", str(RANKS), "--seed", str(seed), "--witness", "off"]
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
        "steps_again": summary.get("steps_again"),
        "weights_sha256": summary["weights_sha256"],
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
        victim = first + chance.randrange(0 if given.elastic else 1, RANKS)
        kills += _kill(folder / "logs" / f"rank-{victim:03}.log")
        if given.elastic:
            words = ["scale", str(folder), "--ranks", str(RANKS)]
            subprocess.run([sys.executable, "-m", "allranks.cli.main", *words], capture_output=True)
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
