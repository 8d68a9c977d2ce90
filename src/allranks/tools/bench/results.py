"""The results of a bench: a row per combination, relative to its strategy on fewest ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allranks.launcher.scripts.plan import redacted_words
from allranks.strategies.card import Exact
from allranks.strategies.resolve import strategy_spec
from allranks.tools.bench.measuring import RunSet
from allranks.tools.bench.plan import STRONG, WEAK, BenchPlan
from allranks.tools.bench.reading import (
    COMPUTE,
    EXCHANGE,
    INPUT,
    SAMPLES_PER_S,
    STEPS_PER_S,
    Interval,
    interval,
    ratio,
)
from allranks.tools.script_check.rules.facts import APART

SCHEMA = 2
ENOUGH = 0.75
"""The efficiency that computing centres ask for."""
ROUNDING = 1e-3
"""The largest relative distance of a peer's loss from ours that counts as rounding. Sums in another
order differ by some 1e-6, which grows with the steps."""


@dataclass(frozen=True)
class BenchRow:
    """A combination. `speed` is in samples per second; `speed_up` is over the `base` ranks.

    The efficiency is the speed-up divided by the ratio of ranks. `peak_bytes` is of the largest
    process in any run. `until_s` is over the `until_runs` runs that reached the metric.
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
    """Whether all repeats ended with the same weights, bit for bit; unknown for a peer."""
    unit: str = SAMPLES_PER_S
    """What `speed` counts, for a script."""
    step_samples: float | None = None


def rows_of(series: Sequence[RunSet], until: str = "") -> list[BenchRow]:
    """A row for each, in order. Speed-ups use the turns in which both were measured."""
    ours = {e.combination: _ours(e, series) for e in series if e.combination.is_peer}
    return [
        _row(entry, _base(entry, series), ours.get(entry.combination), until) for entry in series
    ]


def _base(entry: RunSet, series: Sequence[RunSet]) -> RunSet | None:
    def subject(runs: RunSet) -> tuple[str, bool]:
        return runs.combination.strategy, runs.combination.is_peer

    candidates = [other for other in series if subject(other) == subject(entry) and other.runs]
    return min(candidates, key=lambda other: other.combination.ranks, default=None)


def _ours(peer: RunSet, series: Sequence[RunSet]) -> RunSet | None:
    """Our runs to compare a peer with: on as many ranks, with an exact strategy."""
    ranks = peer.combination.ranks
    for other in series:
        ours = other.combination
        alike = not ours.is_peer and ours.ranks == ranks and other.runs
        name, _, _ = ours.strategy.partition(" ")
        if alike and isinstance(strategy_spec(name, ranks).guarantee, Exact):
            return other
    return None


def _row(entry: RunSet, base: RunSet | None, ours: RunSet | None, until: str) -> BenchRow:
    combination = entry.combination
    if not entry.runs or base is None:
        problem = entry.problem or "it was not run"
        return BenchRow(combination.strategy, combination.ranks, problem, combination.is_peer)
    speeds = {run.turn: run.steps.speed for run in entry.runs}
    unit = entry.runs[0].unit
    up, efficiency = _scaling(entry, base) if unit != STEPS_PER_S else (None, None)
    runs, last = entry.runs, entry.runs[-1]
    reached = [run for run in runs if run.until_s is not None]
    compute, exchange, data = (
        _mean(run.shares.get(phase) for run in runs) for phase in (COMPUTE, EXCHANGE, INPUT)
    )
    return BenchRow(
        combination.strategy,
        combination.ranks,
        entry.problem or (APART if last.is_apart else ""),
        combination.is_peer,
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
        len(reached) if until and not combination.is_peer else None,
        _largest(run.until_step for run in reached),
        interval([run.until_s for run in reached if run.until_s is not None]) if reached else None,
        _mean(run.joules for run in runs),
        _mean(run.joules for run in reached),
        _apart(entry.losses, ours.losses) if ours is not None and combination.is_peer else None,
        len({run.weights_sha256 for run in runs}) == 1 if last.weights_sha256 else None,
        unit,
        last.step_samples,
    )


def scaling_of(rows: Sequence[BenchRow]) -> str:
    """Whether a script's batch grows with its ranks (weak scaling) or not, by what was read."""
    known = {row.ranks: row.step_samples for row in rows if row.step_samples}
    few, many = min(known, default=0), max(known, default=0)
    return WEAK if few < many and known[many] / known[few] > (1 + many / few) / 2 else STRONG


def row_from(data: Mapping[str, Any]) -> BenchRow:
    """The row of a record; a bound that is `null` there is infinite here."""
    values = dict(data)
    for name in ("speed", "speed_up", "efficiency", "until_s"):
        bounds = values[name]
        if bounds is not None:
            low = -math.inf if bounds["low"] is None else bounds["low"]
            high = math.inf if bounds["high"] is None else bounds["high"]
            values[name] = Interval(bounds["mean"], low, high, bounds["repeats"])
    return BenchRow(**values)


def _scaling(entry: RunSet, base: RunSet) -> tuple[Interval | None, Interval | None]:
    speeds = {run.turn: run.steps.speed for run in entry.runs}
    others = {run.turn: run.steps.speed for run in base.runs}
    both = [turn for turn in speeds if turn in others]
    if not both:
        return None, None
    up = ratio([speeds[t] for t in both], [others[t] for t in both])
    times = entry.combination.ranks / base.combination.ranks
    return up, Interval(up.mean / times, up.low / times, up.high / times, up.repeats)


def _apart(losses: Sequence[float], ours: Sequence[float]) -> float | None:
    """The largest relative distance of two losses of the same step."""
    pairs = list(zip(losses, ours, strict=False))
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean; `None` unless all values are known."""
    items = list(values)
    known = [value for value in items if value is not None]
    return sum(known) / len(known) if known and len(known) == len(items) else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def to_data(plan: BenchPlan, series: Sequence[RunSet], machine: dict[str, Any]) -> dict[str, Any]:
    """The whole bench as plain values; an interval of one repeat has no bounds (`null`)."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(entry) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(entry) for entry in value]
        infinite = isinstance(value, float) and value in (float("inf"), float("-inf"))
        return None if infinite else value

    rows = [asdict(row) for row in rows_of(series, plan.until)]
    runs = [
        {"strategy": entry.combination.strategy, "ranks": entry.combination.ranks, **asdict(run)}
        for entry in series
        for run in entry.runs
    ]
    settings = {name: value for name, value in asdict(plan).items() if name != "combinations"}
    settings |= {name: redacted_words(settings[name]) for name in ("words", "command")}
    data: dict[str, Any] = plain(
        {"schema": SCHEMA, "machine": machine, "settings": settings, "rows": rows, "runs": runs}
    )
    return data


def verdict_of(row: BenchRow) -> bool | None:
    """Whether the whole interval of its efficiency is above the line, or below; else `None`."""
    if row.efficiency is None:
        return False
    if row.ranks == row.base or row.efficiency.low >= ENOUGH:
        return True
    return False if row.efficiency.high < ENOUGH else None


def undecided_of(rows: Sequence[BenchRow], plan: BenchPlan) -> list[BenchRow]:
    """The rows that may be better than a base, which is above the line by definition."""
    best = _best(rows, plan)
    if best is None or best.speed is None or best.ranks != best.base:
        return []
    least = best.ranks if plan.scaling == WEAK else best.speed.low
    return [
        row
        for row in rows
        if row.speed is not None
        and not (row.is_peer or row.problem)
        and verdict_of(row) is None
        and (row.ranks if plan.scaling == WEAK else row.speed.high) > least
    ]


def request_of(rows: Sequence[BenchRow], plan: BenchPlan) -> BenchRow | None:
    """The row to request: most ranks with an efficiency whose whole interval is enough.

    `None` if there is none, or if only a base is sure and an undecided row may be better.
    """
    return None if undecided_of(rows, plan) else _best(rows, plan)


def _best(rows: Sequence[BenchRow], plan: BenchPlan) -> BenchRow | None:
    sure = [
        row
        for row in rows
        if row.efficiency is not None and not row.is_peer and verdict_of(row) and not row.problem
    ]
    kind = (lambda row: (row.ranks, row.speed.mean)) if plan.scaling == WEAK else _fastest
    return max(sure, key=kind, default=None)


def _fastest(row: BenchRow) -> tuple[float, int]:
    assert row.speed is not None
    return row.speed.mean, -row.ranks
