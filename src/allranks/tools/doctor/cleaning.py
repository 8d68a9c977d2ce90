"""`allranks doctor --clean`: remove what dead runs have left on this machine, and report it.

Every start cleans up first; this command is for machines on which no run will start. A process
belongs to the run whose log is its standard output. Processes with a living owner, and processes
without our mark, are never touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from allranks.launcher.processes.leftovers import (
    end_processes_of,
    folders_left,
    owner_of,
    processes_left,
)
from allranks.launcher.processes.linux import state_of

PATIENCE_S = 5.0
LOGS = "logs"
DELETED = " (deleted)"
MOST_LETTERS = 120


@dataclass(frozen=True)
class Leftover:
    """A process or folder that an owner left behind, and its run folder if known.

    `name` is the command of a process, or the path of a folder.
    """

    kind: str
    name: str
    owner: str
    pid: int | None = None
    mark: str = ""
    run: str | None = None


@dataclass(frozen=True)
class Cleaned:
    """What was removed, and what could not be removed."""

    removed: tuple[Leftover, ...]
    still_there: tuple[Leftover, ...]


def clean(run: Path | None = None, within: Path | None = None) -> Cleaned:
    """Remove all leftovers of dead runs, or with `run` those of the owners of this run.

    Scratch folders are searched among temporary files, and `within`.
    """
    leftovers = find_leftovers(within)
    targets = leftovers if run is None else of_run(leftovers, run)
    spared = {leftover.mark for leftover in leftovers if leftover not in targets}
    for leftover in targets:
        if leftover.pid is not None and leftover.mark in spared:  # one server had several runs
            with suppress(OSError):
                os.kill(leftover.pid, signal.SIGKILL)
    for mark in {leftover.mark for leftover in targets if leftover.mark} - spared:
        end_processes_of(mark)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(map(_runs, targets)):
        time.sleep(0.01)
    for leftover in targets:
        if leftover.pid is None:
            shutil.rmtree(leftover.name, ignore_errors=True)
    still = tuple(
        leftover
        for leftover in targets
        if _runs(leftover) or (leftover.pid is None and Path(leftover.name).exists())
    )
    return Cleaned(tuple(leftover for leftover in targets if leftover not in still), still)


def find_leftovers(within: Path | None = None) -> list[Leftover]:
    """All processes and folders of dead owners on this machine."""
    processes = [
        Leftover("process", _command(pid), mark.partition("/")[0], pid, mark, _run_of(pid))
        for pid, mark in processes_left()
    ]
    paths = sorted(set(folders_left(within)))
    return processes + [Leftover("folder", str(path), owner_of(path)) for path in paths]


def of_run(leftovers: Sequence[Leftover], run: Path) -> list[Leftover]:
    """The leftovers of this run's owners; their helper processes have no run of their own."""
    wanted = str(run.resolve())
    owners = {leftover.owner for leftover in leftovers if leftover.run == wanted}
    return [item for item in leftovers if item.owner in owners and item.run in (None, wanted)]


def _run_of(pid: int) -> str | None:
    """The run folder whose log a process writes to."""
    for fd in (1, 2):
        with suppress(OSError):
            log = Path(os.readlink(f"/proc/{pid}/fd/{fd}").removesuffix(DELETED))
            if log.parent.name == LOGS and log.suffix == ".log":
                return str(log.parent.parent)
    return None


def _command(pid: int) -> str:
    """The command line of a process, as far as it can be printed."""
    with suppress(psutil.Error):
        words = " ".join(filter(None, psutil.Process(pid).cmdline()))
        text = words.encode(errors="replace").decode()
        return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"
    return ""


def _runs(leftover: Leftover) -> bool:
    return leftover.pid is not None and state_of(leftover.pid) not in ("", "Z", "X")
