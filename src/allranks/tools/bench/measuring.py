"""Runs the jobs of a plan, one after another, and has what they measured read.

A job that fails is named with its reason, and left out of the turns that follow; others go on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allranks.job.job import Job
from allranks.launcher.signals import Signals
from allranks.tools.bench.energy import EnergyMeter
from allranks.tools.bench.peers import JOB_FILE, peer_words
from allranks.tools.bench.plan import BenchPlan, Combination
from allranks.tools.bench.reading import Measured, measured_peer, measured_run
from allranks.tools.sweep import last_event, result_of, start_command

TICK_S = 0.02
UNCHECKED = "--first-check", "off"  # a bench measures; its jobs are short and many
LAST_LINES = 4


@dataclass
class Found:
    """What is known of a combination: what each of its runs measured, or why it has none.

    `losses` are those of the steps of its first run.
    """

    combination: Combination
    runs: list[Measured] = field(default_factory=list)
    problem: str = ""
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class BenchWatcher:
    """What a caller wants to see: which run begins, what came of it, and the time that passes."""

    began: Callable[[Combination, int], None] = lambda combination, turn: None
    ended: Callable[[Combination, int, Measured | str], None] = lambda combination, turn, what: None
    tick: Callable[[], None] = lambda: None


def measure(
    plan: BenchPlan, refused: dict[Combination, str], folder: Path, jobs: dict[Combination, Job],
    watcher: BenchWatcher,
) -> list[Found]:  # fmt: skip
    """Run all jobs of `plan`, turn by turn, in `folder`; `refused` ones are not run.

    `jobs` are those of the peers. A signal to stop ends the job that runs, and what was measured
    until then is returned.
    """
    found = {one: Found(one, problem=refused.get(one, "")) for one in plan.combinations}
    with Signals() as signals:
        runs = _BenchRuns(plan, folder, jobs, signals, watcher)
        for turn in range(plan.repeats):
            for combination in plan.turn(turn):
                one = found[combination]
                if one.problem or signals.reason:
                    continue
                watcher.began(combination, turn)
                measured = runs.run(combination, turn)
                if isinstance(measured, str):
                    one.problem = "" if signals.reason else measured
                else:
                    one.runs.append(measured[0])
                    one.losses = one.losses or measured[1]
                if not signals.reason:
                    told = measured if isinstance(measured, str) else measured[0]
                    watcher.ended(combination, turn, told)
    return list(found.values())


@dataclass(frozen=True)
class _BenchRuns:
    """One run after the other."""

    plan: BenchPlan
    folder: Path
    jobs: dict[Combination, Job]
    signals: Signals
    watcher: BenchWatcher

    def run(self, combination: Combination, turn: int) -> tuple[Measured, tuple[float, ...]] | str:
        """What a run measured with the loss of each step, or why it did not."""
        run_dir = self.folder / f"turn-{turn}" / combination.name
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = run_dir.with_suffix(".log")
        plan, peer = self.plan, run_dir.with_suffix(".peer")
        if combination.is_peer:
            words, verb = self._words_of_peer(combination, run_dir, peer), "run"
        else:
            words = [*plan.words_of(combination), "--run-dir", str(run_dir), *UNCHECKED]
            verb = "train"
        meter = EnergyMeter()
        self._wait_for(words, log, verb)
        joules = meter.joules()
        if combination.is_peer:
            (peer / JOB_FILE).unlink()  # it may hold a key of the task
            found = measured_peer(peer, combination.ranks, plan.warm_up, turn, joules)
            return found if not isinstance(found, str) else f"{found}: {_why(run_dir, log)}"
        summary = result_of(run_dir) if run_dir.is_dir() else None
        if summary is None:
            return _why(run_dir, log)
        return measured_run(run_dir, summary, plan.warm_up, turn, joules)

    def _words_of_peer(self, combination: Combination, run_dir: Path, out: Path) -> list[str]:
        limit_s = self.plan.peer_limit_s
        return peer_words(combination, self.jobs[combination], run_dir, out, limit_s)

    def _wait_for(self, words: list[str], log: Path, verb: str) -> None:
        process = start_command(words, (), log, verb)
        try:
            told = False
            while process.poll() is None:
                if self.signals.reason and not told:
                    told = True
                    process.send_signal(signal.SIGINT)
                self.watcher.tick()
                time.sleep(TICK_S)
        finally:
            process.kill()
            process.wait()


def _why(run_dir: Path, log: Path) -> str:
    """The first line of the report of a job that failed, or its last words."""
    if run_dir.is_dir():
        last = last_event(run_dir)
        if last["event"] == "failed":
            return str(last["report"]).splitlines()[0]
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return " ".join(line.strip() for line in lines) or "it left no word"
