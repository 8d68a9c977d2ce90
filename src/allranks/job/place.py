"""Where a job runs, as its words say it: `local`, `slurm`, `simulated:link=1gbit,delay=1ms`. Pure.

The text of `--place` is taken apart here and nowhere else. What a place is and does stands in its
class, which `catalog.PLACES` names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from allranks.catalog import PLACES, load
from allranks.checkpoint.files import as_json, write_whole
from allranks.errors import RequestError, nearest
from allranks.strategies.auto import parse_delay, parse_rate
from allranks.strategies.choice import Choice, parse_choice

LOCAL = "local"
"""The place of a job that names none."""


@dataclass(frozen=True)
class PlaceSpec:
    """A place by its name, and its options with their values; `text` is how it is written.

    Options are those of simulated nodes: `link` in bits per second, `delay` in seconds.
    """

    name: str = LOCAL
    options: Mapping[str, float] = field(default_factory=dict)
    text: str = LOCAL

    def __str__(self) -> str:
        return self.text


def place_spec(text: str) -> PlaceSpec:
    """The place that a text names; raises `RequestError` for one that is not known."""
    choice = parse_choice(text, "--place")
    if choice.name not in PLACES:
        raise RequestError(
            asked=f"--place {choice.name}",
            found="no place of that name in this version",
            why=f"place is one of {', '.join(PLACES)}",
            do=nearest(choice.name, PLACES),
        )
    if choice.options and not load(PLACES[choice.name]).has_links:
        raise RequestError(
            asked=f"--place {text}",
            found=f"options of {choice.name}",
            why="only simulated nodes have links that can be chosen",
            do=f"--place {choice.name}, or --place {Choice('simulated', choice.options)}",
        )
    for name in choice.options:
        if name not in _READERS:
            raise RequestError(
                asked=f"--place {text}",
                found=f"no option {name!r} of simulated nodes",
                why="a misspelt one would be passed over, and the links be faster than asked",
                do=nearest(name, _READERS),
            )
    readers = [(name, read) for name, read in _READERS.items() if name in choice.options]
    options = {name: read(choice.options[name], f"--place {text}") for name, read in readers}
    return PlaceSpec(choice.name, options, text)


_READERS: dict[str, Callable[[str, str], float]] = {"link": parse_rate, "delay": parse_delay}


# --- placement -----------------------------------------------------------------------------------
# The placement of every tensor of a training: rank, device and size in bytes.
#
# Ranks write what they hold (`write_placement`); the command line reads it, and folds into one line
# what several ranks hold alike. Unknown is `None`: what the optimizer keeps, before its first
# update.


FOLDER = "placement"
PARAMETER, BUFFER, AVERAGE = "parameter", "buffer", "average"
OPTIMIZER, GATHERED, GLOBAL = "optimizer", "gathered", "global"
SHAPES = ("shape", "whole")


@dataclass(frozen=True)
class Placed:
    """One tensor on one device, and what belongs to it: its gradient, and what the optimizer keeps.

    `replica` counts the copies of the model in one process, `part` the parts of one that is on
    several devices; `kind` is `parameter`, `buffer`, `average` (of the weights), `global` (weights
    that learners agree on, with what they send of them and its momentum), `optimizer` (kept for no
    weight), or `gathered` (of a micro-batch).
    Where ranks hold a part each, `whole` is the shape of all of it.
    """

    kind: str
    name: str
    device: str
    dtype: str
    shape: tuple[int, ...] | None
    bytes: int | None
    gradient_bytes: int | None = 0
    optimizer_bytes: int | None = 0
    replica: int = 0
    part: int = 0
    whole: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PlacementTotals:
    """The bytes that one replica on one rank holds, or one part of a model that is on several
    devices; what is gathered lives within a step only."""

    replica: int
    part: int
    device: str
    bytes: int | None
    gradient_bytes: int | None
    optimizer_bytes: int | None
    gathered_bytes: int | None

    @property
    def all_bytes(self) -> int | None:
        """Between the steps, with the gradients."""
        return _sum((self.bytes, self.gradient_bytes, self.optimizer_bytes))


@dataclass(frozen=True)
class RankPlacement:
    """What one rank holds."""

    rank: int
    rows: tuple[Placed, ...]

    @property
    def totals(self) -> tuple[PlacementTotals, ...]:
        """One for each replica, or part of one."""
        totals = []
        for replica, part in sorted({(row.replica, row.part) for row in self.rows}):
            rows = [row for row in self.rows if (row.replica, row.part) == (replica, part)]
            totals.append(
                PlacementTotals(
                    replica,
                    part,
                    rows[0].device,
                    _sum(row.bytes for row in rows if row.kind != GATHERED),
                    _sum(row.gradient_bytes for row in rows),
                    _sum(row.optimizer_bytes for row in rows),
                    _sum(row.bytes for row in rows if row.kind == GATHERED),
                )
            )
        return tuple(totals)

    @property
    def all_bytes(self) -> int | None:
        """Of all its replicas and parts, between the steps."""
        return _sum(total.all_bytes for total in self.totals)

    def to_data(self) -> dict[str, Any]:
        """As plain data, with the totals."""
        totals = [{**dataclasses.asdict(t), "all_bytes": t.all_bytes} for t in self.totals]
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"rank": self.rank, "totals": totals, "rows": rows}


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum; unknown if one of them is."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def placement_path(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank-{rank:03d}.json"


def write_placement(run_dir: Path, rank: int, rows: Iterable[Placed]) -> None:
    """Write what a rank holds, whole or not at all."""
    path = placement_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    write_whole(path, as_json(RankPlacement(rank, tuple(rows)).to_data()).encode())


def read_placements(run_dir: Path, ranks: int) -> list[RankPlacement]:
    """The placements that the ranks of a job have written, without those of an earlier start."""
    placements = []
    for rank in range(ranks):
        path = placement_path(run_dir, rank)
        if path.is_file():
            rows = json.loads(path.read_text())["rows"]
            placements.append(RankPlacement(rank, tuple(map(_read, rows))))
    return placements


def _read(row: dict[str, Any]) -> Placed:
    shapes = {key: None if row[key] is None else tuple(row[key]) for key in SHAPES if key in row}
    return Placed(**{**row, **shapes})


# --- simulated network ---------------------------------------------------------------------------
# Simulated nodes: how many, what they are called, and what their links carry. Pure.
#
#     --place simulated:link=1gbit,delay=1ms --nodes 2
#
# The nodes are real network namespaces on this machine (`launcher.places.switch` makes them): what
# crosses from one to the other crosses a link, as slow and as late as asked.
# What stays on a node does not.


NODE_ETH = "eth0"
MOST_NODES = 200


@dataclass(frozen=True)
class NodeLink:
    """What joins a node to the others: bits per second in each direction (0: as fast as it goes).

    `delay_s` is added to every packet in each direction, so twice to a round trip, and twice that
    between two nodes.
    """

    rate_bits: float = 0.0
    delay_s: float = 0.0


@dataclass(frozen=True)
class Network:
    """All nodes of one job, on a network of their own."""

    nodes: int
    link: NodeLink = NodeLink()
    bits: int = 24
    prefix: str = "10.77.0"

    @property
    def head(self) -> str:
        """The address of the head of the job, which is on no node: at the switch itself."""
        return f"{self.prefix}.254"

    def name(self, number: int) -> str:
        return f"node{number}"

    def address(self, number: int) -> str:
        return f"{self.prefix}.{number + 1}"

    def hosts_file(self) -> str:
        """The names of all nodes, as /etc/hosts of each has them."""
        named = {self.address(number): self.name(number) for number in range(self.nodes)}
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for address, name in {**named, self.head: "head"}.items():
            # the second is for those who ask which name an address has that IPv6 maps
            lines += [f"{address} {name}", f"::ffff:{address} {name}.simulated"]
        return "\n".join([*lines, ""])

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Network:
        return cls(**{**data, "link": NodeLink(**data["link"])})


def parse_network(place: str, nodes: int) -> Network:
    """The network that `simulated:link=…,delay=…` describes; raises `RequestError`."""
    options = place_spec(place).options
    if nodes > MOST_NODES:
        raise RequestError(
            asked=f"--place {place} --nodes {nodes}",
            found=f"{nodes} nodes on one machine",
            why=f"one bridge joins up to {MOST_NODES} of them here",
            do=f"--nodes {MOST_NODES} or fewer",
        )
    return Network(nodes, NodeLink(options.get("link", 0.0), options.get("delay", 0.0)))
