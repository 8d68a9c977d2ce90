"""Runs the jobs of a plan, one after another, and reads their measurements.

A job that fails is listed with its reason, and left out of later turns; others go on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allranks.job.job import Job
from allranks.launcher.supervisor import Signals
from allranks.tools.bench.peers import JOB_FILE, peer_words
from allranks.tools.bench.plan import BenchPlan, Combination
from allranks.tools.bench.reading import Measured, measured_peer, measured_run
from allranks.tools.bench.scripts import (
    measured_script,
    script_words,
    steps_made,
    timed_environment,
)
from allranks.tools.sweep import last_event, result_of, start_command

TICK_S, LOOK_S = 0.02, 0.25
UNCHECKED = "--first-check", "off"  # a bench measures; its jobs are short and many
LAST_LINES = 4


@dataclass
class RunSet:
    """The measured runs of a combination, or the problem why it has none.

    `losses` are those of the steps of its first run.
    """

    combination: Combination
    runs: list[Measured] = field(default_factory=list)
    problem: str = ""
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class BenchWatcher:
    """Callbacks of a bench: a run begins, a run ended with a result or a problem, time passes."""

    began: Callable[[Combination, int], None] = lambda combination, turn: None
    ended: Callable[[Combination, int, Measured | str], None] = lambda *arguments: None
    tick: Callable[[], None] = lambda: None


def measure(
    plan: BenchPlan, refused: dict[Combination, str], folder: Path, jobs: dict[Combination, Job],
    watcher: BenchWatcher,
) -> list[RunSet]:  # fmt: skip
    """Run all jobs of `plan`, turn by turn, in `folder`; `refused` ones are not run.

    `jobs` are those of the peers. A stop signal ends the running job; the measurements so far are
    returned.
    """
    series = {c: RunSet(c, problem=refused.get(c, "")) for c in plan.combinations}
    with Signals() as signals:
        runs = _BenchRuns(plan, folder, jobs, signals, watcher)
        for turn in range(plan.repeats):
            for combination in plan.turn(turn):
                record = series[combination]
                if record.problem or signals.reason:
                    continue
                watcher.began(combination, turn)
                measured = _in_unit(runs.run(combination, turn), list(series.values()))
                outcome = measured if isinstance(measured, str) else measured[0]
                if not isinstance(measured, str):
                    record.runs.append(measured[0])
                    record.losses = record.losses or measured[1]
                elif not signals.reason:
                    record.problem = measured
                if not signals.reason:
                    watcher.ended(combination, turn, outcome)
    return list(series.values())


@dataclass(frozen=True)
class _BenchRuns:
    """Runs one job of the bench at a time."""

    plan: BenchPlan
    folder: Path
    jobs: dict[Combination, Job]
    signals: Signals
    watcher: BenchWatcher

    def run(self, combination: Combination, turn: int) -> tuple[Measured, tuple[float, ...]] | str:
        """The measurements of a run and the loss of each step, or why there are none."""
        run_dir = self.folder / f"turn-{turn}" / combination.name
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = run_dir.with_suffix(".log")
        plan, peer = self.plan, run_dir.with_suffix(".peer")
        if plan.command:
            return self._run_script(combination, turn, run_dir, log)
        if combination.is_peer:
            job, verb = self.jobs[combination], "run"
            words = peer_words(combination, job, run_dir, peer, plan.peer_limit_s)
        else:
            words = [*plan.words_of(combination), "--run-dir", str(run_dir), *UNCHECKED]
            verb = "train"
        meter = EnergyMeter()
        self._wait_for(words, log, verb)
        joules = meter.joules()
        if combination.is_peer:
            (peer / JOB_FILE).unlink()  # it may hold a key of the task
            outcome = measured_peer(peer, combination.ranks, plan.warm_up, turn, joules)
            return outcome if not isinstance(outcome, str) else f"{outcome}: {_why(run_dir, log)}"
        summary = result_of(run_dir) if run_dir.is_dir() else None
        if summary is None:
            return _why(run_dir, log)
        return measured_run(run_dir, summary, plan.warm_up, turn, joules)

    def _run_script(
        self, combination: Combination, turn: int, run_dir: Path, log: Path
    ) -> tuple[Measured, tuple[float, ...]] | str:
        """One run of a script, which is stopped once its ranks have made enough steps."""
        plan, steps = self.plan, run_dir.with_suffix(".steps")
        words = script_words(plan, combination, run_dir)
        environment = timed_environment(plan, steps, os.environ)

        def has_enough() -> bool:
            return steps_made(steps, combination.ranks) >= plan.warm_up + plan.steps

        meter = EnergyMeter()
        code = self._wait_for(words, log, "run", environment, has_enough)
        if code not in (0, None):
            return _why(run_dir, log)
        return measured_script(steps, run_dir, plan, turn, meter.joules())

    def _wait_for(
        self,
        words: list[str],
        log: Path,
        verb: str,
        environment: Mapping[str, str] | None = None,
        has_enough: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Its exit code; `None` if it was stopped because `has_enough` became true."""
        process = start_command(words, (), log, verb, environment)
        try:
            stopping, enough, looked = False, False, time.monotonic()
            while process.poll() is None:
                if not enough and time.monotonic() - looked > LOOK_S:
                    enough, looked = has_enough(), time.monotonic()
                if (self.signals.reason or enough) and not stopping:
                    stopping = True
                    process.send_signal(signal.SIGINT if self.signals.reason else signal.SIGTERM)
                self.watcher.tick()
                time.sleep(TICK_S)
            return None if enough else process.returncode
        finally:
            process.kill()
            process.wait()


def _in_unit(
    measured: tuple[Measured, tuple[float, ...]] | str, series: list[RunSet]
) -> tuple[Measured, tuple[float, ...]] | str:
    """The same, or a problem if the runs before were measured in another unit."""
    units = {run.unit for record in series for run in record.runs}
    if isinstance(measured, str) or not units or measured[0].unit in units:
        return measured
    return f"measured in {measured[0].unit}, and runs before in {', '.join(units)}"


def _why(run_dir: Path, log: Path) -> str:
    """The first line of a failed job's report, or the end of its log."""
    if run_dir.is_dir():
        last = last_event(run_dir)
        if last["event"] == "failed":
            return str(last["report"]).splitlines()[0]
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return " ".join(line.strip() for line in lines) or "its log is empty"


# --- energy --------------------------------------------------------------------------------------
# Energy of the machine in joules, from the RAPL counters of Intel and AMD processors.
#
# The kernel has a counter of microjoules for each package (`powercap`), which wraps around at its
# largest value. It counts all processes on the package, and no memory, disks or accelerators. On
# most machines only root can read it.


COUNTERS = Path("/sys/class/powercap")
PACKAGES = "intel-rapl:[0-9]*"


def counters(folder: Path = COUNTERS) -> dict[Path, tuple[int, int]]:
    """The microjoules and the range of each package's counter; empty if unreadable."""
    readings = {}
    for path in folder.glob(PACKAGES):
        if path.name.count(":") > 1:  # a part of a package
            continue
        try:
            counted = int((path / "energy_uj").read_text())
            readings[path] = counted, int((path / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            return {}
    return readings


class EnergyMeter:
    """Counts from its creation; `joules` returns the energy since, `None` if unknown.

    It misses a counter that wraps around twice, which takes about an hour at full load.
    """

    def __init__(self, folder: Path = COUNTERS) -> None:
        self.folder, self.began = folder, counters(folder)

    def joules(self) -> float | None:
        now = counters(self.folder)
        if not now or now.keys() != self.began.keys():
            return None
        total = 0
        for path, (counted, whole) in now.items():
            before = self.began[path][0]
            total += counted - before if counted >= before else counted - before + whole
        return total / 1e6
