"""What a bench has found: a row for each combination, beside the fewest ranks of its strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allranks.launcher.scripts.plan import redacted_words
from allranks.strategies.card import Exact
from allranks.strategies.resolve import strategy_spec
from allranks.tools.bench.measuring import Found
from allranks.tools.bench.plan import WEAK, BenchPlan
from allranks.tools.bench.reading import COMPUTE, EXCHANGE, INPUT, Measured
from allranks.tools.bench.statistics import Interval, interval, ratio

SCHEMA = 2
ENOUGH = 0.75
"""The efficiency that computing centres ask for."""
ROUNDING = 1e-3
"""How far the loss of a step may be off ours, relatively, before a peer is said to train another
way. Sums in another order make some 1e-6 of it, which grow with the steps."""


@dataclass(frozen=True)
class BenchRow:
    """A combination. `speed` is in samples per second; `speed_up` is over the `base` ranks.

    The efficiency is the speed-up over the times as many ranks. `peak_bytes` is of the process
    that held most in any run. `until_s` is over the `until_runs` runs that reached the metric.
    `loss_apart` is the largest relative distance of a peer's loss from ours in any step.
    """

    strategy: str
    ranks: int
    problem: str = ""
    is_peer: bool = False
    speed: Interval | None = None
    jitter: float = 0.0
    step_ms: float = 0.0
    base: int = 0
    speed_up: Interval | None = None
    efficiency: Interval | None = None
    compute: float | None = None
    exchange: float | None = None
    input: float | None = None
    sent_bytes: float | None = None
    card_bytes: float | None = None
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    until_runs: int | None = None
    until_step: int | None = None
    until_s: Interval | None = None
    joules: float | None = None
    joules_until: float | None = None
    loss_apart: float | None = None
    equal_bits: bool | None = None
    """Whether all repeats ended with the same weights, bit for bit; of a peer nobody knows."""


def rows_of(found: Sequence[Found], until: str = "") -> list[BenchRow]:
    """A row for each, in order. Speed-ups are of the turns in which both were measured."""
    return [_row(one, _base(one, found), _ours(one, found), until) for one in found]


def _base(one: Found, found: Sequence[Found]) -> Found | None:
    what = one.combination
    own = [
        f
        for f in found
        if (f.combination.strategy, f.combination.is_peer) == (what.strategy, what.is_peer)
        and f.runs
    ]
    return min(own, key=lambda f: f.combination.ranks, default=None)


def _ours(one: Found, found: Sequence[Found]) -> Found | None:
    """A run of ours that a peer is held against: on as many ranks, of an exact strategy."""
    for other in found:
        what = other.combination
        alike = not what.is_peer and what.ranks == one.combination.ranks and other.runs
        if alike and isinstance(strategy_spec(what.strategy, what.ranks).guarantee, Exact):
            return other
    return None


def _row(one: Found, base: Found | None, ours: Found | None, until: str) -> BenchRow:
    what = one.combination
    if not one.runs or base is None:
        return BenchRow(what.strategy, what.ranks, one.problem or "it was not run", what.is_peer)
    speeds = {run.turn: run.steps.speed for run in one.runs}
    up, efficiency = _scaling(one, base)
    runs, last, reached = one.runs, one.runs[-1], _reached(one.runs)
    compute, exchange, data = (
        _mean(run.shares.get(phase) for run in runs) for phase in (COMPUTE, EXCHANGE, INPUT)
    )
    return BenchRow(
        what.strategy,
        what.ranks,
        one.problem,
        what.is_peer,
        interval(list(speeds.values())),
        _mean(run.steps.jitter for run in runs) or 0.0,
        1e3 * (_mean(run.step_s for run in runs) or 0.0),
        base.combination.ranks,
        up,
        efficiency,
        compute,
        exchange,
        data,
        last.sent_bytes,
        last.card_bytes,
        _largest(run.peak_bytes for run in runs),
        _largest(run.device_peak_bytes for run in runs),
        len(reached) if until and not what.is_peer else None,
        _largest(run.until_step for run in reached),
        interval([run.until_s for run in reached if run.until_s is not None]) if reached else None,
        _mean(run.joules for run in runs),
        _mean(run.joules for run in reached),
        _apart(one.losses, ours.losses) if ours is not None and what.is_peer else None,
        None if what.is_peer else len({run.weights_sha256 for run in runs}) == 1,
    )


def row_from(data: Mapping[str, Any]) -> BenchRow:
    """The row that the record of a bench describes; what has no bound there has none here."""
    values = dict(data)
    for name in ("speed", "speed_up", "efficiency", "until_s"):
        found = values[name]
        if found is not None:
            low = -math.inf if found["low"] is None else found["low"]
            high = math.inf if found["high"] is None else found["high"]
            values[name] = Interval(found["mean"], low, high, found["repeats"])
    return BenchRow(**values)


def _reached(runs: Iterable[Measured]) -> list[Measured]:
    return [run for run in runs if run.until_s is not None]


def _scaling(one: Found, base: Found) -> tuple[Interval | None, Interval | None]:
    speeds = {run.turn: run.steps.speed for run in one.runs}
    others = {run.turn: run.steps.speed for run in base.runs}
    both = [turn for turn in speeds if turn in others]
    if not both:
        return None, None
    up = ratio([speeds[t] for t in both], [others[t] for t in both])
    times = one.combination.ranks / base.combination.ranks
    return up, Interval(up.mean / times, up.low / times, up.high / times, up.repeats)


def _apart(losses: Sequence[float], ours: Sequence[float]) -> float | None:
    """The largest relative distance of two losses of the same step."""
    pairs = list(zip(losses, ours, strict=False))
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    """Of values that are all known."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def to_data(plan: BenchPlan, found: Sequence[Found], machine: dict[str, Any]) -> dict[str, Any]:
    """All of it, as plain values; an interval of one repeat has no bounds (`null`)."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        infinite = isinstance(value, float) and value in (float("inf"), float("-inf"))
        return None if infinite else value

    rows = [asdict(row) for row in rows_of(found, plan.until)]
    runs = [
        {"strategy": one.combination.strategy, "ranks": one.combination.ranks, **asdict(run)}
        for one in found
        for run in one.runs
    ]
    settings = {name: value for name, value in asdict(plan).items() if name != "combinations"}
    settings["words"] = redacted_words(plan.words)
    data: dict[str, Any] = plain(
        {"schema": SCHEMA, "machine": machine, "settings": settings, "rows": rows, "runs": runs}
    )
    return data


def request_of(rows: Sequence[BenchRow], plan: BenchPlan) -> BenchRow | None:
    """The row with most ranks whose efficiency is surely enough: what to ask for."""
    sure = [
        row
        for row in rows
        if row.efficiency is not None
        and not row.is_peer
        and (row.ranks == row.base or row.efficiency.low >= ENOUGH)
        and not row.problem
    ]
    kind = (lambda row: (row.ranks, row.speed.mean)) if plan.scaling == WEAK else _fastest
    return max(sure, key=kind, default=None)


def _fastest(row: BenchRow) -> tuple[float, int]:
    assert row.speed is not None
    return row.speed.mean, -row.ranks
