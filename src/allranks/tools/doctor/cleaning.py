"""`allranks doctor --clean`: remove what dead runs have left on this machine, and report it.

Every start sweeps by itself; this is for who will start nothing more. A process belongs to the run
whose log it writes to, which its standard output tells. What is alive and has a living owner is
never touched, nor what carries no mark of ours.
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
    """What was removed, and what could not be."""

    removed: tuple[Leftover, ...]
    still_there: tuple[Leftover, ...]


def clean(run: Path | None = None, within: Path | None = None) -> Cleaned:
    """Remove all leftovers of dead runs, or with `run` those of the processes that had this one.

    Scratch folders are looked for among temporary files, and `within`.
    """
    there = left(within)
    found = there if run is None else of_run(there, run)
    spared = {leftover.mark for leftover in there if leftover not in found}
    for leftover in found:
        if leftover.pid is not None and leftover.mark in spared:  # one server had several runs
            with suppress(OSError):
                os.kill(leftover.pid, signal.SIGKILL)
    for mark in {leftover.mark for leftover in found if leftover.mark} - spared:
        end_processes_of(mark)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(map(_runs, found)):
        time.sleep(0.01)
    for leftover in found:
        if leftover.pid is None:
            shutil.rmtree(leftover.name, ignore_errors=True)
    still = tuple(leftover for leftover in found if _is_there(leftover))
    return Cleaned(tuple(one for one in found if one not in still), still)


def left(within: Path | None = None) -> list[Leftover]:
    """All that dead owners left here."""
    found = [
        Leftover("process", _command(pid), mark.partition("/")[0], pid, mark, _run_of(pid))
        for pid, mark in processes_left()
    ]
    paths = sorted(set(folders_left(within)))
    return found + [Leftover("folder", str(path), owner_of(path)) for path in paths]


def of_run(found: Sequence[Leftover], run: Path) -> list[Leftover]:
    """Those of the owners that had this run; what helped them has no run of its own."""
    wanted = str(run.resolve())
    owners = {leftover.owner for leftover in found if leftover.run == wanted}
    return [one for one in found if one.owner in owners and one.run in (None, wanted)]


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


def _is_there(leftover: Leftover) -> bool:
    return _runs(leftover) if leftover.pid is not None else Path(leftover.name).exists()
