"""A terminal whose last lines are drawn over and over, while what was told scrolls above them.

It is written to and never waited for: a terminal that is halted, or slow, gets fewer pictures. The
cursor rests on the empty line below the picture, so what others write spoils none of it.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

USUAL = os.terminal_size((80, 24))
MOST_WAITING = 1000  # lines that are kept for a terminal that is halted
LAST_WORDS_S = 0.5


@dataclass(frozen=True)
class Line:
    """One line of the picture: its text with colours, and the cells that it takes."""

    text: str
    cells: int


class Terminal:
    """A terminal, opened once more so that writing to it can be refused; raises `OSError`."""

    def __init__(self, fd: int, encoding: str = "utf-8") -> None:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self._fd, self.encoding = os.open(os.ttyname(fd), flags), encoding
        self._told: deque[str] = deque(maxlen=MOST_WAITING)
        self._picture: Sequence[Line] = ()
        self._rest = b""

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines, as they are now."""
        size = os.get_terminal_size(self._fd)
        return size if size.columns and size.lines else USUAL

    def paint(self, told: Sequence[str], picture: Sequence[Line]) -> None:
        """Let `told` scroll by, and draw `picture` in the place of the last one."""
        self._told.extend(told)
        if not self._is_ours():
            picture = self._picture = ()
        if not self._write() or (picture == self._picture and not self._told):
            return
        lines = [*self._told, *(line.text for line in picture)]
        self._told.clear()
        erase, self._picture = self._erase(), picture
        text = erase + "".join(f"{line}\r\n" for line in lines)
        self._rest = text.encode(self.encoding, errors="replace")
        self._write()

    def forget(self) -> None:
        """Others may have written below the picture: it stays, and the next is drawn below."""
        self._picture = ()

    def _erase(self) -> str:
        """What goes back to the first line of the picture, and clears all below.

        A terminal that became narrower has broken its lines; each takes as many rows as it needs.
        """
        columns = self.size.columns
        rows = sum(max(1, -(-line.cells // columns)) for line in self._picture)
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""

    def _is_ours(self) -> bool:
        """Whether this job is in the foreground; else it only adds lines, as any job would."""
        with suppress(OSError):  # it is the terminal of another session
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        return True

    def _write(self) -> bool:
        """Write what the terminal takes now; returns whether that was all."""
        with suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        return not self._rest

    def close(self) -> None:
        """Leave the last picture; a terminal that takes nothing is left as it is."""
        deadline = time.monotonic() + LAST_WORDS_S
        try:
            while not self._write() and time.monotonic() < deadline:
                select.select([], [self._fd], [], LAST_WORDS_S)
        finally:
            os.close(self._fd)
