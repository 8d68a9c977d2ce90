"""Starts agents on nodes by commands, and opens the socket that they join.

An agent reads its ticket from standard input, so that no list of processes shows the key.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO

from allranks.errors import PlaceError
from allranks.launcher.nodes.facts import candidates
from allranks.launcher.nodes.join import Ticket
from allranks.launcher.places import NodeRequest, Rendezvous
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server_client import end_process

END_TIMEOUT_S = 5.0
LAST_WORDS = 2000
AGENT = ("-P", "-m", "allranks.launcher.nodes.agent")


def ticket_for(
    request: NodeRequest, key: str, addresses: tuple[str, ...], port: int, node: int | None
) -> Ticket:
    """The ticket with which the agent of this node joins the head at one of these addresses.

    `node` is its number; see `Ticket`.
    """
    rendezvous = request.rendezvous
    return Ticket(
        addresses=addresses,
        port=port,
        key=key,
        node=node,
        words=request.words,
        program=request.program,
        interface=rendezvous.interface,
        join_timeout_s=rendezvous.join_timeout_s,
        node_timeout_s=rendezvous.node_timeout_s,
    )


def listen_to_all(
    stack: ExitStack, rendezvous: Rendezvous
) -> tuple[socket.socket, tuple[str, ...]]:
    """A socket for agents of other machines, and the addresses at which they may find it.

    It listens at one address with --interface, or if there is only one; else at all, since it is
    not known yet which of them the nodes reach. Only nodes with the key get an answer.
    """
    interfaces = candidates("", rendezvous.interface)
    addresses = tuple(interface.address for interface in interfaces) or ("127.0.0.1",)
    at = addresses[0] if len(addresses) == 1 else ""
    listener = stack.enter_context(socket.create_server((at, 0), backlog=1024))
    return listener, addresses


class Agents:
    """Commands that start an agent on its node; their output is kept for error messages."""

    def __init__(self) -> None:
        self._all: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []

    def start(
        self, name: str, command: list[str], ticket: Ticket, without: Sequence[str] = ()
    ) -> None:
        """Start a command in this environment, except for the variables `without`."""
        output = tempfile.TemporaryFile()
        mark = f"{leftovers.owner()}/agents"
        inherited = {name: v for name, v in os.environ.items() if name not in without}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**inherited, leftovers.VARIABLE: mark},
        )
        assert process.stdin is not None
        self._all.append((name, process, output))
        with suppress(BrokenPipeError), process.stdin as pipe:  # `check` reports its end
            pipe.write(ticket.to_line().encode())

    def check(self) -> None:
        """Raise `PlaceError` if a command has ended before its agent joined."""
        for name, process, output in self._all:
            if process.poll() is not None:
                output.seek(0)
                printed = output.read().decode(errors="replace").strip()
                raise PlaceError(
                    f"{name} could not be started: its command "
                    f"ended with code {process.returncode}\n{printed}".rstrip()
                )

    def last_words(self, number: int) -> str:
        """The end of the output of the command that started this agent."""
        if number >= len(self._all):
            return ""
        output = self._all[number][2]
        output.seek(0)
        return output.read().decode(errors="replace")[-LAST_WORDS:]

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the agents, which end when the head releases them; kill those that do not."""
        for _name, process, output in self._all:
            if error[0] is not None:  # an agent that has not joined would go on trying
                process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.terminate()
                end_process(process, END_TIMEOUT_S)
            output.close()
