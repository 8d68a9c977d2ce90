"""The first-fault report: which rank failed first, where, and why; the victims are folded away.

Evidence is the exits in the order in which the kernel showed them, and the `failed` events that
ranks write before they leave. A rank whose collective broke because a peer went away says so
itself (`peer_lost`), and is named only when nobody else can be.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from allranks.errors import FaultKind, PlaceError, ProgramError, RequestError
from allranks.job.run_folder import rank_events_path, rank_log_path, read_rows
from allranks.job.units import format_bytes
from allranks.launcher.hang import Hang, callers_alone, ranks_waited_for, told_of_mismatch
from allranks.launcher.heartbeat import Beat
from allranks.launcher.processes.process import is_said
from allranks.launcher.supervisor import Ended

# --- folding -------------------------------------------------------------------------------------
# A traceback for users: the lines of their own code, and how many others. Pure.
#
# The whole of it stays in the events of the rank.


_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+, in ')
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(?P<package>[^/.]+)")
_STANDARD = re.compile(r"/lib/python3[^/]*/|^<frozen ")


def folded(traceback: str) -> str:
    """The traceback without frames of installed packages; as it is if there are no others."""
    lines = traceback.splitlines()
    owners: list[str] = []
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            owners.append(_owner_of(frame["file"]))
        elif owners and owners[-1] != ROOT and line.startswith("    "):
            owners.append(owners[-1])  # the line of code of that frame, and its marks
        else:
            owners.append(ROOT)
    if USER not in owners:
        return traceback
    shown: list[str] = []
    for is_folded, group in groupby(
        zip(lines, owners, strict=True), lambda one: one[1] not in (USER, ROOT)
    ):
        part = list(group)
        if not is_folded:
            shown += [line for line, _ in part]
            continue
        count = sum(_FRAME.match(line) is not None for line, _ in part)
        who = dict.fromkeys(owner for _, owner in part)
        shown.append(f"  … {count} frame{'s' if count > 1 else ''} of {', '.join(who)}")
    return "\n".join(shown)


USER, ROOT = "the user", ""


def _owner_of(file: str) -> str:
    installed = _INSTALLED.search(file)
    if installed is not None:
        return installed["package"]
    if _STANDARD.search(file):
        return "Python"
    return "allranks" if file.startswith(_PACKAGE_FOLDER) else USER


_PACKAGE_FOLDER = __file__.rpartition("/launcher/")[0] + "/"


# --- log tail ------------------------------------------------------------------------------------
# What a process said last, read from its log: the cause of its end, or the loss of a peer.
#
# A script that is run unchanged leaves nothing but its output and its exit code. Of the output the
# last traceback is taken, or the last lines; whoever speaks of a connection that broke is a victim.


MOST_BYTES = 1 << 17
MOST_LINES = 60
FEW_LINES = 12
TRACEBACK = "Traceback (most recent call last):"
NO_FRAME = "<no Python frame>"
EXTENSIONS = "Extension modules: "  # which faulthandler adds
CURRENT = "Current thread 0x"
FATAL = ("Fatal Python error:", CURRENT, "Thread 0x")
_RANK = re.compile(r"^\[(?:rank)?\d+\]:\s?")  # torch puts it before each line of a traceback
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")


@dataclass(frozen=True)
class LastWords:
    """`text` is the last traceback, or what was printed last; `error` is the line that says why.

    `is_victim`: it lost the connection to another process.
    """

    text: str
    error: str
    is_victim: bool
    is_out_of_memory: bool


def stacks_in(log: Path, start: int = 0) -> str:
    """The stacks that a fatal signal left, all of them, that of the running thread first."""
    lines = _lines(log, start)
    first = next((i for i, line in enumerate(lines) if line.startswith(FATAL)), len(lines))
    return "\n".join(_current_first(lines[first:]))


def last_words(log: Path, start: int = 0) -> LastWords:
    """What was written into `log` from byte `start` on, in its last words."""
    lines = _lines(log, start)
    found = _last_traceback(lines) or lines[-FEW_LINES:]
    error = _thrown(lines) if found[:1] and found[0].startswith(FATAL) else ""
    error = error or _error_of(found)
    said = "\n".join(lines[-MOST_LINES:]) if not _is_traceback(found) else "\n".join(found)
    return LastWords(
        "\n".join(found),
        error,
        is_said(FaultKind.PEER_LOST, error if _is_traceback(found) and error else said),
        is_said(FaultKind.OUT_OF_MEMORY, said),
    )


def _lines(log: Path, start: int) -> list[str]:
    """The last lines that are not empty, without the marks of torch and of progress bars."""
    lines = [_RANK.sub("", line) for line in _tail(log, start).splitlines()]
    lines = [line.rpartition("\r")[2].rstrip() for line in lines]
    return [line for line in lines if line and not line.startswith(EXTENSIONS)]


def _tail(log: Path, start: int) -> str:
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - MOST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _is_traceback(lines: list[str]) -> bool:
    return bool(lines) and lines[0].lstrip().startswith((TRACEBACK, *FATAL))


def _last_traceback(lines: list[str]) -> list[str]:
    """The last traceback of Python, or the stacks that a fatal signal left, if any.

    One that died of a signal when it was being taken apart had said before why it left.
    """
    fatal = next((i for i, line in enumerate(lines) if line.startswith(FATAL)), len(lines))
    stacks, before = _current_first(lines[fatal:])[:MOST_LINES], lines[:fatal]
    if not any(NO_FRAME in line for line in stacks):
        return stacks or _python_traceback(before)
    return _python_traceback(before) or stacks


def _current_first(lines: list[str]) -> list[str]:
    """The stacks of all threads, that of the one which was running before the others."""
    start = next((i for i, line in enumerate(lines) if line.startswith(CURRENT)), None)
    if start is None:
        return lines
    end = start + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    head = 1 if lines[0].startswith(FATAL[0]) else 0
    return lines[:head] + lines[start:end] + lines[head:start] + lines[end:]


def _python_traceback(lines: list[str]) -> list[str]:
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(TRACEBACK)]
    if not starts:
        return []
    first, end = starts[-1], starts[-1] + 1
    while end < len(lines) and (lines[end].startswith(" ") or not _ERROR.match(lines[end])):
        end += 1
    return lines[first : end + 1][:1] + lines[max(first + 1, end + 1 - MOST_LINES) : end + 1]


def _thrown(lines: list[str]) -> str:
    """What an exception of C++ said that nobody caught, before the stacks; "" if there was none."""
    found = [line.partition("what():")[2].strip() for line in lines if "what():" in line]
    return found[-1] if found else ""


def _error_of(lines: list[str]) -> str:
    """The line that names the error: the last one that is not part of a stack."""
    if lines and lines[0].startswith(FATAL[0]):
        return lines[0]
    return next((line for line in reversed(lines) if not line.startswith(" ")), "")


CRASH_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
GOOD_ENDS = ("done", "stopped", "described")


@dataclass(frozen=True)
class RankFault:
    """One rank that did not end well; `event` is what it wrote itself, if it could.

    `memory` is what the kernel's counters say of its death, `beat` the last beat of its heartbeat;
    `alike` are the other ranks that failed with the same words. `lost_a_peer`: it wrote no event,
    and its log says that a collective broke (NCCL's watchdog ends a process by SIGABRT).
    """

    rank: int
    code: int
    monotonic: float
    event: dict[str, Any] | None
    memory: str = ""
    peak_bytes: int = 0
    beat: Beat | None = None
    alike: tuple[int, ...] = ()
    host: str = ""
    lost: str = ""
    lost_a_peer: bool = False

    @property
    def kind(self) -> FaultKind:
        """What it was, as the rank itself has told it."""
        return FaultKind.PROGRAM if self.event is None else FaultKind(self.event["fault_kind"])

    @property
    def words(self) -> tuple[Any, ...] | None:
        """What it said itself: the kind of its error, the message, the step; `None` if nothing."""
        event = self.event
        return None if event is None else (event["kind"], event["message"], event.get("step"))

    @property
    def step(self) -> int | None:
        """The step that it was in, if that is known."""
        if self.event is not None:
            return self.event.get("step")
        return self.beat.step if self.beat is not None and self.beat.step >= 0 else None

    @property
    def is_victim(self) -> bool:
        return self.lost_a_peer or (self.event is not None and bool(self.event.get("peer_lost")))

    @property
    def is_passing(self) -> bool:
        """Whether another attempt may go better: not after a bad request, nor a step gone bad."""
        return self.event is None or bool(self.event.get("passing", True))

    def repeats(self, other: RankFault | None) -> bool:
        """Whether this is the very fault that ended the attempt before, with no step between."""
        if other is None or self.words is None or self.words != other.words:
            return False
        return self.rank == other.rank or bool(self.alike)


def first_fault(
    ended: Ended,
    run_dir: Path,
    attempt: int = 0,
    memory: str = "",
    beats: Sequence[Beat] = (),
    must_say_so: bool = False,
) -> RankFault | None:
    """The fault that came first, causes before victims; `None` if every rank ended well.

    A rank ended well if it said so in this attempt, whatever happened to its process afterwards.
    Without `must_say_so` an exit code of 0 is enough.
    """
    found = (
        _fault_of(rank, ended, run_dir, attempt, memory, must_say_so)
        for rank in ended.exits
        if rank not in ended.spared
    )
    last = {beat.rank: beat for beat in beats}
    furthest = max(beats, key=lambda beat: beat.step, default=None)
    faults = [
        dataclasses.replace(f, beat=_beat_of(f, last.get(f.rank), furthest))
        for f in found
        if f is not None
    ]
    first = min(faults, key=lambda fault: (fault.is_victim, fault.monotonic), default=None)
    if first is None or first.words is None or first.is_victim:
        return first
    alike = tuple(f.rank for f in faults if f.rank != first.rank and f.words == first.words)
    return dataclasses.replace(first, alike=alike)


def _beat_of(fault: RankFault, own: Beat | None, furthest: Beat | None) -> Beat | None:
    """The last beat of a rank. Those of a lost node come no more: the job was that far."""
    is_behind = own is None or own.step < 0
    return furthest if fault.lost and is_behind else own


def _fault_of(
    rank: int, ended: Ended, run_dir: Path, attempt: int, memory: str, must_say_so: bool
) -> RankFault | None:
    """How one rank failed, by its exit and its own words; `None` if it ended well."""
    exit_, events = ended.exits[rank], events_of(run_dir, rank, attempt)
    event = next((row for row in events if row["event"] == "failed"), None)
    told_to = rank in ended.stopped and event is None and not exit_.lost
    if ended_well(events) or told_to or (exit_.code == 0 and not must_say_so):
        return None
    said_at = event["monotonic"] - exit_.clock_ahead_s if event else exit_.monotonic
    counted = memory if exit_.memory is None else exit_.memory
    lost_a_child = event is not None and event["fault_kind"] == FaultKind.CHILD_KILLED
    return RankFault(
        rank,
        exit_.code,
        min(exit_.monotonic, said_at),
        event,
        counted if exit_.code == -signal.SIGKILL or lost_a_child else "",
        exit_.peak_bytes,
        host=exit_.host,
        lost=exit_.lost,
        lost_a_peer=event is None
        and exit_.code == -signal.SIGABRT
        and last_words(rank_log_path(run_dir, rank)).is_victim,
    )


def ended_well(events: list[dict[str, Any]]) -> bool:
    """Whether a rank said in these events that it had done its work, or was stopped in order."""
    return any(row["event"] in GOOD_ENDS for row in events)


def events_of(run_dir: Path, rank: int, attempt: int) -> list[dict[str, Any]]:
    """What a rank wrote in one attempt."""
    rows = read_rows(rank_events_path(run_dir, rank))
    return [row for row in rows if row.get("attempt", 0) == attempt]


def user_error(
    fault: RankFault, ended: Ended, run_dir: Path
) -> RequestError | ProgramError | PlaceError:
    """The error for this fault: a bad request, if found before the first update, or a report."""
    if fault.lost:
        return PlaceError(_lost_node(fault, ended))
    event = fault.event or {}
    if event.get("request") and not event.get("updates"):
        return RequestError.from_data(event["request"])
    report = _report(fault, ended, run_dir)
    return ProgramError(
        report, fault_kind=fault.kind, cause=describe_cause(fault).partition("\n")[0]
    )


def _lost_node(fault: RankFault, ended: Ended) -> str:
    """The lost node, who was on it, and the ranks that were stopped because of it."""
    on_it = [rank for rank, exit_ in ended.exits.items() if exit_.lost and exit_.host == fault.host]
    others = [rank for rank in ended.exits if rank not in on_it]
    step = f" at step {fault.step}" if fault.step is not None else ""
    names = [ended.name_of(rank) for rank in sorted(on_it)]
    have_roles = names != [f"rank {rank}" for rank in sorted(on_it)]
    who = ", ".join(names) if have_roles else f"rank {_listed(*on_it)}"
    lines = [f"node {fault.host} is lost{step}, with {who}: {fault.lost}"]
    if others:
        lines.append(f"stopped because of it: rank {_listed(*others)}")
    return "\n".join(lines)


def hang_report(
    hang: Hang,
    run_dir: Path,
    attempt: int,
    hosts: Sequence[str] = (),
    name_of: Callable[[int], str] = "rank {}".format,
) -> str:
    """Who is missing, where it stands, and who waits for it; all stacks go into a file."""
    path = run_dir / "logs" / f"hang-{attempt}.txt"
    with suppress(OSError):  # a full disk must not hide the report
        path.write_text(f"{hang}\n")
    lines = [f"no sign of life for {hang.timeout_s:g} s (--hang-timeout)"]
    for rank in hang.missing:
        host = hosts[rank] if hosts else ""
        lines += [
            f"{name_of(rank)} on {host or socket.gethostname()} is missing: {hang.describe(rank)}",
            "",
        ]
        lines += [hang.stacks[rank] or "it wrote no stack", ""]
    if not hang.missing:
        lines.append("every rank waits for the others: is a task communicating on its own?")
    for rank in sorted(set(hang.beats) - set(hang.missing)):
        lines.append(f"{name_of(rank)} waits {hang.describe(rank)}")
    return "\n".join([*lines, f"the stacks of all ranks: {path}"])


def _report(fault: RankFault, ended: Ended, run_dir: Path) -> str:
    event = fault.event or {}
    step = f" at step {fault.step}" if fault.step is not None else ""
    who = f"{ended.name_of(fault.rank)} on {fault.host} failed first"
    if fault.alike:  # they all saw the same: who did it stands in the words
        who = f"ranks {_listed(fault.rank, *fault.alike)} ended the job together"
    if request := event.get("request"):  # one rank alone saw what cannot be, when others trained
        updates = f"{event['updates']} update{'s' * (event['updates'] != 1)}"
        return f"{who}{step}, after {updates}:\n{RequestError.from_data(request)}"
    words = _last_words(fault, run_dir)
    said = _said(fault, words)
    stacks = _stacks(fault, said, ended, run_dir)
    alone = callers_alone(said, stacks)
    if alone:  # whoever saw it may be one of those that did right
        who = f"rank {_listed(*alone)} called a collective that the others did not{step}"
        lines = [f"{who}; {ended.name_of(fault.rank)} saw it: {describe_cause(fault, words)}"]
    else:
        lines = [f"{who}{step}: {describe_cause(fault, words)}"]
    if words is not None:
        lines += ["", words.text, ""]
    elif said and (fault.rank in alone or not alone):
        lines += ["", folded(said.rstrip()), ""]
    lines += told_of_mismatch(said, fault.rank, stacks)
    known = {fault.rank, *fault.alike, *ended.spared, *alone}
    others = sorted(rank for rank in ended.exits if rank not in known)
    done = [rank for rank in others if ended.exits[rank].code == 0]
    victims = [rank for rank in others if rank not in done]
    if victims:
        lines.append(f"stopped because of it: rank {_listed(*victims)}")
    if ended.spared:
        lines.append(f"lost before it: {', '.join(map(ended.name_of, sorted(ended.spared)))}")
    lines.append(f"its output: {rank_log_path(run_dir, fault.rank)}")
    return "\n".join(lines)


def _said(fault: RankFault, words: LastWords | None) -> str:
    """The traceback with which a rank left, or the last of its log."""
    told = "" if words is None else f"{words.error}\n{words.text}"
    return (fault.event or {}).get("traceback") or told


def _stacks(fault: RankFault, said: str, ended: Ended, run_dir: Path) -> dict[int, str]:
    """Where all stood when a rank died that `said` so much, or the traceback with which they left.

    Those of which neither is known are not in it.
    """
    stacks = {fault.rank: said, **{rank: stand.stacks for rank, stand in ended.stands.items()}}
    attempt = None if fault.event is None else fault.event.get("attempt")
    for rank in ended.exits:
        for row in read_rows(rank_events_path(run_dir, rank)):
            is_of_this = attempt is None or row.get("attempt") == attempt
            if row["event"] == "failed" and rank != fault.rank and is_of_this:
                stacks[rank] = row["traceback"]
    return {rank: stack for rank, stack in stacks.items() if stack}


def rank_to_blame(fault: RankFault, ended: Ended, run_dir: Path) -> int:
    """The rank that failed, or the first of those that called a collective alone."""
    said = _said(fault, _last_words(fault, run_dir))
    return next(iter(callers_alone(said, _stacks(fault, said, ended, run_dir))), fault.rank)


def _last_words(fault: RankFault, run_dir: Path) -> LastWords | None:
    """What stands in its log, of a rank that a fault in native code ended: its own, not a kill."""
    if fault.event is not None or -fault.code not in CRASH_SIGNALS:
        return None
    words = last_words(rank_log_path(run_dir, fault.rank))
    return words if words.text else None


def left_out(beats: Sequence[Beat]) -> str:
    """The rank that left a collective out, where ranks are at different steps; else ""."""
    counts = {beat.rank: beat for beat in beats}
    short = ranks_waited_for(counts, set())
    if not short:
        return ""
    told = ", ".join(f"rank {b.rank} {b.collectives} up to step {b.step}" for b in beats)
    return f"rank {_listed(*short)} left one out: collectives made are {told}"


def _listed(*ranks: int) -> str:
    return ", ".join(map(str, sorted(ranks)))


def describe_cause(fault: RankFault, words: LastWords | None = None) -> str:
    """Why a rank ended, in its own words, in those of the kernel, or in the last of its log."""
    if fault.event is not None:
        cause = f"{fault.event['kind']}: {fault.event['message']}"
        said = "out of memory" if fault.kind == FaultKind.OUT_OF_MEMORY else fault.memory
        return f"{said}: {cause}" if said else cause
    if fault.code < 0:
        known = {number.value: number.name for number in signal.Signals}
        name = known.get(-fault.code, f"signal {-fault.code}")
        held = f"it held {format_bytes(fault.peak_bytes)} at most"
        if fault.memory:
            return f"{fault.memory} ({held})"
        left = "; it could leave no traceback" if words is None else f": {words.error}"
        return f"killed by {name}{left} ({held})"
    if fault.code == 0:
        return "it left with exit code 0 before the training was done: who calls os._exit?"
    return f"it left with exit code {fault.code} without a word"
