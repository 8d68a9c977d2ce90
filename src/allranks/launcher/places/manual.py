"""Nodes that a user starts one by one: this is node 0, to which the others come by themselves."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from allranks.errors import RequestError
from allranks.launcher.nodes.facts import candidates, interfaces
from allranks.launcher.places.agents import AGENT, Agents, ticket_for
from allranks.launcher.places.base import AgentPlace, NodeRequest, Started, seats_on
from allranks.launcher.places.ssh import SshHosts
from allranks.launcher.plan import Seat


class ManualNodes(AgentPlace):
    """The nodes of `--rendezvous`; the record of a job calls them hosts, as those of a file."""

    name = SshHosts.name
    lends_nodes = True
    advice = SshHosts.advice

    def check(self, request: NodeRequest) -> None:
        rendezvous, nodes = request.rendezvous, request.nodes
        host, _, port = rendezvous.endpoint.rpartition(":")
        is_name = host.isascii() and all(0 < len(part) < 64 for part in host.strip("[]").split("."))
        if not is_name or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise RequestError(
                asked=f"--rendezvous {rendezvous.endpoint}",
                found="no HOST:PORT",
                why="node 0 listens there, and all others connect to it",
                do="--rendezvous HOST:29400, with a name or address of node 0",
            )
        if rendezvous.node_rank is not None and not 0 <= rendezvous.node_rank < nodes:
            raise RequestError(
                asked=f"--node-rank {rendezvous.node_rank} --nodes {nodes}",
                found=f"{nodes} nodes, numbered 0 to {nodes - 1}",
                why="every node has a number below the number of nodes",
                do=f"--node-rank between 0 and {nodes - 1}, or another --nodes",
            )
        if not rendezvous.key:
            raise RequestError(
                asked=f"--rendezvous {rendezvous.endpoint}",
                found="no --id",
                why="whoever knows the id of a job may take part in it, and nobody else",
                do="--id with a text that others do not guess, the same on every node",
            )

    def seats(self, request: NodeRequest) -> list[Seat]:
        return seats_on(request, [f"node {number}" for number in range(request.nodes)])

    @contextmanager
    def start(self, request: NodeRequest) -> Iterator[Started]:
        """Start one agent next to the head, on node 0."""
        key = request.rendezvous.key
        if request.rendezvous.interface:
            candidates("", request.rendezvous.interface)  # of node 0, before it is started
        with ExitStack() as stack:
            address, listener = _listen(stack, request)
            agents = stack.enter_context(Agents())
            ticket = ticket_for(request, key, (address,), listener.getsockname()[1], 0)
            agents.start("node 0", [sys.executable, *AGENT], ticket)
            names = tuple(f"node {number}" for number in range(request.nodes))
            yield Started(names, key, listener, agents.check, last_words=agents.last_words)


def _listen(stack: ExitStack, request: NodeRequest) -> tuple[str, socket.socket]:
    """The address of node 0, and a socket there for all nodes; raises `RequestError`."""
    host, port = request.rendezvous.address
    try:
        address = socket.gethostbyname(host)
        if address.startswith("127.") and not host.startswith("127.") and request.nodes > 1:
            raise OSError(f"{host} is {address} here, which no other machine reaches")
        return address, stack.enter_context(socket.create_server((address, port), backlog=1024))
    except (OSError, UnicodeError) as error:
        addresses = ", ".join(i.address for i in interfaces())
        raise RequestError(
            asked=f"--rendezvous {request.rendezvous.endpoint} --node-rank 0",
            found=f"{error} on {socket.gethostname()}, which has {addresses or '127.0.0.1'}",
            why="node 0 listens there, and all others come to it",
            do="name an address of node 0 that all nodes reach, and a port that is free",
        ) from None
