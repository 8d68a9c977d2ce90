"""The ways between ranks, measured by their probes: pair after pair, so that none disturbs another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from allranks.tools.doctor.diagnosis import MOST_IN_FULL, End, Matrix, matrix_of
from allranks.tools.doctor.probes import Lost, Probes


def measured(
    probes: Probes, ends: Sequence[End], broken: list[str], tell: Callable[[str], None]
) -> Matrix | None:
    """The ways between these ends; `broken` gets a line for each that could not be measured."""
    if len(ends) < 2:
        return None
    pairs = pairs_of(ends)
    tell(f"measuring {len(pairs)} pair{'s' if len(pairs) > 1 else ''} of ranks, one by one")
    ways: dict[tuple[int, int], tuple[float, float]] = {}
    for one, other in pairs:
        try:
            found = _way(probes, one, other)
        except Lost:
            continue
        if "problem" in found:
            broken.append(f"{_named(one)} to {_named(other)}: {found['problem']}")
            continue
        trip_us = float(found["round_trip_us"])
        ways[one.rank, other.rank] = trip_us, float(found["there_mb_s"])
        ways[other.rank, one.rank] = trip_us, float(found["back_mb_s"])
    return matrix_of(ends, ways)


def pairs_of(ends: Sequence[End]) -> list[tuple[End, End]]:
    """All pairs of a few ends; of many, each with the first and with its neighbour.

    The number of all pairs grows as the square of the nodes: a hundred would take hours.
    """
    numbers = range(len(ends))
    if len(ends) <= MOST_IN_FULL:
        return [(ends[i], ends[j]) for i in numbers for j in numbers if i < j]
    wanted = {(0, j) for j in numbers if j} | {(j - 1, j) for j in numbers if j}
    return [(ends[i], ends[j]) for i, j in sorted(wanted)]


def _way(probes: Probes, one: End, other: End) -> dict[str, Any]:
    """The way from one to the other and back, as the probes measure it; raises `Lost`."""
    door = dict(probes.ask(other.rank, {"do": "listen", "address": other.address}))
    if "problem" in door:
        return door
    try:
        order = {"do": "measure", "address": other.address, **door}
        return dict(probes.ask(one.rank, order))
    finally:
        with suppress(Lost):
            probes.ask(other.rank, {"do": "stop"})


def _named(end: End) -> str:
    return f"rank {end.rank} on {end.node} ({end.address})"
