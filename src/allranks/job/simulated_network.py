"""Simulated nodes: how many, what they are called, and what their links carry. Pure.

    --place simulated:link=1gbit,delay=1ms --nodes 2

The nodes are real network namespaces on this machine (`launcher.places.switch` makes them): what
crosses from one to the other crosses a link, as slow and as late as asked.
What stays on a node does not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from allranks.errors import RequestError
from allranks.job.place import place_spec

NODE_ETH = "eth0"
MOST_NODES = 200


@dataclass(frozen=True)
class Link:
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
    link: Link = Link()
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
        return cls(**{**data, "link": Link(**data["link"])})


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
    return Network(nodes, Link(options.get("link", 0.0), options.get("delay", 0.0)))
