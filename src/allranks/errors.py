"""Every error that allranks raises on purpose, and the exit code each one leads to.

    AllranksError
    ├── RequestError    2   the request, the task or its data is wrong
    ├── ProgramError    1   the program failed while it ran
    │   └── PeerLost    1   ... because another rank went away: a victim, never the cause
    ├── PlaceError      3   the place failed: node, scheduler, network
    └── Interrupted   130   stopped from the keyboard or by a signal

A `RequestError` always says four things: what was asked, what was found, why it cannot be, and
what to do. Errors cross from a rank to the supervisor as plain data (`to_data`, `from_data`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

EXIT_DONE = 0
EXIT_PROGRAM_FAILED = 1
EXIT_BAD_REQUEST = 2
EXIT_PLACE_FAILED = 3
EXIT_DIFFERENCE_FOUND = 5
EXIT_INTERRUPTED = 130


class AllranksError(Exception):
    """The root: what a person reads is `str(error)`; the process ends with `exit_code`."""

    exit_code = EXIT_PROGRAM_FAILED


class RequestError(AllranksError):
    """Something was asked that cannot be done; the message has the four parts, each one line."""

    exit_code = EXIT_BAD_REQUEST

    def __init__(self, *, asked: str, found: str, why: str, do: str) -> None:
        super().__init__(asked, found, why, do)
        self.asked, self.found, self.why, self.do = asked, found, why, do

    def __str__(self) -> str:
        return f"asked: {self.asked}\nfound: {self.found}\nwhy:   {self.why}\ndo:    {self.do}"

    def to_data(self) -> dict[str, str]:
        """The four parts as a mapping that JSON can carry from a rank to the supervisor."""
        return {"asked": self.asked, "found": self.found, "why": self.why, "do": self.do}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RequestError:
        """The error that `to_data` described."""
        return cls(**{part: str(data[part]) for part in ("asked", "found", "why", "do")})


class ProgramError(AllranksError):
    """The program failed while it ran; the message is the first-fault report."""


class PeerLost(ProgramError):
    """A collective failed because another rank went away: this rank is a victim of the fault."""


class PlaceError(AllranksError):
    """The machine, the scheduler or the network could not do what was planned."""

    exit_code = EXIT_PLACE_FAILED


class Interrupted(AllranksError):
    """Stopped from the keyboard, or by a signal, before it was done."""

    exit_code = EXIT_INTERRUPTED


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, if any is near, and the whole list."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
