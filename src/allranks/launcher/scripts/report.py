"""Who of the processes of `allranks run` failed first, and why, in words for a person.

The evidence is the order of their ends, their exit codes, and the last words in their logs. One
that lost a peer is a victim, and is named only if nobody else can be.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from allranks.job.units import format_bytes
from allranks.launcher.log_tail import LastWords, last_words, stacks_in
from allranks.launcher.processes.process import Exit
from allranks.launcher.scripts.exec_command import NOT_FOUND, NOT_RUNNABLE, interpreter_of
from allranks.launcher.scripts.supervise import ScriptsEnded

FEW_LINES = 20
_NO_MODULE = re.compile(r"No module named '(?P<name>[\w.]+)'")
_PYTHON = re.compile(r"(^|/)python[\d.]*$")


@dataclass(frozen=True)
class CommandFault:
    """The process that ended the job. `left` are those that ended by themselves with code 0.

    One that loses such a peer may see it before the peer's process is gone.
    """

    rank: int
    exit: Exit
    words: LastWords
    memory: str
    left: tuple[int, ...] = ()

    @property
    def is_passing(self) -> bool:
        """Whether another attempt may go better; a command that cannot be started will not."""
        return self.exit.code not in (NOT_FOUND, NOT_RUNNABLE)


def find_fault(
    ended: ScriptsEnded, logs: Mapping[int, tuple[Path, int]], memory: str
) -> CommandFault | None:
    """The fault that ended the job; `None` if all that decide ended well.

    `logs` are (file, where this attempt begins in it). `memory` says what the kernel's counters
    tell of processes that it killed.
    """
    if ended.done:
        return None
    bad = {rank: one for rank, one in ended.exits.items() if one.code != 0}
    if not bad:
        return None
    words = {rank: last_words(*logs[rank]) for rank in bad}

    def order(rank: int) -> tuple[bool, bool, float]:
        """Who was stopped comes last, unless it failed of itself meanwhile; then the victims."""
        said, code = words[rank], bad[rank].code
        is_victim = said.is_victim and (code > 0 or code == -signal.SIGABRT)
        had_failed = code > 0 and not is_victim and bool(said.error)
        return rank in ended.stopped and not had_failed, is_victim, bad[rank].monotonic

    first = min(bad, key=order)
    counted = memory if bad[first].memory is None else bad[first].memory or ""
    killed = counted if bad[first].code == -signal.SIGKILL else ""
    before = tuple(
        rank
        for rank, one in ended.exits.items()
        if one.code == 0 and (words[first].is_victim or one.monotonic < bad[first].monotonic)
    )
    return CommandFault(first, bad[first], words[first], killed, before)


def first_fault_report(
    fault: CommandFault,
    ended: ScriptsEnded,
    logs: Mapping[int, tuple[Path, int]],
    command: Sequence[str] = (),
) -> str:
    """The first-fault report; `command` is what the processes were started with."""
    lines = [f"rank {fault.rank} on {fault.exit.host} failed first: {_cause(fault)}"]
    if fault.exit.lost:
        on_it = [r for r, one in ended.exits.items() if one.lost and one.host == fault.exit.host]
        lines = [f"node {fault.exit.host} is lost, with rank {_listed(on_it)}: {fault.exit.lost}"]
    if fault.words.is_victim and fault.left:
        lines[0] += f"; it lost rank {_listed(fault.left)}, which had left with exit code 0"
        lines.append(
            f"rank {_listed(fault.left)} ended its program while rank {fault.rank} went on: does "
            "it stop early by a number of its own, or have fewer batches?"
        )
    if fault.words.text:
        lines += ["", fault.words.text, ""]
    if other := _another_python(fault.words.text or fault.words.error, command):
        lines.append(other)
    others = {rank: one for rank, one in ended.exits.items() if rank != fault.rank}
    victims = [rank for rank, one in others.items() if one.code != 0]
    if victims:
        lines.append(f"stopped because of it: rank {_listed(victims)}")
    lines.append(f"its output: {logs[fault.rank][0]}")
    return "\n".join(lines)


def _another_python(said: str, command: Sequence[str]) -> str:
    """Where a script lacks a module that is installed here: which Python it is, and what to do."""
    missing = _NO_MODULE.search(said)
    program = shutil.which(command[0]) if command else None
    if missing is None or program is None:
        return ""
    words = interpreter_of(program).split()
    used = program if _PYTHON.search(program) else next(filter(_PYTHON.search, words), "")
    used = shutil.which(used) or used
    name = missing["name"].partition(".")[0]
    if not used or used == sys.executable or find_spec(name) is None:
        return ""
    return (
        f"it runs {used}, which has no module {name!r}; the python of allranks has it: activate "
        f"that environment, or name it: {sys.executable}"
    )


def silence_report(
    ended: ScriptsEnded, logs: Mapping[int, tuple[Path, int]], silence_s: float, path: Path
) -> str:
    """Where every process stood when none had printed for so long; all stacks go into a file."""
    first = f"no output of any process for {silence_s:g} s (--hang-timeout)"
    shown, whole = [first, ""], []
    for rank in sorted(ended.stopped):
        who = f"rank {rank} on {ended.exits[rank].host}:"
        stacks = stacks_in(*logs[rank]) or "it wrote no stack: it is no Python, or was stopped"
        whole += [who, stacks, ""]
        shown += [who, *stacks.splitlines()[:FEW_LINES], ""]
    with suppress(OSError):  # a full disk must not hide the report
        path.write_text("\n".join(whole))
    return "\n".join([*shown, f"all stacks: {path}"])


def _cause(fault: CommandFault) -> str:
    """How it ended, and the error that it named."""
    how = _end_of(fault.exit)
    if fault.memory:
        how = fault.memory
    elif fault.words.is_out_of_memory:
        how = f"out of memory: {how}"
    if fault.exit.code == -signal.SIGKILL or not fault.words.error:
        return how
    return f"{how}: {fault.words.error}"


def _end_of(ended: Exit) -> str:
    if ended.lost:
        return ended.lost
    if ended.code == NOT_FOUND:
        return f"exit code {NOT_FOUND} (there is no such program)"
    if ended.code == NOT_RUNNABLE:
        return f"exit code {NOT_RUNNABLE} (the program cannot be run)"
    if ended.code >= 0:
        return f"exit code {ended.code}"
    held = f"it held {format_bytes(ended.peak_bytes)} at most"
    return f"killed by {name_of_signal(-ended.code)} ({held})"


def name_of_signal(number: int) -> str:
    """`SIGKILL`, or `signal 35`."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def _listed(ranks: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
