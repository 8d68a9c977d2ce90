"""Random deaths of one role after the other, in all modes: each batch counts once.

Whole launches are killed at from outside, with a fixed seed; `CHAOS_DEATHS=20` kills that often.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.checkpoint.format import read_manifest
from allranks.job.run_folder import read_events
from allranks.training.work_queue import Ledger
from conftest import Train
from test_every_strategy import difference

pytestmark = pytest.mark.slow

DEATHS = int(os.environ.get("CHAOS_DEATHS", "3"))
ROLES = {"scheduler": [0], "server": [1, 2], "worker": [3, 4, 5], "evaluator": [6]}
MODES = ["sync", "sync,update=worker", "async", "delta,every=2", "delta,every=2,pipeline=yes"]
STEP_S = 0.04
EVERY = 5
MOST_FILES = 256


def disturbed(folder: Path, mode: str, who: str) -> tuple[dict[str, Any], int]:
    """The summary of a job of two servers and three workers, and how often one was killed.

    It has work for some six seconds: it is not over before the last of those whom we kill is dead.
    """
    steps = 40 + DEATHS * 35
    step_s = STEP_S * (1 if mode.startswith("sync") else 3)  # out of step: three at a time
    options = f"servers=2,bound=8,evaluator=yes,mode={mode},rejoins=100,patience_s=60"
    command = [
        *(sys.executable, "-m", "allranks.cli.main", "train", "decoupled_tasks:Plain", "--json"),
        *("--strategy", f"ps:{options}", "--ranks", "3", "--steps", str(steps)),
        *("--precision", "fp64", "--checkpoint-every", str(EVERY), "--max-restarts", "1000"),
        *("--run-dir", str(folder), "--set", "epochs=1000"),
    ]
    for rank in ROLES["worker"]:
        command += ["--inject", f"slow@rank={rank},seconds={step_s},attempt=-1"]
    chance, killed = random.Random(DEATHS), 0
    here = dict(os.environ)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=here) as launch:
        while launch.poll() is None and killed < DEATHS:
            if not (folder / "metrics.jsonl").exists():
                time.sleep(0.05)
                continue
            time.sleep(chance.uniform(0.3, 1.2))
            killed += kill_one(folder, chance.choice(ROLES[who]))
        out, _ = launch.communicate(timeout=240)
    assert launch.returncode == 0
    return json.loads(out.splitlines()[-1]), killed


def process_of(folder: Path, rank: int) -> Path | None:
    """What /proc has on the process that writes the log of a rank."""
    log = str(folder / "logs" / f"rank-{rank:03}.log")
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == log:
                return entry
    return None


def kill_one(folder: Path, rank: int) -> int:
    """Kill the process of a rank; returns how many there were."""
    entry = process_of(folder, rank)
    if entry is None:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(entry.name), signal.SIGKILL)
    return 1


def ports_of(process: Path) -> list[int]:
    """Where a process listens."""
    own = set[str]()
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(entry))
    rows = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return [int(row[1].rpartition(":")[2], 16) for row in listening]


def come_and_go(ports: list[int], strangers: int) -> None:
    """So many connections at once that say nothing, as far as the kernel takes them."""
    with contextlib.ExitStack() as there:
        for port in itertools.islice(itertools.cycle(ports), strangers):
            one = there.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        time.sleep(0.3)  # some are accepted meanwhile


def joined(folder: Path) -> int:
    return sum(event["event"] == "worker_joined" for event in read_events(folder))


@pytest.mark.slow(most=3)
@pytest.mark.thinned(1, ("mode", MODES), ("who", list(ROLES)))
def test_each_batch_counts_once_whoever_dies(
    tmp_path: Path, train: Train, mode: str, who: str
) -> None:
    """In step the end is that of one process."""
    summary, killed = disturbed(tmp_path, mode, who)
    steps = 40 + DEATHS * 35
    assert killed == DEATHS and summary["steps"] == steps and summary["restarts"] == 0
    lost = [event for event in read_events(tmp_path) if event["event"] == "worker_lost"]
    assert len([event for event in lost if event["rank"] in ROLES[who]]) >= DEATHS
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    counted = [row["step"] for row in rows if "loss" in row]
    assert counted == list(range(steps))
    evaluated = [e["step"] for e in read_events(tmp_path) if e["event"] == "evaluated"]
    assert evaluated[-1] == steps
    if who == "evaluator":
        assert evaluated == sorted(set(evaluated)), "each once, whoever dies"
    if mode.startswith("sync"):
        single = train(
            "decoupled_tasks:Plain", "epochs=1000", strategy="single", precision="fp64", steps=steps
        )
        weights = [load_file(f / "weights.safetensors") for f in (tmp_path, single.run_dir)]
        assert difference(*weights) < 1e-10


@pytest.mark.parametrize("mode", ["async", "delta,every=4,pipeline=yes"])
def test_a_signal_loses_no_row_of_a_step_that_is_in_the_weights(tmp_path: Path, mode: str) -> None:
    """What workers are at when it comes is counted, in rows as well, before it is saved.

    The queue that is saved has no step as done that was not counted.
    """
    command = [
        *(sys.executable, "-m", "allranks.cli.main", "train", "decoupled_tasks:Plain"),
        *("--strategy", f"ps:mode={mode}", "--ranks", "3", "--steps", "4000"),
        *("--run-dir", str(tmp_path), "--set", "epochs=4000"),
    ]
    for rank in (2, 3, 4):
        command += ["--inject", f"slow@rank={rank},seconds={STEP_S}"]
    here = dict(os.environ)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=here) as launch:
        while not (tmp_path / "metrics.jsonl").exists():
            assert launch.poll() is None
            time.sleep(0.05)
        time.sleep(1.0)
        launch.send_signal(signal.SIGTERM)
        assert launch.wait(timeout=240) == 4
    stopped = next(e for e in read_events(tmp_path) if e["event"] == "stopped" and not e["rank"])
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "loss" in row] == list(range(stopped["step"]))
    manifest = read_manifest(tmp_path / "checkpoints" / f"step-{stopped['step']:08d}")
    queue = Ledger(steps=4000, every=1, parts=1)
    queue.load_state(manifest.values["common"]["handed"])
    assert queue.steps_done == stopped["step"]


def test_a_worker_joins_again_after_strangers_have_come_and_gone(tmp_path: Path) -> None:
    """More at once than a process may have files; in all they cost no thread, and few files."""
    command = [
        *("sh", "-c", f'ulimit -n {MOST_FILES} && exec "$@"', "sh"),
        *(sys.executable, "-m", "allranks.cli.main", "train", "decoupled_tasks:Plain"),
        *("--strategy", "ps", "--ranks", "2", "--steps", "1000", "--run-dir", str(tmp_path)),
        *("--set", "epochs=1000"),
    ]
    for rank in (2, 3):
        command += ["--inject", f"slow@rank={rank},seconds={STEP_S},attempt=-1"]
    here = dict(os.environ)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=here) as launch:
        ports: dict[Path, list[int]] = {}
        while len(ports) < 2 or joined(tmp_path) < 2:
            assert launch.poll() is None
            time.sleep(0.05)
            asked = [process_of(tmp_path, rank) for rank in (0, 1)]
            ports = {
                process: found for process in asked if process and (found := ports_of(process))
            }
        before = [len(list((process / "task").iterdir())) for process in ports]
        for _ in range(4):
            come_and_go(list(itertools.chain(*ports.values())), 2 * MOST_FILES)
            for process, threads in zip(ports, before, strict=True):
                assert len(list((process / "task").iterdir())) < threads + 10
                assert len(list((process / "fd").iterdir())) < MOST_FILES // 2
        assert kill_one(tmp_path, 2)
        while joined(tmp_path) < 3:
            assert launch.poll() is None, "the job is over, and the worker never came again"
            time.sleep(0.05)
        launch.send_signal(signal.SIGTERM)
        assert launch.wait(timeout=240) == 4
