"""A plot of a sweep as SVG: an axis of sizes, curves with their intervals. Needs no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from allranks.tools.bench.plan import BenchPlan, value_of
from allranks.tools.bench.results import BenchRow

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 400, 70, 40, 20, 50
COLOURS = ("#1f77b4", "#d62728", "#7f7f7f", "#2ca02c", "#9467bd", "#8c564b")
TICKS = 5


@dataclass(frozen=True)
class Curve:
    """Points (size, middle, low, high), in the order of their sizes; sizes are above 0."""

    name: str
    points: list[tuple[float, float, float, float]]


def sweep_curves(plan: BenchPlan, rows: Sequence[BenchRow]) -> list[Curve]:
    """Milliseconds of a step by the value of the swept option; others are level lines.

    An interval of one repeat has no bounds: the point stands alone.
    """
    swept: dict[str, list[tuple[float, float, float, float]]] = {}
    level = []
    for row in rows:
        if row.speed is None or not row.step_ms:
            continue
        samples = row.speed.mean * row.step_ms  # of a step, in thousandths: speed is their inverse
        known = not math.isinf(row.speed.low) and row.speed.low > 0
        low = samples / row.speed.high if known else row.step_ms
        high = samples / row.speed.low if known else row.step_ms
        value = value_of(row.strategy, plan.swept)
        ranks = "" if row.ranks == 1 else f" on {row.ranks}"
        if value is None or value <= 0:
            level.append((row.strategy + ranks, row.step_ms, low, high))
        else:
            name = _without(row.strategy, plan.swept) + ranks
            swept.setdefault(name, []).append((value, row.step_ms, low, high))
    curves = [Curve(name, sorted(points)) for name, points in swept.items()]
    sizes = sorted({point[0] for curve in curves for point in curve.points})
    return curves + [
        Curve(name, [(size, middle, low, high) for size in sizes])
        for name, middle, low, high in level
    ]


def _without(strategy: str, option: str) -> str:
    name, colon, options = strategy.partition(":")
    others = [part for part in options.split(",") if not part.startswith(f"{option}=")]
    return name + (colon + ",".join(others) if others else "")


def sweep_figure(plan: BenchPlan, rows: Sequence[BenchRow]) -> str | None:
    """The figure of a sweep; `None` where fewer than two values were measured."""
    curves = sweep_curves(plan, rows)
    if not curves or all(len(curve.points) < 2 for curve in curves):
        return None
    title = f"{plan.program}: milliseconds of a step, by {plan.swept}"
    return plot(title, plan.swept, "ms a step", curves)


def plot(title: str, across: str, up: str, curves: Sequence[Curve]) -> str:
    """The SVG text; the axis of sizes is logarithmic."""
    sizes = sorted({point[0] for curve in curves for point in curve.points})
    top = max(point[3] for curve in curves for point in curve.points) * 1.05
    span = math.log(sizes[-1] / sizes[0]) or 1.0

    def x(size: float) -> float:
        return LEFT + math.log(size / sizes[0]) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>',
        f'<text x="15" y="{TOP - 10}">{escape(up)}</text>',
    ]
    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        lines += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#dddddd"/>',
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>',
        ]
    for size in sizes:
        at = f'x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        lines.append(f'<text {at} text-anchor="middle">{size:g}</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(size):.1f},{y(middle):.1f}" for size, middle, _, _ in curve.points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [
            f'<line x1="{x(size):.1f}" x2="{x(size):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" '
            f'stroke="{colour}" stroke-width="4" stroke-opacity="0.4"/>'
            for size, _, low, high in curve.points
        ]
        key = TOP + 12 + 16 * number
        lines.append(f'<text x="{LEFT + 12}" y="{key}" fill="{colour}">{escape(curve.name)}</text>')
    return "\n".join([*lines, "</svg>", ""])
