"""The findings of `allranks doctor` as frozen data: nodes, links between ranks, what to do.

`doctor` collects it, `findings` judges it, the command line prints it. Unknown is `None`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allranks.launcher.nodes.facts import NodeFacts
from allranks.tools.doctor.examination import Examination
from allranks.tools.doctor.probe import STREAM_S, UNCOUNTED

MOST_IN_FULL = 8  # ends of which every pair is measured
STOP, WARNING, NOTE = "stop", "warning", "note"
Cells = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Finding:
    """A finding: it would stop a run, may harm one, or is a note.

    `node` is the name of the node; "" is the whole place.
    """

    level: str
    subject: str
    node: str
    found: str
    do: str


@dataclass(frozen=True)
class NodeReport:
    """One node. `clock_offset_s` is its clock minus the clock of the command.

    The offset is known up to `clock_error_s`: half of the shortest round trip.
    """

    number: int
    name: str
    address: str | None
    interface: str | None
    interfaces: dict[str, str]
    facts: NodeFacts
    examination: Examination | None = None
    clock_offset_s: float | None = None
    clock_error_s: float | None = None


@dataclass(frozen=True)
class Endpoint:
    """A rank whose links to others were measured: its node and address."""

    rank: int
    node: str
    address: str


@dataclass(frozen=True)
class Link:
    """From one rank to another: microseconds of a round trip, 10^6 bytes per second of a stream."""

    round_trip_us: float
    mb_per_s: float


@dataclass(frozen=True)
class Matrix:
    """The links between ranks: from the end of a row to that of a column. `None`: not measured.

    Microseconds of a round trip, and 10^6 bytes per second of one stream.
    """

    ends: tuple[Endpoint, ...]
    round_trip_us: Cells
    mb_per_s: Cells

    def to_data(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "method": {
                "round_trip_us": "median of up to 200 round trips of 9 bytes over TCP",
                "mb_per_s": f"10^6 bytes per second of one TCP stream of {STREAM_S / 2:g} to "
                f"{2 * STREAM_S:g} s or so, timed where it arrives, without the first "
                f"1/{UNCOUNTED} of its bytes; one pair and one direction at a time",
            },
        }


@dataclass(frozen=True)
class Diagnosis:
    """The whole diagnosis. `must_be_equal` and `may_differ` are lines about differing nodes.

    If not all `asked_nodes` joined, `nodes` is this machine only.
    """

    place: str
    ranks: int
    asked_nodes: int
    nodes: tuple[NodeReport, ...]
    matrix: Matrix | None
    must_be_equal: tuple[str, ...]
    may_differ: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def stops(self) -> bool:
        """Whether something would stop a run."""
        return any(finding.level == STOP for finding in self.findings)

    def to_data(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "ranks": self.ranks,
            "asked_nodes": self.asked_nodes,
            "nodes": [asdict(node) for node in self.nodes],
            "matrix": None if self.matrix is None else self.matrix.to_data(),
            "differences": {
                "must_be_equal": list(self.must_be_equal),
                "may_differ": list(self.may_differ),
            },
            "findings": [asdict(finding) for finding in self.findings],
            "would_stop_a_run": self.stops,
        }


def matrix_of(ends: Sequence[Endpoint], links: Mapping[tuple[int, int], Link]) -> Matrix:
    """The matrix of the links by (rank, rank)."""
    cells = [[links.get((start.rank, other.rank)) for other in ends] for start in ends]
    return Matrix(
        tuple(ends),
        tuple(tuple(None if cell is None else cell.round_trip_us for cell in row) for row in cells),
        tuple(tuple(None if cell is None else cell.mb_per_s for cell in row) for row in cells),
    )
