"""Nodes that are simulated on this machine: created, joined, broken on purpose, and removed.

A separate process (`switch`) creates the network namespaces, so that this process stays in its
own; it only has a socket that listens inside.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from allranks.errors import PlaceError, RequestError
from allranks.job.faults import MEND, Fault
from allranks.job.place import NODE_ETH, Network, NodeLink, parse_network
from allranks.launcher.nodes.join import Ticket
from allranks.launcher.places import AgentPlace, NodeRequest, Started, shared_out
from allranks.launcher.places.agents import ticket_for
from allranks.launcher.plan import Seat
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server_client import end_process, start_module
from allranks.strategies.auto import parse_rate

CLOSE_TIMEOUT_S = 10.0
MESSAGE_LIMIT = 1 << 17
DO = {"kill-node": "kill", "cut": "cut", MEND: "mend", "slow-link": "shape"}
"""What the switch is asked to do for a fault."""


class Simulated(AgentPlace):
    """Network namespaces as nodes, with links of the requested rate and delay."""

    name = "simulated"
    has_links = True
    advice = "mend what stands here; --place local needs nothing of it"

    def check(self, request: NodeRequest) -> None:
        parse_network(request.place, request.nodes)
        if request.device != "cpu":
            raise RequestError(
                asked=f"--place {request.place} --device {request.device}",
                found="simulated nodes",
                why="NCCL would join the devices of one machine past the links that are simulated",
                do="--device cpu, or --place local",
            )
        for fault in request.broken:
            _link_after(fault)

    def seats(self, request: NodeRequest) -> list[Seat]:
        network = parse_network(request.place, request.nodes)
        nodes = [Seat(n, network.name(n), NODE_ETH, machine=0) for n in range(request.nodes)]
        return shared_out(request, nodes)

    @contextmanager
    def start(self, request: NodeRequest) -> Iterator[Started]:
        network, key = parse_network(request.place, request.nodes), secrets.token_hex(32)
        with SimulatedNodes(network) as nodes:
            host, port = nodes.address
            for number in range(request.nodes):
                nodes.start(number, ticket_for(request, key, (host,), port, number))
            yield Started(
                names=tuple(network.name(number) for number in range(request.nodes)),
                key=key,
                listener=nodes.listener,
                check=nodes.check,
                watch=nodes.check,
                last_words=nodes.last_words,
                break_node=nodes.break_node,
            )


def _link_after(fault: Fault) -> NodeLink:
    """The link of a node after the fault; raises `RequestError`."""
    return NodeLink(parse_rate(fault.link, f"--inject {fault.action}@link={fault.link}"))


class SimulatedNodes:
    """The nodes of a network, each with an agent once it is started. Closing it ends them all.

    Raises `PlaceError` if this machine cannot simulate nodes, with what is missing.
    """

    def __init__(self, network: Network) -> None:
        leftovers.sweep()
        self.network = network
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, leftovers.VARIABLE: f"{leftovers.owner()}/switch"}
        words = [json.dumps(network.to_data())]
        self._process = start_module("places.switch", theirs, words, environment)
        theirs.close()
        self._outputs: list[int] = []
        try:
            self.listener = self._built()
        except BaseException:
            self.close()
            raise

    def _built(self) -> socket.socket:
        message, fds, _, _ = socket.recv_fds(self._control, MESSAGE_LIMIT, 1)
        problem = json.loads(message).get("problem") if message else "its message stands above"
        if problem:
            raise PlaceError(f"this machine cannot simulate nodes: {problem}")
        return socket.socket(fileno=fds[0])

    @property
    def address(self) -> tuple[str, int]:
        """The address of the head, for the nodes."""
        host, port = self.listener.getsockname()
        return str(host), int(port)

    def start(self, number: int, ticket: Ticket) -> int:
        """Create a node, and start an agent with this ticket on it; returns the agent's pid."""
        entry, exit_ = os.pipe()
        output = os.memfd_create(f"allranks-node-{number}")
        self._outputs.append(output)
        with open(exit_, "w") as pipe:
            answer = self._ask({"do": "start", "number": number}, [entry, output])
            os.close(entry)
            pipe.write(ticket.to_line())
        return int(answer["pid"])

    def break_node(self, fault: Fault) -> None:
        """Inject a fault of `faults.NODE_FAULTS` into its node, or mend its link."""
        request: dict[str, Any] = {"do": DO[fault.action], "number": fault.node}
        if fault.action == "slow-link":
            link = _link_after(fault)
            request["link"] = [link.rate_bits, link.delay_s]
        self._ask(request)

    def check(self) -> None:
        """Raise `PlaceError` if the switch is gone."""
        if self._process.poll() is not None:
            raise PlaceError(
                f"the switch of the simulated nodes ended with code {self._process.returncode}"
            )

    def last_words(self, number: int) -> str:
        """The output of a node's agent: its error, if it ended by itself."""
        return os.pread(self._outputs[number], 1 << 16, 0).decode(errors="replace")

    def _ask(self, message: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds or [])
            received = self._control.recv(MESSAGE_LIMIT)
        except OSError:
            received = b""
        if not received:
            raise PlaceError("the switch of the simulated nodes is gone")
        answer: dict[str, Any] = json.loads(received)
        if "problem" in answer:
            raise PlaceError(f"simulated nodes: {answer['problem']}")
        return answer

    def close(self) -> None:
        """End all nodes, wait for them, and remove what killed nodes left."""
        self._control.close()
        end_process(self._process, CLOSE_TIMEOUT_S)
        if hasattr(self, "listener"):
            self.listener.close()
        for output in self._outputs:
            os.close(output)
        self._outputs.clear()
        leftovers.sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
