"""A record that is not what its format says: which file, where in it, and what is done about it.

Every reader raises `BadRecord`, which ends the job; a reader that was told to skip hands it to its
`BadRecords` instead, which counts it and writes one line to stderr, the log of the rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from allranks.errors import RequestError

OnBadRecord = Literal["stop", "skip"]
LISTED = 100  # bad records that are listed and logged; the rest are only counted


class BadRecord(RequestError):
    """The record at `place` of `file` ("byte 1234", "member 7.jpg at byte 512") has a `problem`."""

    def __init__(self, file: str | Path, place: str, problem: str) -> None:
        self.file, self.place, self.problem = str(file), place, problem
        super().__init__(
            asked="to read the next record of the data",
            found=f"{file}, {place}: {problem}",
            why="it is not what its format says, and what would be learned from it nobody knows",
            do='mend the file or fetch it again; on_bad_record="skip" passes over such records',
        )
        self.args = (self.file, place, problem)  # so that it can be pickled


class BadRecords:
    """What a reader does with a bad record: raise it, or pass over it and remember.

    `count` is the number of different ones passed over in this process, `listed` the first
    hundred. Several threads may use it at once.
    """

    def __init__(self, policy: OnBadRecord) -> None:
        if policy not in ("stop", "skip"):
            raise RequestError(
                asked=f"on_bad_record = {policy!r}",
                found=repr(policy),
                why="a bad record ends the job, or is passed over and counted",
                do='on_bad_record="stop" or on_bad_record="skip"',
            )
        self.policy = policy
        self.listed: list[BadRecord] = []
        self._known: dict[tuple[str, str], BadRecord] = {}

    @property
    def count(self) -> int:
        return len(self._known)

    def pass_over(self, error: BadRecord) -> None:
        """Raise `error`, or note it the first time that it is met."""
        if self.policy == "stop":
            raise error
        noted = BadRecord(error.file, error.place, error.problem)  # the error holds its traceback
        if self._known.setdefault((error.file, error.place), noted) is not noted:
            return
        if len(self.listed) < LISTED:
            self.listed.append(noted)
            print(f"bad record passed over: {error.found}", file=sys.stderr, flush=True)
