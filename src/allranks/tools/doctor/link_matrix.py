"""Links between ranks, measured by their probes one pair at a time: none disturbs another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from allranks.tools.doctor.diagnosis import MOST_IN_FULL, Endpoint, Link, Matrix, matrix_of
from allranks.tools.doctor.probes import Lost, Probes


def measure_links(
    probes: Probes, ends: Sequence[Endpoint], failures: list[str], progress: Callable[[str], None]
) -> Matrix | None:
    """The links between these ends; `failures` gets a line for each that could not be measured."""
    if len(ends) < 2:
        return None
    pairs = pairs_to_measure(ends)
    progress(f"measuring {len(pairs)} pair{'s' if len(pairs) > 1 else ''} of ranks, one by one")
    links: dict[tuple[int, int], Link] = {}
    for one, other in pairs:
        try:
            found = _measure(probes, one, other)
        except Lost:
            continue
        if "problem" in found:
            failures.append(f"{_named(one)} to {_named(other)}: {found['problem']}")
            continue
        trip_us = float(found["round_trip_us"])
        links[one.rank, other.rank] = Link(trip_us, float(found["there_mb_s"]))
        links[other.rank, one.rank] = Link(trip_us, float(found["back_mb_s"]))
    return matrix_of(ends, links)


def pairs_to_measure(ends: Sequence[Endpoint]) -> list[tuple[Endpoint, Endpoint]]:
    """All pairs of a few ends; of many, each with the first and with its neighbour.

    The number of all pairs grows as the square of the nodes: a hundred would take hours.
    """
    numbers = range(len(ends))
    if len(ends) <= MOST_IN_FULL:
        return [(ends[i], ends[j]) for i in numbers for j in numbers if i < j]
    wanted = {(0, j) for j in numbers if j} | {(j - 1, j) for j in numbers if j}
    return [(ends[i], ends[j]) for i, j in sorted(wanted)]


def _measure(probes: Probes, one: Endpoint, other: Endpoint) -> dict[str, Any]:
    """The link from one to the other and back, as their probes measure it; raises `Lost`."""
    door = dict(probes.ask(other.rank, {"do": "listen", "address": other.address}))
    if "problem" in door:
        return door
    try:
        order = {"do": "measure", "address": other.address, **door}
        return dict(probes.ask(one.rank, order))
    finally:
        with suppress(Lost):
            probes.ask(other.rank, {"do": "stop"})


def _named(end: Endpoint) -> str:
    return f"rank {end.rank} on {end.node} ({end.address})"
