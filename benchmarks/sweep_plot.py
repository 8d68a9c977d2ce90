"""A plot of a sweep as SVG: a logarithmic axis of sizes, curves with intervals. No library."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 400, 70, 40, 20, 50
COLOURS = ("#1f77b4", "#d62728", "#7f7f7f", "#2ca02c")
TICKS = 5


@dataclass(frozen=True)
class Curve:
    """Points (size, median, low, high), in the order of their sizes."""

    name: str
    points: list[tuple[float, float, float, float]]


def plot(title: str, across: str, up: str, curves: list[Curve]) -> str:
    """The SVG text."""
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
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="14">{title}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{across}</text>',
        f'<text x="15" y="{TOP - 10}">{up}</text>',
    ]
    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        lines += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#dddddd"/>',
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>',
        ]
    for size in sizes:
        at = f'x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        lines.append(f'<text {at} text-anchor="middle">{size:g}</text>')
    for number, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        path = " ".join(f"{x(size):.1f},{y(median):.1f}" for size, median, _, _ in curve.points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [
            f'<line x1="{x(size):.1f}" x2="{x(size):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" '
            f'stroke="{colour}" stroke-width="4" stroke-opacity="0.4"/>'
            for size, _, low, high in curve.points
        ]
        key = TOP + 12 + 16 * number
        lines.append(f'<text x="{LEFT + 12}" y="{key}" fill="{colour}">{curve.name}</text>')
    return "\n".join([*lines, "</svg>", ""])
