"""Starts agents on nodes by commands, and opens the socket that they join.

An agent reads its ticket from standard input, so that no list of processes shows the key.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import IO

from allranks.errors import PlaceError
from allranks.launcher.nodes.facts import candidates
from allranks.launcher.nodes.join import Ticket
from allranks.launcher.places import NodeRequest, Rendezvous
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server_client import end_process

END_TIMEOUT_S, START_S = 5.0, 60.0
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


@dataclass
class AgentCommand:
    """A command that starts an agent on its node, and what it prints."""

    name: str
    command: list[str]
    ticket: Ticket
    environment: dict[str, str]
    output: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start_again(self) -> None:
        """Start the command again if it has ended; ask it to end if it takes too long."""
        if self.process.poll() is not None:
            self.start()
        elif time.monotonic() > self.started_at + START_S:
            self.process.terminate()  # it waits for a host that is gone

    def start(self) -> None:
        """Start the command, whose output replaces that of the one before."""
        self.output.seek(0)
        self.output.truncate()
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
            env=self.environment,
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # `check` reports its end
            pipe.write(self.ticket.to_line().encode())


class Agents:
    """Commands that start an agent on its node; their output is kept for error messages."""

    def __init__(self) -> None:
        self._all: list[AgentCommand] = []

    def start(
        self, name: str, command: list[str], ticket: Ticket, without: Sequence[str] = ()
    ) -> None:
        """Start a command in this environment, except for the variables `without`."""
        mark = f"{leftovers.owner()}/agents"
        inherited = {name: v for name, v in os.environ.items() if name not in without}
        environment = {**inherited, leftovers.VARIABLE: mark}
        self._all.append(AgentCommand(name, command, ticket, environment))

    def start_again(self, number: int) -> None:
        """Start the command of node `number` again, which is lost."""
        self._all[number].start_again()

    def check(self) -> None:
        """Raise `PlaceError` if a command has ended before its agent joined."""
        for number, agent in enumerate(self._all):
            if (code := agent.process.poll()) is not None:
                printed = self._printed(number).strip()
                raise PlaceError(
                    f"{agent.name} could not be started: its command ended with code {code}\n"
                    f"{printed}".rstrip()
                )

    def _printed(self, number: int) -> str:
        output = self._all[number].output
        output.seek(0)
        return output.read().decode(errors="replace")

    def last_words(self, number: int) -> str:
        """The end of the output of the command that started this agent."""
        return self._printed(number)[-LAST_WORDS:] if number < len(self._all) else ""

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the agents, which end when the head releases them; kill those that do not."""
        for agent in self._all:
            process = agent.process
            if error[0] is not None:  # an agent that has not joined would go on trying
                process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.terminate()
                end_process(process, END_TIMEOUT_S)
            agent.output.close()
