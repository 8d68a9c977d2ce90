"""The table of a bench while it runs, drawn over itself on a terminal; lines where none is."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from allranks.cli.display.progress import DUMB_TERMINALS, say
from allranks.errors import printable
from allranks.job.units import format_bytes
from allranks.tools.bench.measuring import BenchWatcher
from allranks.tools.bench.plan import BenchPlan, Combination
from allranks.tools.bench.reading import Measured, interval
from allranks.tools.bench.tables import with_reach

EVERY_S = 0.5


class BenchTable:
    """What is known so far, a line for each combination."""

    def __init__(self, plan: BenchPlan, refused: dict[Combination, str]) -> None:
        self.plan, self.refused = plan, refused
        self.speeds: dict[Combination, list[float]] = defaultdict(list)
        self.last: dict[Combination, Measured] = {}
        self.problems = dict(refused)
        self.now: tuple[Combination, int] | None = None
        self._since = time.monotonic()
        self._next = 0.0
        self._live: Live | None = None

    def shown(self) -> AbstractContextManager[Any]:
        """Within, it is drawn on standard error, if that is a terminal that can be drawn on."""
        if not sys.stderr.isatty() or os.environ.get("TERM", "") in DUMB_TERMINALS:
            return nullcontext()
        console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False, get_renderable=self.drawn)
        return self._live

    def watcher(self) -> BenchWatcher:
        """What the measuring tells it."""
        return BenchWatcher(self._began, self._ended, self._tick)

    def _began(self, combination: Combination, turn: int) -> None:
        self.now, self._since, self._next = (combination, turn), time.monotonic(), 0.0
        self._tick()

    def _ended(self, combination: Combination, turn: int, measured: Measured | str) -> None:
        if isinstance(measured, str):
            self.problems[combination] = measured
            text = measured
        else:
            self.speeds[combination].append(measured.steps.speed)
            self.last[combination] = measured
            text = f"{measured.steps.speed:,.0f} samples/s"
        if self._live is None:
            say(f"turn {turn + 1}  {combination.strategy} on {combination.ranks}: {text}")
        self._next = 0.0
        self._tick()

    def _tick(self) -> None:
        if self._live is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            self._live.refresh()

    def drawn(self) -> Table:
        """The table as it is now."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("", "strategy", "ranks", "turns", "samples/s", "exchange", "memory"):
            right = name not in ("", "strategy")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for combination in self.plan.combinations:
            table.add_row(*self._cells(combination))
        return table

    def _cells(self, combination: Combination) -> Sequence[str]:
        name = printable(combination.strategy) + (" (peer)" if combination.is_peer else "")
        speeds, last = self.speeds[combination], self.last.get(combination)
        runs = self.now is not None and self.now[0] == combination
        seconds = f"{time.monotonic() - self._since:.0f} s" if runs else ""
        first = (seconds, name, str(combination.ranks), f"{len(speeds)}/{self.plan.repeats}")
        if last is None:
            return (*first, printable(self.problems.get(combination, ""))[:40], "", "")
        exchange = last.shares.get("exchange")
        return (
            *first,
            with_reach(interval(speeds), 0),
            "" if exchange is None else f"{exchange:.0%}",
            "" if last.peak_bytes is None else format_bytes(last.peak_bytes),
        )
