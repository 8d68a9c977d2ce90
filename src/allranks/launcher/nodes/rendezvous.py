"""How the nodes of a job come together, as the command line says it. Frozen data.

It is not part of the job: the same job on the same nodes is the same, however these were found.
"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.errors import RequestError


@dataclass(frozen=True)
class Meeting:
    """Nodes that a user starts one by one, or hosts that are reached by ssh; else the place knows.

    Nodes that are started one by one meet at `rendezvous` ("host:port", of node 0), and `key` is
    the name of the job that all of them give. Without a `node_rank` the one that has the address of
    the rendezvous is node 0, and the others get their numbers as they come. `hosts` is a file of hosts. `interface` is the network that joins the
    nodes. A node that does not come within `join_timeout_s`, or is silent for `node_timeout_s`, is
    lost. With `per_rank` a scheduler starts a task for every rank instead of one for every node.
    """

    node_rank: int | None = None
    rendezvous: str = ""
    key: str = ""
    hosts: str = ""
    interface: str = ""
    join_timeout_s: float = 300.0
    node_timeout_s: float = 15.0
    per_rank: bool = False

    @property
    def by_hand(self) -> bool:
        return bool(self.rendezvous)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)


def checked_meeting(meeting: Meeting, nodes: int, place: str) -> Meeting:
    """The meeting, if its parts fit each other; raises `RequestError`."""
    if meeting.node_rank is not None and not meeting.by_hand:
        raise RequestError(
            asked=f"--nodes {nodes} --node-rank {meeting.node_rank}",
            found="no --rendezvous",
            why="nodes that are started one by one need a place to meet",
            do="--rendezvous HOST:PORT --id NAME, the same on every node",
        )
    if meeting.by_hand and meeting.hosts:
        raise RequestError(
            asked=f"--hosts {meeting.hosts} --rendezvous {meeting.rendezvous}",
            found="two ways to find the nodes",
            why="with --hosts all nodes are started from here, with --rendezvous each by itself",
            do="give one of them",
        )
    if (meeting.by_hand or meeting.hosts) and place != "local":
        raise RequestError(
            asked=f"--place {place} with --rendezvous or --hosts",
            found="a place that knows its nodes",
            why="simulated nodes are made here, and those of Slurm are given by Slurm",
            do="leave --place out, or leave the others out",
        )
    if meeting.by_hand:
        _check_rendezvous(meeting, nodes)
    if meeting.per_rank and place != "slurm":
        raise RequestError(
            asked=f"--per-rank --place {place}",
            found="no Slurm that would start the ranks",
            why="with it Slurm starts a task for every rank, in place of one for every node",
            do="--place slurm, or leave --per-rank out",
        )
    return meeting


def _check_rendezvous(meeting: Meeting, nodes: int) -> None:
    host, _, port = meeting.rendezvous.rpartition(":")
    is_name = host.isascii() and all(0 < len(part) < 64 for part in host.strip("[]").split("."))
    if not is_name or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RequestError(
            asked=f"--rendezvous {meeting.rendezvous}",
            found="no HOST:PORT",
            why="node 0 listens there, and all others connect to it",
            do="--rendezvous HOST:29400, with a name or address of node 0",
        )
    if meeting.node_rank is not None and not 0 <= meeting.node_rank < nodes:
        raise RequestError(
            asked=f"--node-rank {meeting.node_rank} --nodes {nodes}",
            found=f"{nodes} nodes, numbered 0 to {nodes - 1}",
            why="every node has a number below the number of nodes",
            do=f"--node-rank between 0 and {nodes - 1}, or another --nodes",
        )
    if not meeting.key:
        raise RequestError(
            asked=f"--rendezvous {meeting.rendezvous}",
            found="no --id",
            why="whoever knows the id of a job may take part in it, and nobody else",
            do="--id with a text that others do not guess, the same on every node",
        )
