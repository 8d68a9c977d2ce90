"""The first-fault report: which rank failed first, where, and why; victims are only listed.

Its evidence is the exits, in the order in which the kernel reported them, and the `failed` events
that ranks write before they leave. A rank whose collective broke because it lost a peer says so
(`peer_lost`); it is blamed only if no other rank failed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from allranks.errors import FaultKind, PlaceError, ProgramError, RequestError
from allranks.job.run_folder import rank_events_path, rank_log_path, read_rows
from allranks.job.units import format_bytes
from allranks.launcher.heartbeat import Beat
from allranks.launcher.processes.process import Exit, is_said
from allranks.launcher.supervisor import Ended, Hang, place_of_users_collective, ranks_waited_for

# --- folding -------------------------------------------------------------------------------------
# A traceback for users: the frames of their own code, and the number of other frames. Pure.
#
# The rank's events keep the whole traceback.


_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+, in ')
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(?P<package>[^/.]+)")
_STANDARD = re.compile(r"/lib/python3[^/]*/|^<frozen ")


def folded(traceback: str) -> str:
    """The traceback without frames of installed packages; unchanged if it has no others."""
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
        zip(lines, owners, strict=True), lambda pair: pair[1] not in (USER, ROOT)
    ):
        part = list(group)
        if not is_folded:
            shown += [line for line, _ in part]
            continue
        count = sum(_FRAME.match(line) is not None for line, _ in part)
        packages = dict.fromkeys(owner for _, owner in part)
        shown.append(f"  … {count} frame{'s' if count > 1 else ''} of {', '.join(packages)}")
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
# The end of a process's log: the cause of its end, or the loss of a peer.
#
# A script that is run unchanged leaves only its output and its exit code. The report shows the last
# traceback of the output, or its last lines. A process that lost a connection is a victim.


MOST_BYTES = 1 << 17
MOST_LINES = 60
FEW_LINES = 12
TRACEBACK = "Traceback (most recent call last):"
NO_FRAME = "<no Python frame>"
AT_EXIT = "terminate called without an active exception"
OF_GLOO = (
    "Python was ending while another thread, as Gloo has them, freed its tensors"
    " (docs/failures_in_detail.md has two lines that avoid it)"
)
EXTENSIONS = "Extension modules: "  # which faulthandler adds
CURRENT = "Current thread 0x"
FATAL = ("Fatal Python error:", CURRENT, "Thread 0x")
_RANK = re.compile(r"^\[(?:rank)?\d+\]:\s?")  # torch puts it before each line of a traceback
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")


@dataclass(frozen=True)
class LastWords:
    """`text` is the last traceback, or the last output; `error` is the line that says why.

    `is_victim`: the process lost its connection to another one.
    """

    text: str
    error: str
    is_victim: bool
    is_out_of_memory: bool


def stacks_in(log: Path, start: int = 0) -> str:
    """All stacks that a fatal signal left, that of the running thread first."""
    lines = _lines(log, start)
    first = next((i for i, line in enumerate(lines) if line.startswith(FATAL)), len(lines))
    return "\n".join(_current_first(lines[first:]))


def last_words(log: Path, start: int = 0) -> LastWords:
    """The last traceback, or the last lines, that `log` has from byte `start` on."""
    lines = _lines(log, start)
    tail = _last_traceback(lines) or lines[-FEW_LINES:]
    error = _thrown(lines) if tail[:1] and tail[0].startswith(FATAL) else ""
    error = error or _error_of(tail)
    text = "\n".join(lines[-MOST_LINES:]) if not _is_traceback(tail) else "\n".join(tail)
    return LastWords(
        "\n".join(tail),
        error,
        is_said(FaultKind.PEER_LOST, error if _is_traceback(tail) and error else text),
        is_said(FaultKind.OUT_OF_MEMORY, text),
    )


def _lines(log: Path, start: int) -> list[str]:
    """The last non-empty lines, without torch's rank prefixes and progress bars."""
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

    If the signal came while the interpreter shut down, the traceback before it is the cause.
    """
    fatal = next((i for i, line in enumerate(lines) if line.startswith(FATAL)), len(lines))
    stacks, before = _current_first(lines[fatal:])[:MOST_LINES], lines[:fatal]
    if not any(NO_FRAME in line for line in stacks):
        return stacks or _python_traceback(before)
    return _python_traceback(before) or stacks


def _current_first(lines: list[str]) -> list[str]:
    """The stacks of all threads, that of the running thread first."""
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
    """The message of an uncaught C++ exception, or of what ended a thread; "" if there was none."""
    messages = [line.partition("what():")[2].strip() for line in lines if "what():" in line]
    if not messages and AT_EXIT in lines and any(NO_FRAME in line for line in lines):
        return OF_GLOO
    return messages[-1] if messages else ""


def _error_of(lines: list[str]) -> str:
    """The line that names the error: the last one that is not part of a stack."""
    if lines and lines[0].startswith(FATAL[0]):
        return lines[0]
    return next((line for line in reversed(lines) if not line.startswith(" ")), "")


CRASH_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
GOOD_ENDS = ("done", "stopped", "described", "left")


@dataclass(frozen=True)
class RankFault:
    """One rank that did not end well; `event` is its own `failed` event, if it wrote one.

    `memory` is the kernel's evidence that memory ran out, `beat` its last heartbeat; `alike` are
    the other ranks that failed with the same error. `lost_a_peer`: it wrote no event, and its log
    says that a collective broke (NCCL's watchdog ends a process by SIGABRT).
    """

    rank: int
    exit: Exit
    monotonic: float
    event: dict[str, Any] | None
    memory: str = ""
    beat: Beat | None = None
    alike: tuple[int, ...] = ()
    lost_a_peer: bool = False

    @property
    def kind(self) -> FaultKind:
        """The kind of the fault, from the rank's own event."""
        return FaultKind.PROGRAM if self.event is None else FaultKind(self.event["fault_kind"])

    @property
    def words(self) -> tuple[Any, ...] | None:
        """Kind, message and step of the rank's own event; `None` if it wrote none."""
        event = self.event
        return None if event is None else (event["kind"], event["message"], event.get("step"))

    @property
    def step(self) -> int | None:
        """The step of the fault, if it is known."""
        if self.event is not None:
            return self.event.get("step")
        return self.beat.step if self.beat is not None and self.beat.step >= 0 else None

    @property
    def is_victim(self) -> bool:
        return self.lost_a_peer or (self.event is not None and bool(self.event.get("peer_lost")))

    @property
    def is_passing(self) -> bool:
        """Whether another attempt may succeed: false after a bad request or a bad step."""
        return self.event is None or bool(self.event.get("passing", True))

    def repeats(self, other: RankFault | None) -> bool:
        """Whether the same fault ended the attempt before, with no step between."""
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

    A rank ended well if it wrote so in this attempt, whatever happened to its process afterwards.
    Without `must_say_so` an exit code of 0 is enough.
    """
    every = (
        _fault_of(rank, ended, run_dir, attempt, memory, must_say_so)
        for rank in ended.exits
        if rank not in ended.spared
    )
    last = {beat.rank: beat for beat in beats}
    furthest = max(beats, key=lambda beat: beat.step, default=None)
    faults = [
        dataclasses.replace(f, beat=_beat_of(f, last.get(f.rank), furthest))
        for f in every
        if f is not None
    ]
    first = min(faults, key=lambda fault: (fault.is_victim, fault.monotonic), default=None)
    if first is None or first.words is None or first.is_victim:
        return first
    alike = tuple(f.rank for f in faults if f.rank != first.rank and f.words == first.words)
    return dataclasses.replace(first, alike=alike)


def _beat_of(fault: RankFault, last: Beat | None, furthest: Beat | None) -> Beat | None:
    """The last beat of a rank; for a rank of a lost node without one, the furthest of the job."""
    is_behind = last is None or last.step < 0
    return furthest if fault.exit.lost and is_behind else last


def _fault_of(
    rank: int, ended: Ended, run_dir: Path, attempt: int, memory: str, must_say_so: bool
) -> RankFault | None:
    """How one rank failed, by its exit and its own event; `None` if it ended well."""
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
        exit_,
        min(exit_.monotonic, said_at),
        event,
        counted if exit_.code == -signal.SIGKILL or lost_a_child else "",
        lost_a_peer=event is None
        and exit_.code == -signal.SIGABRT
        and last_words(rank_log_path(run_dir, rank)).is_victim,
    )


def ended_well(events: list[dict[str, Any]]) -> bool:
    """Whether these events say that the rank completed its work, or stopped as asked."""
    return any(row["event"] in GOOD_ENDS for row in events)


def events_of(run_dir: Path, rank: int, attempt: int) -> list[dict[str, Any]]:
    """The events that a rank wrote in one attempt, since it joined if it did not begin with it."""
    events: list[dict[str, Any]] = []
    for row in read_rows(rank_events_path(run_dir, rank)):
        if row.get("attempt", 0) == attempt:
            if row["event"] == "joins":
                events.clear()
            events.append(row)
    return events


def last_failure(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event `failed` among these; empty if there is none."""
    return next((row for row in reversed(events) if row["event"] == "failed"), {})


def user_error(
    fault: RankFault, ended: Ended, run_dir: Path
) -> RequestError | ProgramError | PlaceError:
    """The error for this fault: a bad request if it came before the first update, or a report."""
    if fault.exit.lost:
        return PlaceError(_lost_node(fault, ended))
    event = fault.event or {}
    if event.get("request") and not event.get("updates"):
        return RequestError.from_data(event["request"])
    report = _report(fault, ended, run_dir)
    return ProgramError(
        report, fault_kind=fault.kind, cause=describe_cause(fault).partition("\n")[0]
    )


def _lost_node(fault: RankFault, ended: Ended) -> str:
    """The lost node, its ranks, and the ranks that were stopped because of it."""
    host = fault.exit.host
    on_it = [rank for rank, exit_ in ended.exits.items() if exit_.lost and exit_.host == host]
    others = [rank for rank in ended.exits if rank not in on_it]
    step = f" at step {fault.step}" if fault.step is not None else ""
    names = [ended.name_of(rank) for rank in sorted(on_it)]
    have_roles = names != [f"rank {rank}" for rank in sorted(on_it)]
    processes = ", ".join(names) if have_roles else f"rank {listed(*on_it)}"
    lines = [f"node {host} is lost{step}, with {processes}: {fault.exit.lost}"]
    if others:
        lines.append(f"stopped because of it: rank {listed(*others)}")
    return "\n".join(lines)


def hang_report(
    hang: Hang,
    run_dir: Path,
    attempt: int,
    hosts: Sequence[str] = (),
    name_of: Callable[[int], str] = "rank {}".format,
) -> str:
    """Which ranks are missing, where they are, and which ranks wait; all stacks go to a file."""
    path = run_dir / "logs" / f"hang-{attempt}.txt"
    with suppress(OSError):  # a full disk must not hide the report
        path.write_text(f"{hang}\n")
    lines = [f"no sign of life for {hang.timeout_s:g} s (--hang-timeout)"]
    for rank in hang.missing:
        host = hosts[rank] if rank < len(hosts) else ""  # one that has joined is not there
        lines += [
            f"{name_of(rank)} on {host or socket.gethostname()} is missing: {hang.describe(rank)}",
            "",
        ]
        lines += [hang.stacks[rank] or "it wrote no stack", ""]
    if not hang.missing:
        hint = ", or do two nodes not reach each other" if len({*hosts}) > 1 else ""
        lines.append(f"every rank waits for the others: is a task communicating on its own{hint}?")
    for rank in sorted(set(hang.beats) - set(hang.missing)):
        lines.append(f"{name_of(rank)} waits {hang.describe(rank)}")
    return "\n".join([*lines, f"the stacks of all ranks: {path}"])


def _report(fault: RankFault, ended: Ended, run_dir: Path) -> str:
    event = fault.event or {}
    step = f" at step {fault.step}" if fault.step is not None else ""
    subject = f"{ended.name_of(fault.rank)} on {fault.exit.host} failed first"
    if fault.alike:  # all saw the same fault; its message names the cause
        subject = f"ranks {listed(fault.rank, *fault.alike)} ended the job together"
    if request := event.get("request"):  # one rank alone saw what cannot be, when others trained
        updates = f"{event['updates']} update{'s' * (event['updates'] != 1)}"
        return f"{subject}{step}, after {updates}:\n{RequestError.from_data(request)}"
    words = _last_words(fault, run_dir)
    evidence = _evidence(fault, words)
    stacks = _stacks(fault, evidence, ended, run_dir)
    alone = callers_alone(evidence, stacks)
    if alone:  # the rank that reports the mismatch may not have caused it
        subject = f"rank {listed(*alone)} called a collective that the others did not{step}"
        lines = [f"{subject}; {ended.name_of(fault.rank)} saw it: {describe_cause(fault, words)}"]
    else:
        lines = [f"{subject}{step}: {describe_cause(fault, words)}"]
    if words is not None:
        lines += ["", words.text, ""]
    elif evidence and (fault.rank in alone or not alone):
        lines += ["", folded(evidence.rstrip()), ""]
    lines += describe_mismatch(evidence, fault.rank, stacks)
    known = {fault.rank, *fault.alike, *ended.spared, *alone}
    others = sorted(rank for rank in ended.exits if rank not in known)
    done = [rank for rank in others if ended.exits[rank].code == 0]
    victims = [rank for rank in others if rank not in done]
    if victims:
        lines.append(f"stopped because of it: rank {listed(*victims)}")
    if ended.spared:
        lines.append(f"lost before it: {', '.join(map(ended.name_of, sorted(ended.spared)))}")
    lines.append(f"its output: {rank_log_path(run_dir, fault.rank)}")
    return "\n".join(lines)


def _evidence(fault: RankFault, words: LastWords | None) -> str:
    """The traceback of a rank's event, or the end of its log."""
    tail = "" if words is None else f"{words.error}\n{words.text}"
    return (fault.event or {}).get("traceback") or tail


def _stacks(fault: RankFault, evidence: str, ended: Ended, run_dir: Path) -> dict[int, str]:
    """The stack or the final traceback of each rank, if known; `evidence` is that of `fault`."""
    stacks = {fault.rank: evidence, **{rank: stand.stacks for rank, stand in ended.stands.items()}}
    attempt = None if fault.event is None else fault.event.get("attempt")
    for rank in ended.exits:
        for row in read_rows(rank_events_path(run_dir, rank)):
            is_of_this = attempt is None or row.get("attempt") == attempt
            if row["event"] == "failed" and rank != fault.rank and is_of_this:
                stacks[rank] = row["traceback"]
    return {rank: stack for rank, stack in stacks.items() if stack}


def rank_to_blame(fault: RankFault, ended: Ended, run_dir: Path) -> int:
    """The rank that failed, or the first of those that called a collective alone."""
    evidence = _evidence(fault, _last_words(fault, run_dir))
    return next(iter(callers_alone(evidence, _stacks(fault, evidence, ended, run_dir))), fault.rank)


def _last_words(fault: RankFault, run_dir: Path) -> LastWords | None:
    """The end of the log of a rank that crashed in native code; `None` if it was killed."""
    if fault.event is not None or -fault.exit.code not in CRASH_SIGNALS:
        return None
    words = last_words(rank_log_path(run_dir, fault.rank))
    return words if words.text else None


def skipped_collective(beats: Sequence[Beat]) -> str:
    """Names the rank that skipped a collective, if ranks are at different steps; else ""."""
    counts = {beat.rank: beat for beat in beats}
    short = ranks_waited_for(counts, set())
    if not short:
        return ""
    counted = ", ".join(f"rank {b.rank} {b.collectives} up to step {b.step}" for b in beats)
    return f"rank {listed(*short)} left one out: collectives made are {counted}"


def listed(*ranks: int) -> str:
    """`0, 3, 4`"""
    return ", ".join(map(str, sorted(ranks)))


def name_of_signal(number: int) -> str:
    """`SIGKILL`, or `signal 35`."""
    known = {s.value: s.name for s in signal.Signals}
    return known.get(number, f"signal {number}")


def describe_cause(fault: RankFault, words: LastWords | None = None) -> str:
    """Why a rank ended, by its own event, by the kernel, or by the end of its log."""
    if fault.event is not None:
        cause = f"{fault.event['kind']}: {fault.event['message']}"
        memory = "out of memory" if fault.kind == FaultKind.OUT_OF_MEMORY else fault.memory
        return f"{memory}: {cause}" if memory else cause
    if fault.exit.code < 0:
        peak = f"it held {format_bytes(fault.exit.peak_bytes)} at most"
        if fault.memory:
            return f"{fault.memory} ({peak})"
        ending = "; it could leave no traceback" if words is None else f": {words.error}"
        return f"killed by {name_of_signal(-fault.exit.code)}{ending} ({peak})"
    if fault.exit.code == 0:
        return "it left with exit code 0 before the training was done: who calls os._exit?"
    return f"it left with exit code {fault.exit.code} without a word"


# --- mismatch ------------------------------------------------------------------------------------
# Ranks that called different collectives: where each rank was when one failed because of it.
#
# In shared memory each rank reports the collective of the other. Gloo ends the rank that gets a
# message of another size than it expects, which is seldom the rank to blame. The other ranks write
# their stacks before they are stopped. Pure.


ENGINES = "one of the engine"


def callers_alone(message: str, stacks: Mapping[int, str]) -> dict[int, str]:
    """Rank -> line of user code, for ranks whose user code called a collective the others did not.

    Empty unless `message` tells of a mismatch, or if user code called it on every rank.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, message):
        return {}
    places = {rank: place_of_users_collective(stack) for rank, stack in sorted(stacks.items())}
    callers = {rank: place for rank, place in places.items() if place}
    return callers if len(callers) < len(places) else {}


def describe_mismatch(message: str, rank: int, stacks: Mapping[int, str]) -> list[str]:
    """Lines about a mismatch: the ranks in another collective, or other sizes in the same one.

    `message` is the output of `rank`, which died; `stacks` has the traceback with which each rank
    left, or the stack where it waited.
    """
    if not is_said(FaultKind.COLLECTIVE_MISMATCH, message):
        return []
    if alone := callers_alone(message, stacks):
        lines = [f"rank {r} called it: {place}" for r, place in alone.items()]
        return [*lines, f"the others were in {ENGINES}: every rank calls a collective, or none"]
    places = {r: place_of_users_collective(stack) for r, stack in stacks.items()}
    place_of_rank = places.pop(rank, "")
    odd = {r: place for r, place in sorted(places.items()) if place != place_of_rank}
    if place_of_rank and not odd:
        return [
            f"rank {rank} called it: {place_of_rank}: does every rank call it, in the same place?"
        ]
    if not odd:
        return [
            "the ranks met in collectives of different sizes: has one of them a model of another "
            "shape, or one collective more?"
        ]
    return [f"rank {r} was in another collective: {place or ENGINES}" for r, place in odd.items()]
