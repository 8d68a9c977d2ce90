"""Parameter servers whose processes and nodes are killed at random: does each batch count once?

    python benchmarks/kills_of_servers.py            (no speed; needs root, as simulated nodes do)

A training of `digits` in float64 under `ps`, in step, with checkpoints of every 5 steps and an
evaluator. Of each kind `--kills` are killed by SIGKILL, at moments and of ones that are drawn:

    worker, server, evaluator    one run each of 3 workers and 2 servers on this machine
    node                         runs of 5 simulated nodes, of which 2 have a server each and no
                                 worker: of a run every node is killed but the first one

What must hold: the run ends well, after the steps that were asked for; metrics.jsonl has each step
once; the weights at the end are within 1e-10 of those of one process, so each sample counts once
in each epoch; and for each kill an event says who is lost. The exit code is 1 where one does not.
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

import numpy as np
from harness import RECORDS, finish_record, say, start_record
from safetensors.numpy import load_file

from allranks.job.run_folder import read_events

RANKS_OF = {"worker": (3, 4, 5), "server": (1, 2), "evaluator": (6,)}
KINDS = (*RANKS_OF, "node")
WORKERS, NODES, BREAKABLE = 3, 5, (1, 2, 3, 4)
STEPS_BEFORE, STEPS_OF_A_KILL, STEP_S = 40, 30, 0.04
NEAR = 1e-10


def main() -> None:
    """The runs of each kind, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    given = parser.parse_args()
    settings = {name: value for name, value in vars(given).items() if name != "records"}
    record = start_record("kills_of_servers", settings)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.kinds:
            left, chance = given.kills, random.Random(f"{kind} {given.seed}")
            while left > 0:
                place = Path(folder, f"{kind}-{left}")
                if kind == "node":
                    found = nodes_killed(place, min(left, len(BREAKABLE)), chance)
                else:
                    found = processes_killed(place, kind, left, chance)
                runs.append({"kind": kind, **found})
                say(json.dumps(runs[-1]))
                left -= found["kills"]
    record |= {"samples": runs, "rows": [row_of(kind, runs) for kind in given.kinds]}
    finish_record(record, [], given.records)
    sys.exit(not all(run["holds"] for run in runs))


def row_of(kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs of a kind together."""
    own = [run for run in runs if run["kind"] == kind]
    summed = {name: sum(run[name] for run in own) for name in ("kills", "said", "restarts")}
    furthest = max(run["furthest_from_one_process"] for run in own)
    held = sum(run["holds"] for run in own)
    return {
        "what": f"a {kind} is killed",
        "runs": len(own),
        "runs_that_hold": held,
        **summed,
        "furthest_from_one_process": furthest,
    }


def processes_killed(folder: Path, kind: str, kills: int, chance: random.Random) -> dict[str, Any]:
    """One run on this machine, in which processes of a role are killed from outside."""
    steps = STEPS_BEFORE + kills * STEPS_OF_A_KILL
    command = [*training(folder, steps, "servers=2"), *slowed(RANKS_OF["worker"])]
    killed = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launch:
        while launch.poll() is None and killed < kills:
            if not (folder / "metrics.jsonl").exists():
                time.sleep(0.05)
                continue
            time.sleep(chance.uniform(0.3, 1.2))
            killed += kill(folder, chance.choice(RANKS_OF[kind]))
        out, _ = launch.communicate()
    return judged(folder, steps, launch.returncode, out, killed, lost_ranks(folder, kind))


def nodes_killed(folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """One run on simulated nodes, of which some are gone one after the other."""
    steps = STEPS_BEFORE + kills * STEPS_OF_A_KILL
    command = training(folder, steps, "servers=2,servers_on=own")
    command += ["--nodes", str(NODES), "--place", "simulated:link=1gbit", "--node-timeout", "8"]
    nodes = chance.sample(BREAKABLE, kills)
    for number, node in enumerate(nodes):
        step = number * STEPS_OF_A_KILL + chance.randrange(5, STEPS_OF_A_KILL)
        command += ["--inject", f"kill-node@node={node},step={step}"]
    command += slowed(RANKS_OF["worker"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launch:
        out, _ = launch.communicate()
    events = read_events(folder)
    restarts = json.dumps([event for event in events if event["event"] == "restart"])
    hosts = {event["host"] for event in events if event["event"] == "worker_lost"}
    named = {n for n in nodes if f"node node{n} is lost" in restarts or f"node{n}" in hosts}
    return {"nodes": nodes, **judged(folder, steps, launch.returncode, out, kills, len(named))}


def training(folder: Path, steps: int, options: str) -> list[str]:
    """The command of a run, without what happens to it."""
    strategy = f"ps:{options},bound=1000,evaluator=yes,rejoins=1000,patience_s=120"
    return [
        *(sys.executable, "-m", "allranks.cli.main", "train", "digits", "--json"),
        *("--strategy", strategy, "--ranks", str(WORKERS), "--steps", str(steps)),
        *("--precision", "fp64", "--checkpoint-every", "5", "--max-restarts", "1000"),
        *("--run-dir", str(folder)),
    ]


def slowed(ranks: tuple[int, ...]) -> list[str]:
    """Workers take their time, so that they are killed in the midst of it."""
    acts = [f"slow@rank={rank},seconds={STEP_S},attempt=-1" for rank in ranks]
    return [word for act in acts for word in ("--inject", act)]


def judged(folder: Path, steps: int, code: int, out: str, kills: int, said: int) -> dict[str, Any]:
    """What is true of a run that is over."""
    assert code == 0, f"{folder} ended with {code}"
    summary = json.loads(out.splitlines()[-1])
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    once = [row["step"] for row in rows if "loss" in row] == list(range(steps))
    furthest = furthest_apart(folder, one_process(folder, steps))
    ended = summary["steps"] == steps
    return {
        "steps": steps,
        "kills": kills,
        "said": said,
        "restarts": summary["restarts"],
        "each_step_once": once,
        "furthest_from_one_process": furthest,
        "holds": ended and once and furthest < NEAR and said >= kills,
    }


def lost_ranks(folder: Path, kind: str) -> int:
    """How many events say that one of this role is lost."""
    lost = [event for event in read_events(folder) if event["event"] == "worker_lost"]
    return sum(event["rank"] in RANKS_OF[kind] for event in lost)


def one_process(folder: Path, steps: int) -> Path:
    """The run folder of the same training in one process."""
    single = folder.with_name(f"single-{steps}")
    if not single.exists():
        command = [sys.executable, "-m", "allranks.cli.main", "train", "digits", "--precision"]
        command += ["fp64", "--steps", str(steps), "--threads", "1", "--run-dir", str(single)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return single


def furthest_apart(one: Path, other: Path) -> float:
    """The largest distance between two weights."""
    found, wanted = (load_file(folder / "weights.safetensors") for folder in (one, other))
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)


def kill(folder: Path, rank: int) -> int:
    """Kill the process that writes the log of a rank; returns how many there were."""
    log = str(folder / "logs" / f"rank-{rank:03}.log")
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == log:
                os.kill(int(entry.name), signal.SIGKILL)
                return 1
        except OSError:
            continue
    return 0


if __name__ == "__main__":
    main()
