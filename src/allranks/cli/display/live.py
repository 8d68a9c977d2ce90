"""The live display of a job on a terminal: one picture that is drawn over, lines that scroll above.

`Picture` is what is drawn of a `FollowedJob`, for rich and at any width, so a notebook can show it
too. It has one line for all ranks that agree, and one for each rank with an anomaly. What is not
known is left out: no end of the training is guessed.
"""

from __future__ import annotations

import io
import itertools
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment, Segments
from rich.text import Text

from allranks.catalog import load
from allranks.cli.display.following import Anomaly, FollowedJob, Follower, evaluation_in_words
from allranks.cli.display.progress import MOST_OF_A_LINE, ProgressDisplay, opening_words
from allranks.errors import printable
from allranks.job.units import format_count
from allranks.launcher.plan import LaunchPlan

# --- terminal ------------------------------------------------------------------------------------
# A terminal whose last lines are drawn over and over, while what was told scrolls above them.
#
# It is written to and never waited for: a terminal that is halted, or slow, gets fewer pictures.
# The cursor rests on the empty line below the picture, so what others write spoils none of it.


USUAL = os.terminal_size((80, 24))
MOST_WAITING = 1000  # lines that are kept for a terminal that is halted
LAST_WORDS_S = 0.5


@dataclass(frozen=True)
class PictureLine:
    """One line of the picture: its text with colours, and the cells that it takes."""

    text: str
    cells: int


class Terminal:
    """A terminal, opened once more so that writing to it can be refused; raises `OSError`."""

    def __init__(self, fd: int, encoding: str = "utf-8") -> None:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self._fd, self.encoding = os.open(os.ttyname(fd), flags), encoding
        self._pending: deque[str] = deque(maxlen=MOST_WAITING)
        self._picture: Sequence[PictureLine] = ()
        self._rest = b""

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines, as they are now."""
        size = os.get_terminal_size(self._fd)
        return size if size.columns and size.lines else USUAL

    def paint(self, output: Sequence[str], picture: Sequence[PictureLine]) -> None:
        """Let `output` scroll by, and draw `picture` in the place of the last one."""
        self._pending.extend(output)
        if not self._is_ours():
            picture = self._picture = ()
        if not self._write() or (picture == self._picture and not self._pending):
            return
        lines = [*self._pending, *(line.text for line in picture)]
        self._pending.clear()
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


RATE_OVER_S = 5.0
SUSPENDED_S = 3.0  # between two ticks: the shell may have written meanwhile
QUIET_S = 10.0  # without a step, before it is shown
WIDEST = 100
NARROW = 50  # below, a line that goes on does not begin under the first
LABEL = 11
GAP = "  "
MOST_ANOMALIES = 8
WARNING = "yellow"
UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


@dataclass(frozen=True)
class Picture:
    """What is drawn of a job."""

    state: FollowedJob

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, width = self.state, min(options.max_width, WIDEST)
        if state.total_steps:
            done = min(1.0, (state.step or 0) / state.total_steps)
            yield _label(f"{done:.0%}")
            yield ProgressBar(
                total=1.0,
                completed=done,
                width=max(1, width - LABEL),
                complete_style="cyan",
                finished_style="green",
            )
            yield Segment.line()
        yield from _packed(_ranks(state), _measures(state), width)
        if state.quiet_s > QUIET_S:
            yield _line("", Text(f"no step for {_duration(state.quiet_s)}", WARNING))
        if state.evaluation is not None:
            it = state.evaluation
            yield _line("evaluated", _clean(evaluation_in_words(it.step, it.metrics, it.best)))
        if state.saved_step is not None:
            yield _line("saved", Text(f"after step {state.saved_step}"))
        yield from _anomalies(state.anomalies)


def _ranks(state: FollowedJob) -> str:
    """Whom the measures are of."""
    if not state.agree:
        return "rank 0"
    return "1 rank" if state.ranks == 1 else f"{state.ranks} ranks"


def _measures(state: FollowedJob) -> Iterator[str]:
    """What is measured of the training, the weightiest first."""
    row = state.row
    if row is None:
        yield "starting"
    else:
        of = f" of {state.total_steps}" if state.total_steps else ""
        yield f"step {state.step}{of}"
        epochs = f" of {state.epochs}" if state.epochs else ""
        yield f"epoch {row['epoch'] + 1}{epochs}"
        yield f"loss {float(row['loss']):.4f}"
        yield f"learning rate {float(row['learning_rate']):.3g}"
    if state.samples_per_s is not None:
        yield f"{format_count(state.samples_per_s)} samples/s"
    yield f"{_duration(state.elapsed_s)} so far"
    if state.seconds_left is not None:
        yield f"ETA {_duration(state.seconds_left)}"


def _anomalies(anomalies: tuple[Anomaly, ...]) -> Iterator[Text]:
    """A line for each; all of them were printed in full when they came."""
    for anomaly in anomalies[:MOST_ANOMALIES]:
        often = f" ({anomaly.times} times)" if anomaly.times > 1 else ""
        subject = "the job" if anomaly.rank is None else f"rank {anomaly.rank}"
        yield _line(subject, _clean(anomaly.problem, often), WARNING)
    if len(anomalies) > MOST_ANOMALIES:
        yield _line("", Text(f"and {len(anomalies) - MOST_ANOMALIES} more, told above"))


def _packed(label: str, items: Iterable[str], width: int) -> Iterator[Text]:
    """The items one after the other, in as many lines as they need; none is broken."""
    lines: list[str] = []
    indent = LABEL if width >= NARROW else len(GAP)
    for item in items:
        room = width - (indent if len(lines) > 1 else LABEL)
        if lines and cell_len(lines[-1]) + len(GAP) + cell_len(item) <= room:
            lines[-1] += GAP + item
        else:
            lines.append(item)
    yield _line(label, Text(lines[0]))
    for line in lines[1:]:
        yield Text(" " * indent + line, no_wrap=True, overflow="ellipsis")


def _line(label: str, content: Text, style: str = "bold") -> Text:
    """One line; what does not fit is cut."""
    return Text.assemble(_label(label, style), content, no_wrap=True, overflow="ellipsis")


def _label(label: str, style: str = "bold") -> Text:
    return Text(f"{label:<{LABEL}}", style, end="")


def _clean(*parts: str) -> Text:
    """Words of users and of errors, which steer no terminal."""
    return Text(printable("".join(parts)[:MOST_OF_A_LINE].replace("\t", " ")))


def _duration(seconds: float) -> str:
    """`45s`, `1m23s`, `2h05m`, `3d04h`: the two largest units."""
    whole = round(seconds)
    for (large, unit), (small, below) in itertools.pairwise(UNITS):
        if whole >= large:
            return f"{whole // large}{unit}{whole % large // small:02}{below}"
    return f"{whole}s"


class Display(ProgressDisplay):
    """Shows a job on a terminal."""

    every_s = 0.5

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal
        self._pending: list[str] = []
        self._ticked = 0.0

    def started(self, plan: LaunchPlan) -> None:
        self._follower = Follower(plan, RATE_OVER_S)
        self._pending = opening_words(plan)

    def tick(self) -> None:
        now, before = time.monotonic(), self._ticked
        self._ticked = now
        if now - before > SUSPENDED_S:
            self._terminal.forget()
        super().tick()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._terminal.close()

    def _show(self, follower: Follower) -> None:
        lines = [*self._pending, *follower.look()]
        self._pending = []
        picture = drawn(Picture(follower.state), self._terminal)
        self._terminal.paint([printable(line[:MOST_OF_A_LINE]) for line in lines], picture)


def drawn(picture: Picture, terminal: Terminal) -> list[PictureLine]:
    """The lines of a picture in the colours and the size of a terminal, one column kept free."""
    size = terminal.size
    with io.TextIOWrapper(io.BytesIO(), encoding=terminal.encoding) as paper:
        console = Console(
            file=paper, force_terminal=True, width=max(1, size.columns - 1), height=size.lines
        )
        lines = console.render_lines(picture, pad=False)[: max(1, size.lines - 1)]
        return [PictureLine(_text(console, line), Segment.get_line_length(line)) for line in lines]


def _text(console: Console, line: list[Segment]) -> str:
    with console.capture() as captured:
        console.print(Segments(line), end="", soft_wrap=True)
    return captured.get()


def open_display(stderr: TextIO) -> Display:
    """The display on the terminal that `stderr` is; raises `OSError` if it cannot be opened."""
    return Display(Terminal(stderr.fileno(), stderr.encoding or "utf-8"))


# --- notebook ------------------------------------------------------------------------------------
# A display among the outputs of the cells of a notebook.
#
# Nothing of IPython is imported: where it runs, it is there.


MOST_TOLD = 200  # lines above the picture; the run folder has all
PAGE = '<pre style="line-height: normal">{code}</pre>'
_displays = itertools.count(1)


def shell() -> Any:
    """The IPython that runs this process, or `None`."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def has_outputs() -> bool:
    """Whether cells have outputs that can be drawn over: in a notebook, not on a terminal."""
    return getattr(shell(), "kernel", None) is not None


class NotebookDisplay(ProgressDisplay):
    """Shows a job as one output of the cell that launched it: printed lines, and the picture."""

    every_s = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=MOST_TOLD)
        self._id = f"allranks-{os.getpid()}-{next(_displays)}"
        self._is_shown = False

    def started(self, plan: LaunchPlan) -> None:
        self._follower = Follower(plan, RATE_OVER_S)
        self._lines.extend(opening_words(plan))

    def _show(self, follower: Follower) -> None:
        self._lines.extend(follower.look())
        show = "update_display" if self._is_shown else "display"
        page = as_output(self._lines, Picture(follower.state))
        load(f"IPython.display:{show}")(page, raw=True, display_id=self._id)
        self._is_shown = True


def as_output(lines: Iterable[str], picture: Picture) -> dict[str, str]:
    """The lines and the picture below them as the output of a notebook: plain, and in colours."""
    console = Console(
        file=io.StringIO(), record=True, width=WIDEST, force_terminal=True, force_jupyter=False
    )
    for line in lines:
        console.print(Text(printable(line[:MOST_OF_A_LINE])), soft_wrap=True)
    console.print(picture)
    html = console.export_html(code_format=PAGE, inline_styles=True, clear=False)
    return {"text/plain": console.export_text().rstrip("\n"), "text/html": html}
