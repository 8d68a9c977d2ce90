"""Chaos: launches disturbed at a random moment by a random act,
and one run that is killed on and on.

Every launch is whole (command line, supervisor, fork server, ranks, loader workers) and trains with
torch. The seeds are fixed; each test prints what it did, so that a failure can be made again.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from allranks.job.run_folder import rank_events_path, read_events, read_rows
from allranks.launcher.processes.linux import state_of
from launch_host import NOTHING_LEFT_S, Host, Launch, until

pytestmark = pytest.mark.slow

KILL, TERM, INT, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP
VICTIMS = ("rank", "worker", "server", "supervisor", "nobody")
STEPS = 24
SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "").split()]  # two: a part of them
JOB = (
    *("train", "failure_tasks:ReadsRows", "--bitwise", "--json", "--steps", str(STEPS)),
    *("--checkpoint-every", "3", "--max-restarts", "2", "--hang-timeout", "6"),
    *("--inject", "slow@seconds=0.01,attempt=-1"),
)


@dataclass(frozen=True)
class Act:
    """What is done to a launch, `after_s` it has begun."""

    ranks: int
    workers: int
    victim: str
    number: signal.Signals
    after_s: float
    chance: float

    @classmethod
    def drawn(cls, chance: random.Random, lasts_s: float) -> Act:
        victim = chance.choices(VICTIMS, (4, 3, 3, 4, 1))[0]
        return cls(
            chance.choice((2, 2, 3, 4)),
            1 if victim == "worker" else chance.choice((0, 1)),
            victim,
            chance.choice((KILL, TERM, INT, STOP)),
            chance.uniform(0.0, lasts_s),
            chance.random(),
        )

    def codes(self, was_loading: bool) -> set[int]:
        """The exit codes that may come of it.

        0 always may: it came when all was done. A rank or a loader worker is started again, however
        it ended; the process that reads the task is not (3), nor is a fork server (3; it does not
        hear SIGINT; woken when it was stopped). A supervisor that is killed is dead (-9), that is
        asked to stop commits (4), or is interrupted before there is anything to commit (130).
        """
        codes = {0}
        if self.victim in ("rank", "worker") and was_loading:
            codes.add(3)
        if self.victim == "server" and self.number in (KILL, TERM):
            codes.add(3)
        if self.victim == "supervisor":
            codes |= {KILL: {-9}, TERM: {4, 130}, INT: {130}, STOP: set()}[self.number]
        return codes


def disturb(launch: Launch, act: Act) -> bool:
    """Do it; returns whether the task was still being read then."""
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun >= act.after_s or launch.code is not None, "the moment")
    loading = not list(launch.folder.glob("run/events-*.jsonl"))
    found = {
        "rank": launch.ranks,
        "worker": launch.workers,
        "server": [launch.server] if launch.server else [],
        "supervisor": [launch.pid] if launch.code is None else [],
        "nobody": [],
    }[act.victim]
    if not found:
        return loading
    victim = found[int(act.chance * len(found))]
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, act.number)
        asleep = act.victim == "supervisor" or (loading and act.victim != "server")
        if act.number == STOP and asleep:  # nobody is there to wake it, but whoever stopped it
            time.sleep(0.3)
            os.kill(victim, signal.SIGCONT)
    return loading


def left_in_shared_memory() -> list[str]:
    found = []
    for name in os.listdir("/dev/shm"):
        number = re.match(r"torch_(\d+)_", name)
        if number is not None and state_of(int(number[1])) in ("", "Z"):
            found.append(name)
    return found


def scratch() -> list[Path]:
    return list(Path(os.environ["TMPDIR"]).glob("allranks-scratch-*"))


@pytest.mark.timeout(7200)
def test_launches_that_are_disturbed(host: Host, tmp_path: Path, exhaustive: bool) -> None:
    """The exit code is one of those that the act allows, and nothing is left: no process with its
    mark (so no socket), no shared memory, no folder; what ended well has the expected weights."""
    first, launches = SEEDS if SEEDS else (0, 300 if exhaustive else 6)
    names = left_in_shared_memory()
    (tmp_path / "calm").mkdir()
    begun = time.monotonic()
    calm = host.launch(tmp_path / "calm", *JOB, "--ranks", "2", "--run-dir", "run")
    assert calm.wait() == 0, calm.err
    lasts_s, wanted = time.monotonic() - begun, calm.summary()["weights_sha256"]
    came: Counter[str] = Counter()
    for seed in range(first, launches):
        act = Act.drawn(random.Random(seed), lasts_s)
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        sizes = ("--ranks", str(act.ranks), "--loader-workers", str(act.workers))
        going = host.launch(folder, *JOB, *sizes, "--run-dir", "run")
        loading = disturb(going, act)
        code = going.wait()
        print(f"seed {seed}: {act}, {loading=} -> {code}")
        came[f"{act.victim} {act.number.name} -> {code}"] += 1
        assert code in act.codes(loading), f"{act} {code}\n{going.out}\n{going.err}"
        assert "Traceback of the launch" not in going.err, going.err
        going.assert_nothing_left()
        if code == 0:
            assert going.summary()["weights_sha256"] == wanted
        elif (folder / "run" / "job.toml").exists():
            again = host.launch(folder, "train", "--run-dir", "run", "--json")
            assert again.wait() == 0, again.err
            assert again.summary()["weights_sha256"] == wanted
            again.assert_nothing_left()
        if code != -9 or (folder / "run" / "job.toml").exists():
            assert not scratch(), "a start sweeps what a killed one left"
    for what in sorted(came):
        print(f"{came[what]:4} {what}")
    host.launch(tmp_path, "train", "nowhere.py").wait()
    assert not scratch()
    # those of tests that run beside go by themselves
    until(lambda: set(left_in_shared_memory()) <= set(names), "no name is left", NOTHING_LEFT_S)


@pytest.mark.timeout(3600)
def test_one_run_whose_ranks_are_killed_on_and_on(
    host: Host, tmp_path: Path, exhaustive: bool
) -> None:
    """`kill -9` of a random rank at a random moment, again and again; it ends by itself, with the
    weights of an undisturbed run. One kill in ten comes while the ranks are starting."""
    kills, chance = (100 if exhaustive else 4), random.Random(4)
    job = (
        *("train", "bad_tasks:Good", "--bitwise", "--json", "--steps", str(60 * kills)),
        *("--ranks", "4", "--run-dir", "run"),
    )
    (tmp_path / "calm").mkdir()
    calm = host.launch(tmp_path / "calm", *job)
    protected = (*("--checkpoint-every", "5", "--max-restarts", str(kills + 5)),)
    pace = ("--inject", "slow@seconds=0.005,attempt=-1")
    going = host.launch(tmp_path, *job, *protected, *pace)
    path = tmp_path / "run"
    killed: list[tuple[int, float]] = []  # the attempt that was killed, and when

    def restarted(attempt: int) -> bool:
        return going.code is not None or attempts(path) > attempt

    def trains(attempt: int) -> bool:
        return going.code is not None or is_training(path, attempt)

    def starts() -> bool:
        return going.code is not None or len(going.ranks) == 4

    until(partial(restarted, 0), "the first attempt")
    for number in range(kills):
        tried = attempts(path)
        if chance.random() >= 0.1:
            until(partial(trains, tried - 1), "it trains")
            time.sleep(chance.uniform(0.0, 0.4))
        else:
            until(starts, "its ranks start")
            time.sleep(chance.uniform(0.0, 0.2))
        assert going.code is None, f"it ended after {number} kills\n{going.err}"
        ranks = until(lambda: going.ranks, "ranks that live")
        killed.append((tried - 1, time.monotonic()))
        os.kill(chance.choice(ranks), signal.SIGKILL)
        until(partial(restarted, tried), "a restart")
    assert going.wait(600) == 0, going.err
    assert calm.wait(600) == 0, calm.err
    assert going.summary()["weights_sha256"] == calm.summary()["weights_sha256"]
    assert going.summary()["restarts"] == kills
    going.assert_nothing_left()
    waited = until_the_next_step(path, killed)
    lost = [row["lost_steps"] for row in read_rows(path / "events.jsonl") if "lost_steps" in row]
    tell = [f"{value:.2f}" for value in statistics.quantiles(waited, n=20, method="inclusive")]
    print(f"{kills} kills; from the kill to the first step after it, in seconds:")
    print(f"median {statistics.median(waited):.2f}, 5 % {tell[0]}, 95 % {tell[-1]},", end=" ")
    print(f"least {min(waited):.2f}, most {max(waited):.2f}; steps lost: median", end=" ")
    print(f"{statistics.median(lost)}, most {max(lost)}")


def attempts(path: Path) -> int:
    return sum(row["event"] == "attempt" for row in read_rows(path / "events.jsonl"))


def is_training(path: Path, attempt: int) -> bool:
    """Whether the leader has made its first step in this attempt."""
    rows = read_rows(rank_events_path(path, 0))
    return any(row["event"] == "training" and row["attempt"] == attempt for row in rows)


def until_the_next_step(path: Path, killed: list[tuple[int, float]]) -> list[float]:
    """For each kill the seconds to the first step of the next attempt, if that made one."""
    begun: dict[int, float] = {}
    for row in read_events(path):
        if row["event"] == "training":
            begun.setdefault(row["attempt"], row["monotonic"])
    return [begun[attempt + 1] - when for attempt, when in killed if attempt + 1 in begun]
