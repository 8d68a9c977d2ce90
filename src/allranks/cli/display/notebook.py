"""A notebook as a place to launch from: a display among the outputs of its cells.

Nothing of IPython is imported: where it runs, it is there.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.catalog import load
from allranks.cli.display.following import Follower
from allranks.cli.display.live import RATE_OVER_S, WIDEST, Picture
from allranks.cli.display.progress import MOST_OF_A_LINE, Paced, opening_words
from allranks.errors import printable
from allranks.launcher.plan import LaunchPlan

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


class NotebookDisplay(Paced):
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
