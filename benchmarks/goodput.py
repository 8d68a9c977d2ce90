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

With `--elastic` there are four ranks of `ddp --elastic 1:4 --share auto --bitwise` on this machine.
Each sleeps so long for every sample that a step with even shares takes `--step-s` more: fewer ranks
need longer for a step. A batch has 32 shards, so that shares can be as the speeds are. The runs are

    undisturbed  nothing happens
    kills        any rank is killed every `--mean-s` seconds, half of that or half more; after each
                 `allranks scale --ranks 4`
    slow         rank 0 is five times slower, and ranks are killed as well
    nodes        nothing happens, on four simulated nodes with a rank each
    cut          the same, and the link of one node is cut for `--cut-s` seconds

Time counts from step 20 on, when `auto` has settled (`share.py` measures how soon that is).
`over_ideal` is the goodput over that of all ranks at their speeds all the time: 1, of `slow` 0.8,
of `cut` over that of `nodes`. So what a lost rank would have computed until another one has joined
counts as lost. A table says where the time went, in seconds:

    kills_s   the others stood, from the step before a loss to the one after it, less a step
    joins_s   they stood for a new rank, less a step
    short_s   what the missing ranks would have computed meanwhile, as time of the whole job
    other_s   all else: slower steps, a cut link, shares that are not as the speeds yet

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

from allranks.job.run_folder import read_events, read_rows

RANKS, BATCH = 4, 256
BAR, ELASTIC_BAR, LOSS_BAR = 0.88, 0.97, 0.005
SLOW, SETTLED, SHARDS = 5, 20, 32
IDEAL = {"kills": 1.0, "slow": (RANKS - 1 + 1 / SLOW) / RANKS, "cut": 1.0}
QUIET = {"undisturbed", "nodes"}
DECOUPLED = "decoupled:every=4,grace_s=1,rejoins=1000"


def main() -> None:
    """The runs, one after the other; the record has what each has said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--mean-s", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--cut-s", type=float, default=1.0, help="of a link, with --elastic")
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
        acts = [(name, "ddp") for name in ("undisturbed", "kills", "slow", "nodes", "cut")]
    elif seed == given.first_seed and not given.without_ddp:
        acts.append(("ddp", "ddp"))
    runs = []
    for name, strategy in acts:
        place = folder / f"{name}-{seed}"
        found = run(given, place, strategy, seed, name)
        runs.append({"seed": seed, "contender": name, **found})
        whole = next(row for row in runs if name != "cut" or row["contender"] == "nodes")
        runs[-1] |= {
            "goodput": found["samples_per_s"] / whole["samples_per_s"],
            "loss_gap": found["loss"] / whole["loss"] - 1,
            "accuracy_gap": 1 - found["accuracy"] / whole["accuracy"],
        }
        if name in IDEAL:
            assert found["weights_sha256"] == whole["weights_sha256"], f"seed {seed}, {name}"
            runs[-1]["over_ideal"] = runs[-1]["goodput"] / IDEAL[name]
            runs[-1] |= lost_time(place, name, found["seconds"], whole["seconds"], given.steps)
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
    disturbed, first = name not in QUIET, int(strategy != "ddp")  # the process of learner 0
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
        command += ["--set", f"shards={SHARDS}"]
        command += ["--nodes", str(RANKS), "--place", "simulated"] * (name in ("nodes", "cut"))
        cut = f"cut@node=2,step={given.steps // 2},seconds={given.cut_s}"
        acts += [cut] if name == "cut" else []
    else:
        command += ["--nodes", str(RANKS), "--place", "simulated:link=1gbit"]
        command += ["--checkpoint-every", "10", "--max-restarts", "1000"]
    command += ["--strategy", strategy, "--steps", str(given.steps), "--run-dir", str(folder)]
    command += ["--ranks", str(RANKS), "--seed", str(seed), "--witness", "off"]
    command += [word for act in acts for word in ("--inject", act)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    has_kills = disturbed and name != "cut"
    kills = _disturb(process, folder, given, first, seed) if has_kills else 0
    answer, _ = process.communicate()
    assert process.returncode == 0, f"{strategy} ended with {process.returncode}"
    summary = json.loads(answer.splitlines()[-1])
    counted = given.steps - SETTLED * given.elastic
    seconds = _seconds(folder, given.steps - counted)
    return {
        "seconds": seconds,
        "samples_per_s": counted * BATCH / seconds,
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

    def pause_s() -> float:
        if given.elastic:  # runs are short: none without a kill
            return given.mean_s * chance.uniform(0.5, 1.5)
        return chance.expovariate(1 / given.mean_s)

    due = time.monotonic() + pause_s()
    while process.poll() is None:
        time.sleep(0.05)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + pause_s()
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


def _seconds(folder: Path, after: int) -> float:
    """From the first step of the first attempt, or so many steps later, to the end."""
    rows = _events(folder)
    begun = min(row["monotonic"] for row in rows if row["event"] == "training")
    if after:
        begun = _end_of_step(folder, after)
    ended = max(row["monotonic"] for row in rows if row["event"] == "done")
    return float(ended - begun)


def _end_of_step(folder: Path, step: int) -> float:
    """When this step, counted from 1, had ended, on the monotonic clock."""
    rows = read_rows(folder / "metrics.jsonl")
    return next(float(row["monotonic"]) for row in rows if row["step"] == step - 1)


def lost_time(
    folder: Path, name: str, seconds: float, undisturbed_s: float, steps: int
) -> dict[str, float]:
    """Where the time of an elastic run went, beyond that of all ranks at their speeds."""
    speeds = [1 / SLOW if name == "slow" and not rank else 1.0 for rank in range(RANKS)]
    ideal_s, since = undisturbed_s / IDEAL[name], _end_of_step(folder, SETTLED)
    step_s, size, stood = ideal_s / (steps - SETTLED), 1.0, {"kills_s": 0.0, "joins_s": 0.0}
    short_s = 0.0
    groups = [row for row in _events(folder) if row["event"] == "group"]
    for row in groups:
        short_s += (1 - size) * (row["monotonic"] - since)
        since, size = row["monotonic"], sum(speeds[r] for r in row["members"]) / sum(speeds)
        stood["joins_s" if row["joined"] else "kills_s"] += row["stood_s"] - step_s
    short_s += (1 - size) * (_end_of_step(folder, steps) - since)
    other_s = seconds - ideal_s - short_s - sum(stood.values())
    found = {"ideal_s": ideal_s, **stood, "short_s": short_s, "other_s": other_s}
    say(f"  {name}: " + "  ".join(f"{key} {value:.2f}" for key, value in found.items()))
    return found


if __name__ == "__main__":
    main()
