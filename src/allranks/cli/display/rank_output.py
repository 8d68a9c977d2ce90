"""The output of running ranks, shown while they run: read from their logs, printed line by line.

What is shown comes from files, so a reader that is slow, or a terminal that is halted, holds up
nobody: reading goes on where it stood. No control character of a script reaches the terminal; of a
progress bar that is drawn over and over in one line, the last state is shown.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

from allranks.errors import printable
from allranks.job.run_folder import rank_log_path
from allranks.launcher.scripts.plan import CommandPlan

MOST_AT_ONCE = 1 << 16
MOST_OF_A_WRITE = select.PIPE_BUF  # so much a pipe takes without making anybody wait
LONGEST_LINE = 1 << 16
PATIENCE_S = 10.0
A_MOMENT_S = 0.05
_STYLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")


class RankOutput:
    """The output of some ranks on standard output, each line behind its rank if there are more."""

    def __init__(self, shown: str) -> None:
        """`shown` are local ranks: "0,2", "all" or "none"."""
        self._shown = shown
        self._tails: dict[int, _LogTail] = {}
        self._with_rank = False
        self._rest = b""
        self._is_open = sys.stdout is not None  # a job may be started without one

    def started(self, plan: CommandPlan, run_dir: Path) -> None:
        """An attempt is about to start: from here on its output is shown."""
        wanted = {int(part) for part in self._shown.split(",") if part.isdigit()}
        for member in plan.topology.members:
            if self._shown == "all" or member.local_rank in wanted:
                self._tails.setdefault(member.rank, _LogTail(rank_log_path(run_dir, member.rank)))
        self._with_rank = len(self._tails) > 1

    def tick(self) -> None:
        """Show what is new, as far as the reader takes it now; does not go on for long."""
        until = time.monotonic() + A_MOMENT_S
        while self._write() and self._read() and time.monotonic() < until:
            pass
        self._write()

    def _read(self) -> bool:
        """Take what is new from the logs; whether there was any."""
        before = len(self._rest)
        for rank, tail in self._tails.items():
            self._add(rank, tail.lines())
        return len(self._rest) > before

    def close(self) -> str:
        """No rank is left: show the rest. Returns what to tell if the reader did not take it."""
        for tail in self._tails.values():
            tail.is_over = True
        deadline = time.monotonic() + PATIENCE_S
        while self._is_open and time.monotonic() < deadline:
            before = self._rest, [tail.position for tail in self._tails.values()]
            self.tick()
            if before != (self._rest, [tail.position for tail in self._tails.values()]):
                deadline = time.monotonic() + PATIENCE_S
            elif not self._rest:
                return ""
            else:
                select.select([], [sys.stdout], [], 0.1)
        return "" if not self._is_open else "nobody read all of the output: it stands in the logs"

    def _add(self, rank: int, lines: list[str]) -> None:
        if not self._is_open:
            return
        prefix = f"[rank {rank}] " if self._with_rank else ""
        encoding = sys.stdout.encoding or "utf-8"
        text = "".join(f"{prefix}{line}\n" for line in lines)
        self._rest += text.encode(encoding, errors="replace")

    def _write(self) -> bool:
        """Write what is waiting, as long as the reader takes it; whether nothing waits any more."""
        try:
            while self._rest and self._is_open:
                if not select.select([], [sys.stdout], [], 0)[1]:
                    return False
                written = os.write(sys.stdout.fileno(), self._rest[:MOST_OF_A_WRITE])
                self._rest = self._rest[written:]
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # nobody reads any more: the job goes on
            self._is_open, self._rest = False, b""
        return True


class _LogTail:
    """The whole lines of a log that are new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.position = 0
        self.is_over = False
        with suppress(OSError):  # a run folder that is resumed
            self.position = path.stat().st_size

    def lines(self) -> list[str]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self.position)
                read = file.read(MOST_AT_ONCE)
        except OSError:
            return []
        end = read.rfind(b"\n") + 1
        if not end and (len(read) == MOST_AT_ONCE or self.is_over):
            end = len(read)  # a line without an end
        self.position += end
        text = read[:end].decode(errors="replace").removesuffix("\n")
        return [_cleaned(line) for line in text.split("\n")] if end else []


def _cleaned(line: str) -> str:
    """As it would stand there at the end: without styles, and drawn over up to the last time."""
    plain = _STYLE.sub("", line).rstrip("\r").rpartition("\r")[2]
    return printable(plain[:LONGEST_LINE])
