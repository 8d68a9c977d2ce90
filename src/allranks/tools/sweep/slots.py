"""Runs packed jobs, so many at once as there are slots: each `allranks train` in its own processes.

A job that fails stops no other. The jobs end with the process that runs them, however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from allranks.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED
from allranks.job.run_folder import is_in_use
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.linux import die_with_parent
from allranks.launcher.signals import Signals
from allranks.tools.sweep.packing import (
    DONE,
    FAILED,
    INTERRUPTED,
    LOGS,
    RUNNING,
    STOPPED,
    Outcome,
    PackedJob,
    Slot,
    Sweep,
    last_event,
    result_of,
)

TICK_S = 0.05
LAST_LINES = 20


@dataclass(frozen=True)
class Watcher:
    """What a caller wants to see. Called with the slot and what is known of its job."""

    started: Callable[[Slot, Outcome], None] = lambda slot, outcome: None
    ended: Callable[[Slot, Outcome], None] = lambda slot, outcome: None


def run_packed(sweep: Sweep, watcher: Watcher) -> str:
    """Run all jobs that are not done, as many at once as there are slots.

    Returns the signal that asked to stop, or "". Then the jobs that ran were asked to commit a
    checkpoint and leave, and no further one was started. No process is left in any case.
    """
    with Signals() as signals, _Running(sweep, watcher) as running:
        waiting = [job for job in sweep.packing.jobs if sweep.outcomes[job.name].state != DONE]
        while (waiting and not signals.reason) or running.jobs:
            while waiting and running.free and not signals.reason:
                running.start(waiting.pop(0))
            running.take_exits(signals)
            running.obey(signals)
            time.sleep(TICK_S)
        return signals.reason


@dataclass
class _Running:
    """The jobs that run now, by slot."""

    sweep: Sweep
    watcher: Watcher
    jobs: dict[Slot, tuple[PackedJob, subprocess.Popen[bytes]]] = field(default_factory=dict)
    told: str = ""
    insisted: bool = False

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self.sweep.packing.slots if slot not in self.jobs]

    def start(self, job: PackedJob) -> None:
        slot, folder = self.free[0], self.sweep.packing.folder
        words = [*job.words, "--threads", str(job.threads), *slot.words]
        words += ["--run-dir", str(folder / job.name)]
        self.jobs[slot] = job, start_command(words, slot.cores, _log(folder, job))
        outcome = self.sweep.note(job, state=RUNNING, started=time.time())
        self.watcher.started(slot, outcome)

    def take_exits(self, signals: Signals) -> None:
        for slot, (job, process) in list(self.jobs.items()):
            code = process.poll()
            if code is None:
                continue
            del self.jobs[slot]
            outcome = self.sweep.note(job, **self._ended(job, code, signals.reason != ""))
            self.watcher.ended(slot, outcome)

    def _ended(self, job: PackedJob, code: int, was_asked_to: bool) -> dict[str, Any]:
        """How a job ended that left with `code`."""
        folder = self.sweep.packing.folder
        summary, report = result_of(folder / job.name), _report(folder / job.name)
        if summary is not None:
            state, code = DONE, EXIT_DONE
        elif code == EXIT_STOPPED:
            state = STOPPED
        elif code == EXIT_INTERRUPTED or (was_asked_to and report is None):
            state = INTERRUPTED  # perhaps before it could hear of it
        else:
            state, report = FAILED, report or _last_words(_log(folder, job))
        ended = {"exit_code": code, "ended": time.time(), "summary": summary}
        return {"state": state, "report": report, **ended}

    def obey(self, signals: Signals) -> None:
        """Pass on what is asked: to stop once, to insist once, and to save to those that listen."""
        asked = signal.SIGINT if signals.reason == "SIGINT" else signal.SIGTERM
        if signals.reason and not self.told:
            self.told = signals.reason
            self._signal_all(asked)
        if signals.insists and not self.insisted:
            self.insisted = True
            self._signal_all(signal.SIGINT)
        if signals.take_saves():
            for job, process in self.jobs.values():
                if is_in_use(self.sweep.packing.folder / job.name):
                    process.send_signal(signal.SIGUSR2)

    def _signal_all(self, number: int) -> None:
        for _, process in self.jobs.values():
            process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """If packing itself broke, the jobs are killed, and what they started ends with them."""
        for _, process in self.jobs.values():
            process.kill()
            process.wait()
        if self.jobs:
            leftovers.sweep()


def start_command(
    words: Sequence[str], cores: Sequence[int], log: Path, verb: str = "train"
) -> subprocess.Popen[bytes]:
    """Run `allranks VERB WORDS` on these cores, in its own session: Ctrl-C is the sweep's.

    Its output is appended to `log`. The kernel kills it when this process dies, and then its fork
    server ends its ranks.
    """
    parent = os.getpid()

    def become() -> None:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "allranks.cli.main", verb, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=become,
        )


def _log(folder: Path, job: PackedJob) -> Path:
    return folder / LOGS / f"{job.name}.log"


def _report(run_dir: Path) -> str | None:
    """The report of the first fault of a run that failed."""
    last = last_event(run_dir)
    return str(last["report"]) if last["event"] == "failed" else None


def _last_words(log: Path) -> str:
    """The last lines of a job that left no report: it was refused, or killed."""
    lines = []
    with suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])
