"""Hosts that a file lists: one agent on each, started by ssh from here."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import PlaceError, RequestError
from allranks.launcher.nodes.facts import candidates, interfaces
from allranks.launcher.places import AgentPlace, NodeRequest, Started, seats_on
from allranks.launcher.places.agents import AGENT, Agents, listen_to_all, ticket_for
from allranks.launcher.plan import Seat

# --- hostfile ------------------------------------------------------------------------------------
# Files that list the hosts of a job and how many processes each may run, as other tools read them.
#
#     node1 slots=4                 DeepSpeed, Open MPI
#     node2 slots=4 max_slots=8     Open MPI
#     node3:4                       MPICH, Intel MPI
#     node4                         any of them: as many as the job says
#     node5                         twice the same line, as batch systems write it: two slots
#     node5
#     # a comment
#
# Pure but for `read_hostfile`.


NAME = re.compile(r"(?:[\w.-]+@)?(?:[\w.-]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]+)(?:%[\w.-]+)?")
BRACKETED = re.compile(r"((?:[\w.-]+@)?)\[([0-9a-fA-F:.]+(?:%[\w.-]+)?)\](?::(.*))?")
SLOTS, MOST_SLOTS = ("slots",), ("max_slots", "max-slots")
MOST = 100_000


@dataclass(frozen=True)
class HostSlots:
    """A host, with its `user@`, and how many processes it may run (`None`: no line says)."""

    host: str
    slots: int | None


@dataclass(frozen=True)
class _HostLine:
    number: int
    host: str
    slots: int | None


def read_hostfile(path: str | Path) -> tuple[HostSlots, ...]:
    """The hosts of the file, in its order; raises `RequestError` that names file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise RequestError(
            asked=f"the hosts in {path}",
            found=str(error),
            why="a hostfile is a text with a host on each line",
            do="check the path",
        ) from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str) -> tuple[HostSlots, ...]:
    """The hosts that `text` lists, in its order; `name` is how errors call the file."""
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if words:
            lines.append(_read_line(words, number, name))
    if not lines:
        raise RequestError(
            asked=f"the hosts in {name}",
            found="no host in it",
            why="a job needs at least one",
            do="write a host on each line, as `node1 slots=4`",
        )
    return tuple(_merged(host, lines, name) for host in dict.fromkeys(row.host for row in lines))


def _read_line(words: list[str], number: int, name: str) -> _HostLine:
    where = f"line {number} of {name}"
    host, slots = _host_of(words[0], where)
    most = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in (*SLOTS, *MOST_SLOTS):
            raise _wrong(where, repr(word), "after the host only slots= and max_slots= are known")
        if key in MOST_SLOTS:
            most = _count(value, where)
        elif slots is not None:
            raise _wrong(where, repr(word), "the slots of this host were said already")
        else:
            slots = _count(value, where)
    if most is not None and slots is not None and slots > most:
        raise _wrong(where, f"slots={slots}, max_slots={most}", "these are more than the most")
    return _HostLine(number, host, slots)


def _host_of(word: str, where: str) -> tuple[str, int | None]:
    """`node3:4` -> node3, 4; `[fe80::1]:4` is an IPv6 address in brackets."""
    bracketed = BRACKETED.fullmatch(word)
    if bracketed:
        host, count = bracketed[1] + bracketed[2], bracketed[3]
    elif word.count(":") == 1:
        host, _, count = word.partition(":")
    else:
        host, count = word, None
    if not NAME.fullmatch(host) or host.startswith("-"):
        raise _wrong(where, repr(word), "this is no name or address of a host")
    return host, None if count is None else _count(count, where)


def _count(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= MOST:
        raise _wrong(where, repr(text), f"slots are a whole number from 1 to {MOST}")
    return int(text)


def _merged(host: str, lines: list[_HostLine], name: str) -> HostSlots:
    """One host: its line, or one slot for each line that only names it."""
    of_host = [row for row in lines if row.host == host]
    if len(of_host) == 1:
        return HostSlots(host, of_host[0].slots)
    if any(row.slots is not None for row in of_host):
        where = f"lines {' and '.join(str(row.number) for row in of_host)} of {name}"
        raise _wrong(where, f"{host!r} on each of them", "whether their slots add up is unclear")
    return HostSlots(host, len(of_host))


def _wrong(where: str, found: str, why: str) -> RequestError:
    return RequestError(
        asked=where,
        found=found,
        why=why,
        do="write a host on each line, as `node1 slots=4`, `node1:4` or `node1`",
    )


class SshHosts(AgentPlace):
    """The hosts of `--hosts`; the same Python and folder must be there."""

    name = "hosts"
    lends_nodes = True
    advice = (
        "start every node with the same words; `ssh HOST true` must work without a password, "
        "and the port of --rendezvous be open"
    )

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
            more: dict[str, Any] = {"slots": _slots(hosts), "last_words": agents.last_words}
            more["start_again"] = agents.start_again
            yield Started(names, key, listener, agents.check, **more)


def _hosts(request: NodeRequest) -> tuple[HostSlots, ...]:
    """The first hosts of the file, one for each requested node."""
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


# --- manual --------------------------------------------------------------------------------------
# Nodes that a user starts one by one: this is node 0, to which the others come by themselves.


class ManualNodes(SshHosts):
    """The nodes of `--rendezvous`; the record of a job calls them hosts, as those of a file."""

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
