"""Hosts that a file lists: one agent on each, started by ssh from here."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from allranks.errors import PlaceError, RequestError
from allranks.launcher.places.agents import AGENT, Agents, listen_to_all, ticket_for
from allranks.launcher.places.base import AgentPlace, NodeRequest, Started, seats_on
from allranks.launcher.places.hostfile import HostSlots, read_hostfile
from allranks.launcher.plan import Seat


class SshHosts(AgentPlace):
    """The hosts of `--hosts`; the same Python and folder must be there."""

    name = "hosts"
    lends_nodes = True
    advice = (
        "start every node with the same words; `ssh HOST true` must work without a password, "
        "and the port of --rendezvous be open"
    )

    def check(self, request: NodeRequest) -> None:
        """Nothing is refused before the file is read."""

    def seats(self, request: NodeRequest) -> list[Seat]:
        if not request.rendezvous.hosts:
            return seats_on(request, [f"node {number}" for number in range(request.nodes)])
        hosts = _hosts(request)
        return seats_on(request, [host.host for host in hosts], _slots(hosts))

    @contextmanager
    def start(self, request: NodeRequest) -> Iterator[Started]:
        hosts, key = _hosts(request), secrets.token_hex(32)
        if shutil.which("ssh") is None:
            raise PlaceError("--hosts needs the command ssh, and there is none on this machine")
        with ExitStack() as stack:
            listener, addresses = listen_to_all(stack, request.rendezvous)
            agents = stack.enter_context(Agents())
            there = shlex.join(["cd", os.getcwd()])
            command = shlex.join([sys.executable, *AGENT])
            for number, host in enumerate(hosts):
                ticket = ticket_for(request, key, addresses, listener.getsockname()[1], number)
                ssh = ["ssh", "-o", "BatchMode=yes", "-T", host.host]
                agents.start(host.host, [*ssh, f"{there} && exec {command}"], ticket)
            names = tuple(host.host for host in hosts)
            said = agents.said
            yield Started(names, key, listener, agents.check, slots=_slots(hosts), said=said)


def _hosts(request: NodeRequest) -> tuple[HostSlots, ...]:
    """The hosts of the file, as many as are asked for."""
    file = request.rendezvous.hosts
    hosts = read_hostfile(file)
    if len(hosts) < request.nodes:
        raise RequestError(
            asked=f"--hosts {file} --nodes {request.nodes}",
            found=f"{len(hosts)} hosts in it",
            why="every node is a host of its own",
            do=f"--nodes {len(hosts)}, or name more hosts",
        )
    return hosts[: request.nodes]


def _slots(hosts: tuple[HostSlots, ...]) -> tuple[int, ...]:
    return tuple(host.slots or 0 for host in hosts)
