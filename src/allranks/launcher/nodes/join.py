"""The nodes of a job come together: who may come in, who is missing, and whether they fit.

The head listens at one address. A node is let in when it knows the key, was started with the same
words, and has a number that is free. Then, before anything is started: do all nodes have the same
versions and the same program, do they see the run folder, and by which address do they reach each
other? What is wrong is said by name, once, for all nodes.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shlex
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import EXIT_BAD_REQUEST, Interrupted, PlaceError, RequestError
from allranks.launcher.nodes.channel import Admission, Channel, Disconnected, Message, wait_for
from allranks.launcher.nodes.facts import Interface, NodeFacts, differences
from allranks.launcher.nodes.nodes import Node, Nodes

# --- ticket --------------------------------------------------------------------------------------
# What an agent must know to come to its job: one line on its standard input.


ANY = -1


@dataclass(frozen=True)
class Ticket:
    """What a node must know to come to its job.

    The head listens at one of `addresses`. `node` is the number of this one (`None`: that of the
    task that a scheduler started it as; `ANY`: one that is free). `words` are
    those of the command line that describe the job, the same on every node. An agent of which
    `follows` is true dies with the process that started it.
    """

    addresses: tuple[str, ...]
    port: int
    key: str
    node: int | None
    words: tuple[str, ...] = ()
    program: str = ""
    interface: str = ""
    join_timeout_s: float = 300.0
    node_timeout_s: float = 15.0
    follows: bool = True

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Ticket:
        data = json.loads(line)
        words, addresses = tuple(data["words"]), tuple(data["addresses"])
        return cls(**{**data, "words": words, "addresses": addresses})

    def for_task(self) -> Ticket:
        """The same for all tasks of a scheduler."""
        return dataclasses.replace(self, node=None)


ALIVE_EVERY_S = 1.0


@dataclass(frozen=True)
class Expected:
    """The nodes that are to join: their `names` by number, and what they must know."""

    names: tuple[str, ...]
    key: str
    words: tuple[str, ...] = ()
    join_timeout_s: float = 300.0


@dataclass
class JoinServer:
    """The server that nodes join: it authenticates each, and ends when all are there."""

    expected: Expected
    listener: socket.socket
    check: Callable[[], None] = lambda: None
    _there: dict[int, Node] = field(default_factory=dict)
    _turned_away: list[str] = field(default_factory=list)
    _alive_at: float = 0.0

    def __post_init__(self) -> None:
        self._admission = Admission(self.listener, self.expected.key, self._note_refused)

    def _note_refused(self) -> None:
        self._turned_away.append("one that does not know the id of this job")

    def wait_for_all(self) -> list[Node]:
        """All nodes, in order. Raises `PlaceError` that names who has not come in time.

        `check` is called all the while: it raises if what starts the nodes has failed.
        """
        deadline = time.monotonic() + self.expected.join_timeout_s
        try:
            while len(self._there) < len(self.expected.names):
                wait_for(self._admission.ready, 0.1)
                for channel, told in self._admission.admit():
                    self._seat(channel, told)
                self._look_after_those_that_wait()
                self.check()
                if time.monotonic() > deadline:
                    raise self._somebody_is_missing()
        except BaseException as error:
            for node in self._there.values():
                _send_away(node.channel, getattr(error, "exit_code", 1), str(error))
            raise
        finally:
            self._admission.close()
        return [self._there[number] for number in sorted(self._there)]

    def _seat(self, channel: Channel, told: Message) -> None:
        try:
            node = _node_of(channel, told)
        except (KeyError, TypeError, ValueError, IndexError):
            why = "it runs another version of allranks"
            self._turned_away.append(f"a node: {why}")
            _send_away(channel, EXIT_BAD_REQUEST, f"this node is refused: {why}")
            return
        if node.number == ANY:
            node.number = next(
                n for n in range(1, len(self.expected.names) + 1) if n not in self._there
            )
        if not 0 <= node.number < len(self.expected.names):
            self._turn_away(node, f"there are {len(self.expected.names)} nodes, numbered from 0")
        elif node.number in self._there:
            before = self._there[node.number].name
            self._turn_away(node, f"node {node.number} is here already, from {before}")
        elif node.words != self.expected.words:
            error = _other_words(node, self.expected.words)
            _send_away(channel, EXIT_BAD_REQUEST, str(error))
            raise error
        else:
            self._there[node.number] = node

    def _turn_away(self, node: Node, why: str) -> None:
        text = f"node {node.number} from {node.name} is refused: {why}"
        self._turned_away.append(f"node {node.number} from {node.name}: {why}")
        _send_away(node.channel, EXIT_BAD_REQUEST, text)

    def _look_after_those_that_wait(self) -> None:
        """A node may be gone again before the others are there; its place is free then.

        Those that are there hear meanwhile that the head is.
        """
        now = time.monotonic()
        due = now - self._alive_at > ALIVE_EVERY_S
        self._alive_at = now if due else self._alive_at
        for number, node in list(self._there.items()):
            try:
                node.channel.flush()
                if due:
                    node.channel.send({"do": "alive", "at": now})
                for message in node.channel.receive():
                    if message.get("asked", "SIGUSR2") != "SIGUSR2":
                        raise Interrupted(f"node {number} ({node.name}) got {message['asked']}")
            except Disconnected:
                self._there.pop(number).channel.close()

    def _somebody_is_missing(self) -> PlaceError:
        missing = [n for i, n in enumerate(self.expected.names) if i not in self._there]
        here = [f"{self.expected.names[n]} ({self._there[n].name})" for n in sorted(self._there)]
        away = f"; turned away: {'; '.join(dict.fromkeys(self._turned_away))}"
        return PlaceError(
            f"{_listed(missing)} of {len(self.expected.names)} nodes did not come within "
            f"{self.expected.join_timeout_s:g} s (--join-timeout); here: "
            f"{', '.join(here) or 'none'}" + (away if self._turned_away else "")
        )


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= 8 else [*names[:8], f"{len(names) - 8} more"]
    return ", ".join(shown)


def _node_of(channel: Channel, told: Message) -> Node:
    return Node(
        number=int(told["joins"]),
        channel=channel,
        facts=NodeFacts.from_data(told["facts"]),
        interfaces=tuple(Interface(*one) for one in told["interfaces"]),
        doorbell=(int(told["doorbell"][0]), str(told["doorbell"][1])),
        words=tuple(told["words"]),
        clock_ahead_s=float(told["clock"]) - time.monotonic(),
    )


def _send_away(channel: Channel, code: int, text: str) -> None:
    with suppress(Disconnected):
        channel.send({"do": "leave", "code": code, "text": f"allranks: {text}"})
    channel.close()


def _other_words(node: Node, words: tuple[str, ...]) -> RequestError:
    return RequestError(
        asked=f"node {node.number} from {node.name} to take part in this job",
        found=f"there: {shlex.join(node.words)}; here: {shlex.join(words)}",
        why="every node is started with the same words, all but its own number and interface",
        do="start all nodes again, with one command line",
    )


def preflight(nodes: Nodes, shared: Path | None, cwd: str, program: str = "") -> None:
    """What is wrong before anything is started; chooses the address of every node.

    With `shared`, a folder of the job, every node has to see it; `program` is a file that has to be
    the same on all. Raises `PlaceError`.
    """
    if shared is not None:
        _check_shared(nodes, shared, cwd)
    for node in nodes.living if program else ():
        digest = nodes.ask(node, {"do": "digest", "program": program})
        node.facts = dataclasses.replace(node.facts, program=digest)
    names = {f"node {node.number} ({node.name})": node.facts for node in nodes.living}
    if unequal := differences(names):
        raise PlaceError(
            "the nodes are not alike, and would not compute the same:\n"
            + "\n".join(f"  {line}" for line in unequal)
            + "\ninstall the same on every node, or share one environment"
        )
    choose_addresses(nodes)


def _check_shared(nodes: Nodes, folder: Path, cwd: str) -> None:
    """Every node reads what is written here now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            asked=f"--run-dir below {folder}",
            found=str(error),
            why="a job writes its record and its checkpoints there",
            do="name a folder that can be written",
        ) from None
    content, probe = secrets.token_hex(8), folder / f".allranks-probe-{secrets.token_hex(8)}"
    probe.write_text(content)
    try:
        blind = []
        for node in nodes.living:
            message = {"do": "see", "path": str(probe), "content": content, "cwd": cwd}
            if problem := nodes.ask(node, message):
                blind.append(f"  node {node.number} ({node.name}): {problem}")
    finally:
        probe.unlink()
    if blind:
        raise PlaceError(
            f"not every node sees {folder}, where the job writes its record and checkpoints:\n"
            + "\n".join(blind)
            + "\nname a folder on storage that all nodes share: --run-dir"
        )


def choose_addresses(nodes: Nodes) -> None:
    """The first address of each node at which all others reach it."""
    living = nodes.living
    if len(living) == 1:
        living[0].chosen = living[0].interfaces[0] if living[0].interfaces else _LOOPBACK_INTERFACE
        return
    asked: dict[str, Any] = {
        str(node.number): [[i.address for i in node.interfaces], *node.doorbell] for node in living
    }
    seen = nodes.ask_all({node.number: _to_all_but(node, asked) for node in living})
    for node in living:
        others = [other for other in living if other is not node]
        by_all = [
            one
            for one in node.interfaces
            if all(one.address in seen[other.number][str(node.number)] for other in others)
        ]
        if not by_all:
            raise PlaceError(_unreachable(node, others, seen))
        node.chosen = by_all[0]


def _to_all_but(node: Node, asked: dict[str, Any]) -> Message:
    others = {name: where for name, where in asked.items() if name != str(node.number)}
    return {"do": "probe", "nodes": others}


_LOOPBACK_INTERFACE = Interface("lo", "127.0.0.1")


def _unreachable(node: Node, others: list[Node], seen: dict[int, dict[str, list[str]]]) -> str:
    tried = ", ".join(f"{one.address} ({one.name})" for one in node.interfaces) or "none"
    lines = [
        f"node {node.number} ({node.name}) has no address that all others reach; tried {tried}"
    ]
    for other in others:
        reached = ", ".join(seen[other.number][str(node.number)]) or "none"
        lines.append(f"  from node {other.number} ({other.name}): {reached}")
    return "\n".join([*lines, "name the network that joins them with --interface, or open it"])


# --- rendezvous ----------------------------------------------------------------------------------
# How the nodes of a job come together, as the command line says it. Frozen data.
#
# It is not part of the job: the same job on the same nodes is the same, however these were found.


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
