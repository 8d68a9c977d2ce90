"""What a bench has found: a row for each combination, beside the fewest ranks of its strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allranks.tools.bench.measuring import EXCHANGE, Found
from allranks.tools.bench.plan import WEAK, Plan
from allranks.tools.bench.statistics import Interval, interval, ratio

SCHEMA = 1
ENOUGH = 0.75
"""The efficiency that computing centres ask for."""


@dataclass(frozen=True)
class Row:
    """A combination. `speed` is in samples per second; `speed_up` is over the `base` ranks.

    The efficiency is the speed-up over the times as many ranks.
    """

    strategy: str
    ranks: int
    problem: str = ""
    speed: Interval | None = None
    jitter: float = 0.0
    step_ms: float = 0.0
    base: int = 0
    speed_up: Interval | None = None
    efficiency: Interval | None = None
    exchange: float | None = None
    sent_bytes: float = 0.0
    card_bytes: float = 0.0
    equal_bits: bool = False
    """Whether all repeats ended with the same weights, bit for bit."""


def rows_of(found: Sequence[Found]) -> list[Row]:
    """A row for each, in order. Speed-ups are of the turns in which both were measured."""
    return [_row(one, _base(one, found)) for one in found]


def _base(one: Found, found: Sequence[Found]) -> Found | None:
    own = [f for f in found if f.combination.strategy == one.combination.strategy and f.runs]
    return min(own, key=lambda f: f.combination.ranks, default=None)


def _row(one: Found, base: Found | None) -> Row:
    strategy, ranks = one.combination.strategy, one.combination.ranks
    if not one.runs or base is None:
        return Row(strategy, ranks, one.problem or "it was not run")
    speeds = {run.turn: run.steps.speed for run in one.runs}
    others = {run.turn: run.steps.speed for run in base.runs}
    both = [turn for turn in speeds if turn in others]
    up = ratio([speeds[t] for t in both], [others[t] for t in both]) if both else None
    times = ranks / base.combination.ranks
    efficiency = None
    if up is not None:
        efficiency = Interval(up.mean / times, up.low / times, up.high / times, up.repeats)
    shares = [run.shares[EXCHANGE] for run in one.runs if run.shares]
    speed = interval(list(speeds.values()))
    last = one.runs[-1]
    return Row(
        strategy,
        ranks,
        one.problem,
        speed,
        sum(run.steps.jitter for run in one.runs) / len(one.runs),
        1e3 * sum(run.step_s for run in one.runs) / len(one.runs),
        base.combination.ranks,
        up,
        efficiency,
        sum(shares) / len(shares) if shares else None,
        last.sent_bytes,
        last.card_bytes,
        len({run.weights_sha256 for run in one.runs}) == 1,
    )


def to_data(plan: Plan, found: Sequence[Found], machine: dict[str, Any]) -> dict[str, Any]:
    """All of it, as plain values; an interval of one repeat has no bounds (`null`)."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        infinite = isinstance(value, float) and value in (float("inf"), float("-inf"))
        return None if infinite else value

    rows = [asdict(row) for row in rows_of(found)]
    runs = [
        {"strategy": one.combination.strategy, "ranks": one.combination.ranks, **asdict(run)}
        for one in found
        for run in one.runs
    ]
    settings = {name: value for name, value in asdict(plan).items() if name != "combinations"}
    data: dict[str, Any] = plain(
        {"schema": SCHEMA, "machine": machine, "settings": settings, "rows": rows, "runs": runs}
    )
    return data


def machine_facts() -> dict[str, Any]:
    """What the figures are of: cores, memory, and how busy it was already."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": os.uname().nodename,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages,
        "load_1min": os.getloadavg()[0],
    }


def request_of(rows: Sequence[Row], plan: Plan) -> Row | None:
    """The row with most ranks whose efficiency is surely enough: what to ask for."""
    sure = [
        row
        for row in rows
        if row.efficiency is not None
        and (row.ranks == row.base or row.efficiency.low >= ENOUGH)
        and not row.problem
    ]
    kind = (lambda row: (row.ranks, row.speed.mean)) if plan.scaling == WEAK else _fastest
    return max(sure, key=kind, default=None)


def _fastest(row: Row) -> tuple[float, int]:
    assert row.speed is not None
    return row.speed.mean, -row.ranks
