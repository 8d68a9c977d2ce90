"""The nodes of a job join its head: admission, missing nodes, and the checks before the start.

The head listens at one address; in an elastic job to its end, for a node may come back after it was
lost. It admits a node that knows the key, was started with the same command line, and has a free
number. Before anything starts, the head checks that all nodes have the same versions and program
and see the run folder, and chooses the address at which each is reachable. An error names every
node that differs.
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
from allranks.launcher.nodes.nodes import ANSWER_S, Node, Nodes

# --- ticket --------------------------------------------------------------------------------------
# What an agent needs to join its job: one line on its standard input.


ANY = -1


@dataclass(frozen=True)
class Ticket:
    """What a node needs to join its job.

    The head listens at one of `addresses`. `node` is this node's number (`None`: the number of
    its task in the scheduler; `ANY`: any free one). `words` are the command-line words that
    describe the job, equal on every node. With `follows` the agent dies with its parent.
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


ALIVE_EVERY_S = 1.0
SOON_S = 10.0  # for an answer of a node that has come back: the head waits for it


@dataclass
class JoinServer:
    """The server that nodes join: it authenticates each, and ends when all are there.

    `names` are those of the nodes, by number; they must know the `key`, and have the same `words`.
    """

    names: tuple[str, ...]
    key: str
    listener: socket.socket
    words: tuple[str, ...] = ()
    join_timeout_s: float = 300.0
    check: Callable[[], None] = lambda: None
    _joined: dict[int, Node] = field(default_factory=dict)
    _refused: list[str] = field(default_factory=list)
    _alive_at: float = 0.0

    def __post_init__(self) -> None:
        self._admission = Admission(self.listener, self.key, self._note_refused)

    def _note_refused(self) -> None:
        self._refused.append("one that does not know the id of this job")

    def wait_for_all(self) -> list[Node]:
        """All nodes, in order. Raises `PlaceError` with the nodes that did not join in time.

        `check` is called repeatedly; it raises if the mechanism that starts the nodes has failed.
        """
        deadline = time.monotonic() + self.join_timeout_s
        try:
            while len(self._joined) < len(self.names):
                wait_for(self._admission.ready, 0.1)
                for channel, introduction in self._admission.admit():
                    self._seat(channel, introduction)
                self._check_waiting_nodes()
                self.check()
                if time.monotonic() > deadline:
                    raise self._missing_nodes()
        except BaseException as error:
            for node in self._joined.values():
                _dismiss(node.channel, getattr(error, "exit_code", 1), str(error))
            raise
        finally:
            self.close()
        return [self._joined[number] for number in sorted(self._joined)]

    def close(self) -> None:
        """Close the connections that are not admitted yet."""
        self._admission.close()

    def admit_again(self, nodes: list[Node]) -> list[Node]:
        """Those that have come in place of lost ones of these `nodes` since the last call.

        They are not checked yet. Never blocks.
        """
        self._refused.clear()
        self._joined = {node.number: node for node in nodes if not node.lost}
        before = set(self._joined)
        for channel, introduction in self._admission.admit():
            with suppress(RequestError):  # other words: it is refused, and has the error
                self._seat(channel, introduction)
        return [node for number, node in self._joined.items() if number not in before]

    def _seat(self, channel: Channel, introduction: Message) -> None:
        try:
            node = _node_of(channel, introduction)
        except (KeyError, TypeError, ValueError, IndexError):
            why = "it runs another version of allranks"
            self._refused.append(f"a node: {why}")
            _dismiss(channel, EXIT_BAD_REQUEST, f"this node is refused: {why}")
            return
        if node.number == ANY:
            numbers = range(1, len(self.names) + 1)  # the last one is of no node, and refused
            node.number = next(n for n in numbers if n not in self._joined)
        if not 0 <= node.number < len(self.names):
            self._refuse(node, f"there are {len(self.names)} nodes, numbered from 0")
        elif node.number in self._joined:
            before = self._joined[node.number].name
            self._refuse(node, f"node {node.number} is here already, from {before}")
        elif node.words != self.words:
            error = _other_words(node, self.words)
            _dismiss(channel, EXIT_BAD_REQUEST, str(error))
            raise error
        else:
            self._joined[node.number] = node

    def _refuse(self, node: Node, why: str) -> None:
        self._refused.append(f"node {node.number} from {node.name}: {why}")
        refuse(node, why)

    def _check_waiting_nodes(self) -> None:
        """Free the number of a node that left before the others joined; send others `alive`."""
        now = time.monotonic()
        due = now - self._alive_at > ALIVE_EVERY_S
        self._alive_at = now if due else self._alive_at
        for number, node in list(self._joined.items()):
            try:
                node.channel.flush()
                if due:
                    node.channel.send({"do": "alive", "at": now})
                for message in node.channel.receive():
                    if message.get("asked", "SIGUSR2") != "SIGUSR2":
                        raise Interrupted(f"node {number} ({node.name}) got {message['asked']}")
            except Disconnected:
                self._joined.pop(number).channel.close()

    def _missing_nodes(self) -> PlaceError:
        missing = [n for i, n in enumerate(self.names) if i not in self._joined]
        here = [f"{self.names[n]} ({self._joined[n].name})" for n in sorted(self._joined)]
        away = f"; turned away: {'; '.join(dict.fromkeys(self._refused))}"
        return PlaceError(
            f"{_listed(missing)} of {len(self.names)} nodes did not come within "
            f"{self.join_timeout_s:g} s (--join-timeout); here: "
            f"{', '.join(here) or 'none'}" + (away if self._refused else "")
        )


def _listed(names: list[str]) -> str:
    shown = names if len(names) <= 8 else [*names[:8], f"{len(names) - 8} more"]
    return ", ".join(shown)


def _node_of(channel: Channel, introduction: Message) -> Node:
    return Node(
        number=int(introduction["joins"]),
        channel=channel,
        facts=NodeFacts.from_data(introduction["facts"]),
        interfaces=tuple(Interface(*fields) for fields in introduction["interfaces"]),
        doorbell=(int(introduction["doorbell"][0]), str(introduction["doorbell"][1])),
        words=tuple(introduction["words"]),
        clock_ahead_s=float(introduction["clock"]) - time.monotonic(),
    )


def refuse(node: Node, why: str) -> None:
    """Turn away a node that has been admitted."""
    text = f"node {node.number} from {node.name} is refused: {why}"
    _dismiss(node.channel, EXIT_BAD_REQUEST, text)
    node.lost = node.lost or why


def _dismiss(channel: Channel, code: int, text: str) -> None:
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


def preflight(
    nodes: Nodes,
    shared: Path | None,
    cwd: str,
    program: str = "",
    back: Node | None = None,
    before: Node | None = None,
) -> None:
    """Check all nodes before anything starts, and choose the address of each.

    Every node must see the folder `shared`, and have the same file `program`. Raises `PlaceError`.
    Later only a node that has come `back` is checked, in the place of `before`. It has its address
    in the same network: the others have closed the doorbells by which all are tried at the start.
    """
    checked = nodes.living if back is None else [back]
    seconds = ANSWER_S if back is None else SOON_S
    if shared is not None:
        _check_shared(nodes, checked, shared, cwd, seconds)
    for node in checked if program else ():
        digest = nodes.ask(node, {"do": "digest", "program": program}, seconds)
        node.facts = dataclasses.replace(node.facts, program=digest)
    names = {f"node {node.number} ({node.name})": node.facts for node in nodes.living}
    if unequal := differences(names):
        raise PlaceError(
            "the nodes are not alike, and would not compute the same:\n"
            + "\n".join(f"  {line}" for line in unequal)
            + "\ninstall the same on every node, or share one environment"
        )
    if back is None:
        choose_addresses(nodes)
    else:
        network = "" if before is None or before.chosen is None else before.chosen.name
        of_network = [each for each in back.interfaces if each.name == network]
        back.chosen = [*of_network, *back.interfaces, _LOOPBACK_INTERFACE][0]


def _check_shared(
    nodes: Nodes, checked: list[Node], folder: Path, cwd: str, seconds: float
) -> None:
    """Raise `PlaceError` unless each of these nodes can read a file that the head just wrote."""
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
        for node in checked:
            message = {"do": "see", "path": str(probe), "content": content, "cwd": cwd}
            if problem := nodes.ask(node, message, seconds):
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
    doorbells: dict[str, Any] = {
        str(node.number): [[i.address for i in node.interfaces], *node.doorbell] for node in living
    }
    messages: dict[int, Message] = {}
    for node in living:
        others = {name: bell for name, bell in doorbells.items() if name != str(node.number)}
        messages[node.number] = {"do": "probe", "nodes": others}
    reached = nodes.ask_all(messages)
    for node in living:
        peers = [other for other in living if other is not node]
        by_all = [
            interface
            for interface in node.interfaces
            if all(interface.address in reached[other.number][str(node.number)] for other in peers)
        ]
        if not by_all:
            raise PlaceError(_unreachable(node, peers, reached))
        node.chosen = by_all[0]


_LOOPBACK_INTERFACE = Interface("lo", "127.0.0.1")


def _unreachable(node: Node, others: list[Node], reached: dict[int, dict[str, list[str]]]) -> str:
    tried = ", ".join(f"{i.address} ({i.name})" for i in node.interfaces) or "none"
    lines = [
        f"node {node.number} ({node.name}) has no address that all others reach; tried {tried}"
    ]
    for other in others:
        answered = ", ".join(reached[other.number][str(node.number)]) or "none"
        lines.append(f"  from node {other.number} ({other.name}): {answered}")
    return "\n".join([*lines, "name the network that joins them with --interface, or open it"])
