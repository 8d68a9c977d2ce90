"""Packs jobs on one machine: each is an `allranks train` process, one in each slot at a time.

The state of a sweep is in the run folders of its jobs: finished jobs are skipped, others are
started, and `train` resumes them. A failed job does not stop the others. All jobs end with the
process that runs them, however it ends.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allranks.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, RequestError
from allranks.job.run_folder import is_in_use, rank_events_path, read_rows
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.linux import die_with_parent
from allranks.launcher.supervisor import Signals

LOGS, MARKER = "logs", ".sweep"
DONE, FAILED, STOPPED, INTERRUPTED = "done", "failed", "stopped", "interrupted"
WAITING, RUNNING = "waiting", "running"
TICK_S = 0.05
LAST_LINES = 20


@dataclass(frozen=True)
class Slot:
    """A place for one job at a time: its cores (none: all), and options for the job in it."""

    number: int
    cores: tuple[int, ...] = ()
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        cores = f" (cores {', '.join(map(str, self.cores))})" if self.cores else ""
        return f"slot {self.number}{cores}"


@dataclass
class SweepJob:
    """A job and its state; `report` says why it failed. Times are those of the wall clock."""

    name: str
    settings: dict[str, str]
    threads: int
    run_dir: str
    words: tuple[str, ...] = ()
    state: str = WAITING
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None
    summary: dict[str, Any] | None = None
    report: str | None = None

    @property
    def log(self) -> Path:
        run_dir = Path(self.run_dir)
        return run_dir.parent / LOGS / f"{run_dir.name}.log"

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of a job that is done, and its loss."""
        if self.summary is None:
            return {}
        values = {**self.summary["eval"], "train loss": self.summary["train_loss"]}
        return {name: float(value) for name, value in values.items() if value is not None}

    def start(self, slot: Slot) -> subprocess.Popen[bytes]:
        words = [*self.words, f"--threads={self.threads}", *slot.words, f"--run-dir={self.run_dir}"]
        self.state, self.started = RUNNING, time.time()
        return start_command(words, slot.cores, self.log)

    def finish(self, code: int, was_told_to_stop: bool) -> str:
        """Read from the run folder how the job ended; returns a line to print."""
        self.ended, self.summary = time.time(), result_of(Path(self.run_dir))
        last = last_event(Path(self.run_dir))
        report = str(last["report"]) if last["event"] == "failed" else None
        if self.summary is not None:
            self.state, code = DONE, EXIT_DONE
        elif code == EXIT_STOPPED:
            self.state = STOPPED
        elif code == EXIT_INTERRUPTED or (was_told_to_stop and report is None):
            self.state = INTERRUPTED  # a signal may arrive before the job can note it
        else:  # without a report it was refused, or killed
            self.state, report = FAILED, report or _last_lines(self.log)
        self.exit_code, self.report = code, report
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        more = [values, *(report or "").splitlines()[:1]]
        seconds = self.ended - (self.started or self.ended)
        return ": ".join([f"{self.state} {self.name} after {seconds:.1f} s", *filter(None, more)])

    def to_data(self) -> dict[str, Any]:
        data = asdict(self)
        del data["words"]
        return data


def run_jobs(jobs: Sequence[SweepJob], slots: Sequence[Slot], say: Callable[[str], None]) -> str:
    """Run all jobs that are not done, as many at once as there are slots.

    Returns the signal that asked to stop, or "". After a signal, running jobs commit a checkpoint
    and end, and no further job starts. No process is left in any case.
    """
    running: dict[Slot, tuple[SweepJob, subprocess.Popen[bytes]]] = {}
    waiting = [job for job in jobs if job.state != DONE]
    passed_on = 0
    with Signals() as signals:
        try:
            while (waiting and not signals.reason) or running:
                for slot in slots:
                    if waiting and slot not in running and not signals.reason:
                        job = waiting.pop(0)
                        running[slot] = job, job.start(slot)
                        say(f"started {job.name} in {slot}")
                for slot, (job, process) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[slot]
                        say(job.finish(code, signals.reason != ""))
                stops = [_stop_signal(signals)] if signals.reason else []
                stops += [signal.SIGINT] if signals.insists else []
                saves = signals.take_saves()
                for job, process in running.values():
                    for number in stops[passed_on:]:
                        process.send_signal(number)
                    if saves and is_in_use(Path(job.run_dir)):  # it handles the signal by then
                        process.send_signal(signal.SIGUSR2)
                passed_on = len(stops)
                time.sleep(TICK_S)
        finally:  # if the loop itself broke, the jobs are killed with all that they started
            for _, process in running.values():
                process.kill()
                process.wait()
            if running:
                leftovers.sweep()
        return signals.reason


def _stop_signal(signals: Signals) -> int:
    return signal.SIGINT if signals.reason == "SIGINT" else signal.SIGTERM


@contextmanager
def locked_folder(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """The folder of a sweep of the jobs `names`, made or reopened, and locked.

    Raises `RequestError` for a folder that is not of such a sweep, or of one that runs.
    """
    if folder.is_dir() and (inside := os.listdir(folder)):
        if MARKER not in inside:
            raise _refused_folder(folder, "something is there already, and no sweep left it")
        if any((folder / name / "job.toml").is_file() for name in {*inside}.difference(names)):
            raise _refused_folder(folder, "a sweep of other jobs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()  # the first file: a sweep killed here can go on
        (folder / LOGS).mkdir(exist_ok=True)
        lock = open(folder / ".lock", "wb")
    except OSError as error:
        raise _refused_folder(folder, str(error)) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refused_folder(folder, "a sweep that is running") from None
        yield


def _refused_folder(folder: Path, found: str) -> RequestError:
    return RequestError(
        asked=f"--run-dir {folder}",
        found=found,
        why="a sweep writes the run folders of its jobs there, and goes on only with its own",
        do="name a folder that does not exist yet, or say the same words as before",
    )


def share_out(cores: Sequence[int], slots: int) -> list[tuple[int, ...]]:
    """Disjoint cores for each slot, as equal as possible; () if there are too few."""
    if len(cores) < slots:
        return [()] * slots
    each, more = divmod(len(cores), slots)
    starts = [slot * each + min(slot, more) for slot in range(slots + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(starts)]


def last_event(run_dir: Path) -> dict[str, Any]:
    """The last event of a run's supervisor; an event without a name if there is none."""
    return next(iter([*read_rows(run_dir / "events.jsonl")][-1:]), {"event": ""})


def result_of(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run that is done; `None` if it is not."""
    last = last_event(run_dir)
    if last["event"] != "done":
        return None
    for row in read_rows(rank_events_path(run_dir, 0)):
        if row["event"] == "done" and row["attempt"] == last["attempt"]:
            return {"run_dir": str(run_dir), **row["summary"]}
    return None


def start_command(
    words: Sequence[str],
    cores: Sequence[int],
    log: Path,
    verb: str = "train",
    environment: Mapping[str, str] | None = None,
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
            env=environment,
            preexec_fn=become,
        )


def _last_lines(log: Path) -> str:
    lines = []
    with suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])
