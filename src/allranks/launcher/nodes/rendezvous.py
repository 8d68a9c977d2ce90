"""How the nodes of a job come together, as the command line says it. Frozen data.

It is not part of the job: the same job on the same nodes is the same, however these were found.
"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.errors import RequestError


@dataclass(frozen=True)
class Rendezvous:
    """Nodes that a user starts one by one, or hosts that are reached by ssh; else the place knows.

    Nodes that are started one by one come to `endpoint` ("host:port", of node 0), and `key` is the
    name of the job that all of them give. Without a `node_rank` the one that has the address of the
    endpoint is node 0, and the others get their numbers as they come. `hosts` is a file of hosts.
    `interface` is the network that joins the nodes. A node that does not come within
    `join_timeout_s`, or is silent for `node_timeout_s`, is lost. With `per_rank` a scheduler starts
    a task for every rank instead of one for every node.
    """

    node_rank: int | None = None
    endpoint: str = ""
    key: str = ""
    hosts: str = ""
    interface: str = ""
    join_timeout_s: float = 300.0
    node_timeout_s: float = 15.0
    per_rank: bool = False

    @property
    def by_hand(self) -> bool:
        return bool(self.endpoint)

    @property
    def names_nodes(self) -> bool:
        """Whether the user says which nodes, and not the place."""
        return self.by_hand or bool(self.hosts)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the endpoint."""
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


def check_parts(rendezvous: Rendezvous, nodes: int) -> None:
    """Raise `RequestError` unless its parts fit each other."""
    if rendezvous.node_rank is not None and not rendezvous.by_hand:
        raise RequestError(
            asked=f"--nodes {nodes} --node-rank {rendezvous.node_rank}",
            found="no --rendezvous",
            why="nodes that are started one by one need a place to meet",
            do="--rendezvous HOST:PORT --id NAME, the same on every node",
        )
    if rendezvous.by_hand and rendezvous.hosts:
        raise RequestError(
            asked=f"--hosts {rendezvous.hosts} --rendezvous {rendezvous.endpoint}",
            found="two ways to find the nodes",
            why="with --hosts all nodes are started from here, with --rendezvous each by itself",
            do="give one of them",
        )
