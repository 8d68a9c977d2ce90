"""Every error that allranks raises on purpose, and the exit code each one leads to.

    AllranksError
    ├── RequestError    2   the request, the task or its data is wrong
    ├── ProgramError    1   the program failed while it ran
    │   ├── PeerLost    1   ... because another rank went away: a victim, never the cause
    │   ├── BadStep     1   ... because a step had a loss or gradient that must not be applied
    │   ├── ReplicasDiffer 1 .. because ranks that must hold the same weights do not
    │   ├── AuditFailed 1 .... because a shard computed again differs, and --audit ends the job
    │   ├── FollowsRanks 1 .... because its result follows the number of ranks, and --witness stop
    │   └── NotEqual    5   ... its first check found a difference from one process
    ├── PlaceError      3   the place failed: node, scheduler, network
    ├── Stopped         4   stopped early, after a checkpoint
    └── Interrupted   130   stopped from the keyboard, or before there was a checkpoint

A `RequestError` always says four things: what was asked, what was found, why it cannot be, and
what to do. Errors cross from a rank to the supervisor as plain data (`to_data`, `from_data`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

LONGEST_PART = 2000  # characters of one part of a request's error that are shown
LONGEST_QUOTE = 200  # characters of another's error in one of ours
LONGEST_NAME = 60  # no name of ours is longer, and looking for the nearest takes its time

EXIT_DONE = 0
EXIT_PROGRAM_FAILED = 1
EXIT_BAD_REQUEST = 2
EXIT_PLACE_FAILED = 3
EXIT_STOPPED = 4
EXIT_DIFFERENCE_FOUND = 5
EXIT_UNDECIDED = 6
EXIT_INTERRUPTED = 130


class FaultKind(StrEnum):
    """The kind of a failure, for programs; messages of errors are for people."""

    PROGRAM = "program"
    REQUEST = "request"
    PLACE = "place"
    HANG = "hang"
    PEER_LOST = "peer_lost"
    NOT_AT_THE_SAME_STEP = "not_at_the_same_step"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    CHILD_KILLED = "child_killed"
    TWO_TYPES = "two_types"
    NOT_DETERMINISTIC = "not_deterministic"
    SILENT_CORRUPTION = "silent_corruption"


class AllranksError(Exception):
    """The base class: `str(error)` is its message, and the process ends with `exit_code`."""

    exit_code = EXIT_PROGRAM_FAILED
    fault_kind = FaultKind.PROGRAM
    passing = True
    """Whether another attempt may succeed."""
    says_all = False
    """Whether the message is complete: no line of code is at fault, so no traceback is shown."""


class RequestError(AllranksError):
    """A request that cannot be fulfilled; the message has the four parts, each one line."""

    exit_code = EXIT_BAD_REQUEST
    fault_kind = FaultKind.REQUEST
    passing = False
    says_all = True

    def __init__(self, *, asked: str, found: str, why: str, do: str) -> None:
        super().__init__(asked, found, why, do)
        self.asked, self.found, self.why, self.do = asked, found, why, do

    def __str__(self) -> str:
        asked, found, why, do = (_one_line(part) for part in self.to_data().values())
        return f"asked: {asked}\nfound: {found}\nwhy:   {why}\ndo:    {do}"

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of a traceback: no line of code is at fault."""
        return ["this cannot be done", *str(self).splitlines()]

    def to_data(self) -> dict[str, str]:
        """The four parts as a mapping that JSON can carry from a rank to the supervisor."""
        return {"asked": self.asked, "found": self.found, "why": self.why, "do": self.do}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RequestError:
        """The error that `to_data` described."""
        return cls(**{part: str(data[part]) for part in ("asked", "found", "why", "do")})


class ProgramError(AllranksError):
    """The program failed while it ran; the message is the first-fault report.

    `cause` is one line about why the first rank failed, if one did.
    """

    def __init__(
        self, message: str = "", *, fault_kind: FaultKind | None = None, cause: str = ""
    ) -> None:
        super().__init__(message)
        self.fault_kind = fault_kind or type(self).fault_kind
        self.cause = cause

    def with_more(self, line: str) -> ProgramError:
        """The same error with another line at its end; that may be empty."""
        text = f"{self}\n{line}".rstrip()
        return ProgramError(text, fault_kind=self.fault_kind, cause=self.cause)


class PeerLost(ProgramError):
    """A collective failed because another rank went away: this rank is a victim of the fault."""

    fault_kind = FaultKind.PEER_LOST


class BadStep(ProgramError):
    """A step was bad and was not applied. Random numbers are keyed, so it would be bad again."""

    passing = False
    says_all = True


class ReplicasDiffer(ProgramError):
    """Ranks that must hold the same weights do not: broken hardware, or a race. A passing fault."""

    says_all = True


class AuditFailed(ProgramError):
    """A shard computed again differs: silent data corruption, and --audit ends the job."""

    fault_kind = FaultKind.SILENT_CORRUPTION
    passing = False
    says_all = True


class ComputesWrongly(AuditFailed):
    """This rank is the one that computed a shard wrongly, and leaves; the others go on."""


class FollowsRanks(ProgramError):
    """The result depends on the number of ranks, and --witness stop ends the job."""

    passing = False
    says_all = True


class NotEqual(ProgramError):
    """The first check of a job found a difference from one process; nothing was trained."""

    exit_code = EXIT_DIFFERENCE_FOUND
    passing = False
    says_all = True


class PlaceError(AllranksError):
    """The machine, the scheduler or the network could not do what was planned."""

    exit_code = EXIT_PLACE_FAILED
    fault_kind = FaultKind.PLACE


class Stopped(AllranksError):
    """The job stopped early, as it was asked to; it can resume from the checkpoint it committed."""

    exit_code = EXIT_STOPPED


class Interrupted(AllranksError):
    """Stopped from the keyboard, or by a signal, before it was done."""

    exit_code = EXIT_INTERRUPTED


def stopped_by(reason: str, text: str) -> Stopped | Interrupted:
    """The error of a job that stopped early with its state saved: `Interrupted` after Ctrl-C."""
    return Interrupted(text) if reason == "SIGINT" else Stopped(text)


def _one_line(part: str) -> str:
    """One part of a message, shortened and printable: users may write anything."""
    cut = part if len(part) <= LONGEST_PART else f"{part[:LONGEST_PART]}… ({len(part)} characters)"
    return printable(cut)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, if any is near, and the whole list."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:LONGEST_NAME], names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"


def printable(line: str) -> str:
    """A line that cannot steer a terminal: control characters are shown, not sent."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line)


class Explained:
    """A context that replaces a matching error of torch with `refusal(its first line)`.

    It may be entered again and again, as around every step.
    """

    def __init__(self, pattern: re.Pattern[str], refusal: Callable[[str], RequestError]) -> None:
        self._pattern, self._refusal = pattern, refusal

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError):
            self.explain(error)

    def explain(self, error: RuntimeError) -> None:
        """Raise the refusal if the error matches."""
        if self._pattern.search(str(error)):
            raise self._refusal(str(error).splitlines()[0][:LONGEST_QUOTE]) from error
