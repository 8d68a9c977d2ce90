"""The head's side of all nodes of a job: one owner of processes, with an agent on each node.

To the supervisor it is what a fork server is on one machine. A node is lost if its connection
breaks or it is silent for longer than the time-out: its ranks are reported as ended, and the next
attempt uses the remaining nodes. Clocks are never compared between hosts: a time on an agent's
monotonic clock is converted to ours by the shortest round trip so far.
"""

from __future__ import annotations

import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import EXIT_DONE, PlaceError
from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.nodes.channel import Channel, Disconnected, Message, wait_for
from allranks.launcher.nodes.facts import Interface, NodeFacts
from allranks.launcher.processes.fork_server_client import ForkServer, checked_size, hash_seed
from allranks.launcher.processes.linux import Kills
from allranks.launcher.processes.process import Exit, Process, Processes, ProcessState
from allranks.launcher.world import World

ALIVE_EVERY_S = 1.0
SILENT_S = 3.0
SAME_REQUEST_S = 5.0
DRAIN_S = 2.0  # for a signal to all nodes to come to that of the head
MESSAGES = ("SIGUSR1", "SIGUSR2")
SUSPENDED_S = 2.0
CLOCKS_LAST_S = 60.0
ANSWER_S = 60.0
LEAVE_S = 5.0


@dataclass
class Node:
    """One node of the job, as the head knows it. `lost` says why it is lost; "" while it is not.

    `drain` is the signal by which this node alone was asked to leave, at `drained_at`.
    """

    number: int
    channel: Channel
    facts: NodeFacts
    interfaces: tuple[Interface, ...]
    doorbell: tuple[int, str]
    words: tuple[str, ...]
    clock_ahead_s: float
    round_trip_s: float = float("inf")
    measured_at: float = 0.0
    chosen: Interface | None = None
    lost: str = ""
    drain: str = ""
    drained_at: float = 0.0
    tickets: dict[int, int] = field(default_factory=dict)  # ticket -> rank
    started: set[int] = field(default_factory=set)
    dying: set[int] = field(default_factory=set)
    answers: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.facts.host

    @property
    def address(self) -> str:
        """The address at which the other nodes reach it."""
        assert self.chosen is not None, "preflight comes first"
        return self.chosen.address


class Nodes(Processes):
    """All nodes of a job, after they have joined.

    `seats` are the nodes of the ranks; set it before starting processes. `on_idle` is called
    about ten times a second, and may raise if the place has lost its nodes. `last_words(number)`
    is the output of a node's agent, if it is known here.
    """

    def __init__(
        self,
        nodes: list[Node],
        node_timeout_s: float,
        on_idle: Callable[[], None] = lambda: None,
        last_words: Callable[[int], str] = lambda number: "",
    ) -> None:
        self.nodes = nodes
        self.last_words = last_words
        self.node_timeout_s = node_timeout_s
        self.hash_seed = hash_seed()
        self.on_idle = on_idle
        self.seats: dict[int, Node] = {}
        self.is_elastic = False  # whether the job goes on without a node
        self._host = socket.gethostname()
        self._tickets = itertools.count()
        self._exits: list[Exit] = []
        self._heartbeats: HeartbeatTable | None = None
        self._orders: dict[str, Any] = {}
        self._start: Message = {}
        self._stop_reason = ""
        self._alive_at = self._looked_at = self._awake_since = time.monotonic()
        self._reported: set[int] = set()
        self._messages: list[int] = []
        self._forwarded_at: dict[str, float] = {}

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes if not node.lost]

    def seat_of(self, rank: int) -> Node:
        """The node of a rank; before ranks have seats, the first living node."""
        return self.seats[rank] if self.seats else self.living[0]

    def check_all(self) -> None:
        """Ping every node; those that do not answer are lost afterwards."""
        for node in self.living:
            with suppress(PlaceError):
                self.ask(node, {"do": "ping"}, seconds=2 * self.node_timeout_s)

    def newly_lost(self) -> list[Node]:
        """The nodes that were lost since the last call."""
        lost = [n for n in self.nodes if n.lost and n.number not in self._reported]
        self._reported |= {node.number for node in lost}
        return lost

    def start_servers(self, modules: tuple[str, ...]) -> None:
        """Start a fork server on every node, with these modules imported and the same hash seed."""
        self._start = {"do": "start", "modules": modules, "hash_seed": self.hash_seed}
        for node in self.living:
            self._send(node, self._start)

    def take_back(self, node: Node, check: Callable[[Node], None]) -> None:
        """Put a node in the place of a lost one, `check` it, and start its fork server.

        Raises what `check` raises, and `PlaceError` if the node is lost meanwhile, which is no
        fault of the job then.
        """
        self.nodes[node.number] = node
        self._reported.add(node.number)
        check(node)
        self._send(node, self._start)
        if node.lost:
            raise PlaceError(f"node {node.number} ({node.name}) is lost: {node.lost}")
        self._reported.discard(node.number)

    def listen(self, node: Node) -> str:
        """host:port of a socket on which this node listens, for the rendezvous of one attempt."""
        port = self.ask(node, {"do": "listen", "address": node.address})
        return f"{node.address}:{port}"

    def reserve(self, node: Node, count: int) -> tuple[int, ...]:
        """Ports of this node, reserved until the next call."""
        return tuple(self.ask(node, {"do": "reserve", "count": count, "address": node.address}))

    def spawn(self, process: Process, heartbeats: HeartbeatTable | None = None) -> int:
        ticket, node = next(self._tickets), self.seat_of(process.rank)
        if heartbeats is not None and heartbeats is not self._heartbeats:
            self._heartbeats, self._orders = heartbeats, heartbeats.orders
        node.tickets[ticket] = process.rank
        plain = {**asdict(process), "log": str(process.log)}
        message = {"do": "spawn", "ticket": ticket, "process": plain}
        checked_size(message)
        if heartbeats is not None:
            message |= {"rows": heartbeats.ranks, "orders": heartbeats.orders}
        if process.hosts_store:
            message |= {"address": node.address}
        self._send(node, message)
        if node.lost:  # as it was, or became just now
            self._report_lost(node)
        return ticket

    def exits(self, timeout_s: float) -> list[Exit]:
        self._pump(0.0 if self._exits else timeout_s)
        ended, self._exits = self._exits, []
        return ended

    def signal(self, ticket: int, number: int) -> None:
        for node in self.living:
            if ticket in node.tickets:
                self._send(node, {"do": "signal", "ticket": ticket, "signal": int(number)})

    def started(self, ticket: int) -> bool:
        return any(ticket in node.started for node in self.living)

    def dying(self) -> set[int]:
        return set().union(*(node.dying for node in self.living))

    def stands(self, tickets: Mapping[int, int]) -> dict[int, ProcessState]:
        states: dict[int, ProcessState] = {}
        for node in self.living:
            local = {rank: ticket for rank, ticket in tickets.items() if ticket in node.tickets}
            if not local:
                continue
            try:
                answer = self.ask(node, {"do": "stands", "tickets": local})
            except PlaceError:
                continue  # the node is lost meanwhile
            states |= {int(rank): ProcessState(**stand) for rank, stand in answer.items()}
        return states

    def messages(self) -> list[int]:
        messages, self._messages = self._messages, []
        return messages

    def is_silent(self) -> bool:
        return any(self._silence(node) > SILENT_S for node in self.living)

    def _silence(self, node: Node) -> float:
        """Seconds without a message of this node, while this process was not suspended."""
        return time.monotonic() - max(node.channel.heard_at, self._awake_since)

    def stop_reason(self) -> str:
        return self._stop_reason

    def drained(self) -> tuple[str, frozenset[int]]:
        """The signal and the ranks of the nodes that are asked to leave; lets go those without any.

        A signal to the whole job comes to the node of the head, too, in these `DRAIN_S` seconds.
        """
        nodes = sorted((node for node in self.living if node.drain), key=lambda n: n.drained_at)
        if not nodes or self._stop_reason or time.monotonic() < nodes[0].drained_at + DRAIN_S:
            return "", frozenset()
        for node in nodes:
            if not node.tickets and node.number not in self._reported:
                self._reported.add(node.number)  # its end is no fault
                text = f"allranks: this node has left the job, which goes on ({node.drain})"
                self._send(node, {"do": "leave", "code": EXIT_DONE, "text": text})
        ranks = (rank for node in nodes for rank in node.tickets.values())
        return nodes[0].drain, frozenset(ranks)

    def ask(self, node: Node, message: Message, seconds: float = ANSWER_S) -> Any:
        """A node's answer; raises `PlaceError` if it is lost before it comes."""
        self._send(node, message)
        return self._answer_of(node, message["do"], seconds)

    def ask_all(self, messages: Mapping[int, Message]) -> dict[int, Any]:
        """Send these messages (by number of node) at once; returns the answers by number."""
        receivers = [node for node in self.living if node.number in messages]
        for node in receivers:
            self._send(node, messages[node.number])
        return {node.number: self._answer_of(node, "all", ANSWER_S) for node in receivers}

    def _answer_of(self, node: Node, question: str, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not node.answers and not node.lost:
            self._pump(0.1)
            if time.monotonic() > deadline:
                self._lose(node, f"it did not answer ({question}) for {seconds:g} s")
        if node.lost:
            raise PlaceError(f"node {node.number} ({node.name}) is lost: {node.lost}")
        return node.answers.pop(0)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Let a thread answer the nodes, while this one works on something else.

        Agents end their processes if the head is silent for longer than the time-out. An error of
        the thread, such as a place that has lost its nodes, is raised at the end.
        """
        done = threading.Event()

        def attend() -> None:
            while not done.is_set():
                self._pump(0.1)

        with ThreadPoolExecutor(1, "nodes") as pool:
            attending = pool.submit(attend)
            try:
                yield
            finally:
                done.set()
            attending.result()

    def _pump(self, timeout_s: float) -> None:
        """Receive messages of all nodes, send them `alive`, and find the lost nodes."""
        living = self.living
        if not living:
            time.sleep(timeout_s)
        behind = [node.channel for node in living if node.channel.is_behind]
        self._forward_orders()
        wait_for([node.channel for node in living], timeout_s, behind)
        for node in living:
            try:
                node.channel.flush()
                for message in node.channel.receive():
                    self._handle(node, message)
            except Disconnected as error:
                self._lose(node, str(error))
        now = time.monotonic()
        if now - self._looked_at > timeout_s + SUSPENDED_S:  # this process was suspended
            self._awake_since = now
        self._looked_at = now
        if now - self._alive_at > ALIVE_EVERY_S:
            self._alive_at = now
            for node in self.living:
                self._send(node, {"do": "alive", "at": now})
        for node in self.living:
            silent = self._silence(node)
            if silent > self.node_timeout_s:
                self._lose(node, f"no word of it for {silent:.0f} s (--node-timeout)")
        self.on_idle()

    def _handle(self, node: Node, message: Message) -> None:
        if "answer" in message:
            node.answers.append(message["answer"])
        elif "exited" in message:
            self._record_exit(node, message["exited"])
        elif "dying" in message:
            node.dying = set(message["dying"])
        elif "beats" in message:
            node.started = set(message["started"])
            for rank, row in message["beats"]:
                if self._heartbeats is not None and rank in node.tickets.values():
                    self._heartbeats.put_row(rank, row, node.clock_ahead_s)
        elif "listens" in message:
            rank, port = message["listens"]
            if self._heartbeats is not None:
                self._heartbeats.stores[rank] = f"{node.address}:{port}"
        elif "alive" in message:
            now = time.monotonic()
            trip = now - message["alive"]
            if trip < node.round_trip_s or now - node.measured_at > CLOCKS_LAST_S:  # clocks drift
                node.round_trip_s, node.measured_at = trip, now
                node.clock_ahead_s = message["clock"] - (message["alive"] + trip / 2)
        elif "asked" in message:
            self._note_request(node, message["asked"])
        elif "broken" in message:
            self._lose(node, message["broken"])

    def _record_exit(self, node: Node, exit_: dict[str, Any]) -> None:
        if node.tickets.pop(exit_["ticket"], None) is not None:
            when = exit_["monotonic"] - node.clock_ahead_s
            ahead = node.clock_ahead_s
            self._exits.append(Exit(**{**exit_, "monotonic": when, "clock_ahead_s": ahead}))

    def _note_request(self, node: Node, name: str) -> None:
        """Handle a request to stop or to save, which a scheduler sends to all nodes at once.

        One to stop may be for this node alone: `drained` says so if the head's does not get it.
        """
        if self._heartbeats is None and name in MESSAGES:
            now = time.monotonic()
            if now - self._forwarded_at.get(name, 0.0) > SAME_REQUEST_S:
                self._forwarded_at[name] = now
                self._messages.append(signal.Signals[name])
        elif name == signal.SIGUSR2.name:
            if self._heartbeats is not None and not self._heartbeats.is_closed:
                self._heartbeats.ask_to_save()
        elif name == signal.SIGINT.name or node.name == self._host or not self.is_elastic:
            self._stop_reason = self._stop_reason or name
        elif not node.drain:
            node.drain, node.drained_at = name, time.monotonic()

    def _forward_orders(self) -> None:
        if self._heartbeats is None or self._heartbeats.is_closed:
            return
        orders = self._heartbeats.orders
        if orders != self._orders:
            self._orders = orders
            for node in self.living:
                self._send(node, {"do": "orders", "orders": orders})

    def _send(self, node: Node, message: Message) -> None:
        if not node.lost:
            try:
                node.channel.send(message)
            except Disconnected as error:
                self._lose(node, str(error))

    def _lose(self, node: Node, why: str) -> None:
        output = self.last_words(node.number).strip()
        node.lost = node.lost or (f"{why}\nits agent said: {output}" if output else why)
        node.channel.close()
        self._report_lost(node)

    def _report_lost(self, node: Node) -> None:
        """Report all processes of a lost node as killed."""
        now = time.monotonic()
        for ticket in node.tickets:
            self._exits.append(Exit(ticket, -signal.SIGKILL, now, host=node.name, lost=node.lost))
        node.tickets.clear()
        node.started.clear()

    def leave(self, code: int, text: str = "") -> None:
        """Send every node the exit code of the job; agents then end all their processes."""
        for node in self.living:
            self._send(node, {"do": "leave", "code": code, "text": text})
        deadline = time.monotonic() + LEAVE_S
        for node in self.living:
            try:
                while time.monotonic() < deadline:
                    node.channel.flush()
                    node.channel.receive()
                    time.sleep(0.01)
            except Disconnected:
                pass
            node.channel.close()


# --- node ranks ----------------------------------------------------------------------------------
# The ranks of one node: its agent starts them in a fork server, and reports them to the head.


BEATS_S = 0.2


class NodeRanks:
    """The processes of a node. The head gives each a ticket, and gets a message for every exit.

    `server` is `None` before it is started, and once it has failed and the head has been told.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.server: ForkServer | None = None
        self._heartbeats: dict[int, HeartbeatTable] = {}  # by attempt
        self._tickets: dict[int, int] = {}  # ticket of the head -> ticket of the fork server here
        self._worlds: dict[int, World] = {}  # ticket -> World of its rank
        self._beats: dict[int, list[float]] = {}
        self._beats_at = 0.0
        self._dying: set[int] = set()  # tickets of the fork server
        self._kills = Kills.now()

    def spawn(self, message: Message, listener: int) -> None:
        """Start a process, with the socket `listener` (-1: none)."""
        assert self.server is not None
        fields, ticket = message["process"], message["ticket"]
        process = Process(**{**fields, "log": Path(fields["log"])})
        heartbeats = self._heartbeats_of(process, message) if "rows" in message else None
        self._tickets[ticket] = self.server.spawn(process, heartbeats, listener)

    def _heartbeats_of(self, process: Process, message: Message) -> HeartbeatTable:
        """The heartbeat table of this attempt; the table of the attempt before is closed.

        Another job on this node may start with the same number of attempt after all ranks of the
        one before have ended: it gets a new table.
        """
        is_first = not self._worlds
        world = World.from_environment(process.environment)
        self._worlds[message["ticket"]] = world
        if is_first or world.attempt not in self._heartbeats:
            self._forget_heartbeats()
            self._kills = Kills.now()
            self._heartbeats[world.attempt] = HeartbeatTable(message["rows"], begin=0)
        heartbeats = self._heartbeats[world.attempt]
        heartbeats.clear(world.number)
        heartbeats.put_orders(message["orders"])
        return heartbeats

    def signal(self, ticket: int, number: int) -> None:
        if self.server is not None and ticket in self._tickets:
            self.server.signal(self._tickets[ticket], number)

    def stands(self, tickets: Mapping[str, int]) -> dict[int, dict[str, Any]]:
        """Where each of these ranks stands, by its number."""
        assert self.server is not None
        local = {int(rank): self._tickets[t] for rank, t in tickets.items() if t in self._tickets}
        return {rank: asdict(stand) for rank, stand in self.server.stands(local).items()}

    def put_orders(self, orders: Message) -> None:
        """Forward requests to stop or to save to the ranks, and which of them train together."""
        for heartbeats in self._heartbeats.values():
            heartbeats.put_orders(orders)

    def wake(self) -> None:
        if self.server is not None:
            self.server.wake()

    def report(self) -> None:
        """Send new beats and exits to the head."""
        if self.server is None:
            return
        self._report_beats(self.server)
        dying = self.server.dying()
        if dying != self._dying:
            self._dying = dying
            self._report_beats(self.server, at_once=True)  # its last step, before its end
            tickets = [heads for heads, local in self._tickets.items() if local in dying]
            self.channel.send({"dying": tickets})
        try:
            ended = self.server.exits(0.0)
        except PlaceError as error:
            self.channel.send({"broken": str(error)})
            self.server = None
            return
        for exit_ in ended:
            self._report_beats(self.server, at_once=True)  # its last step, before its exit
            ticket = next(heads for heads, local in self._tickets.items() if local == exit_.ticket)
            del self._tickets[ticket]
            self._worlds.pop(ticket, None)
            memory = Kills.now().since(self._kills)
            self.channel.send({"exited": {**asdict(exit_), "ticket": ticket, "memory": memory}})

    def _report_beats(self, server: ForkServer, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self._beats_at < BEATS_S and not at_once:
            return
        self._beats_at, news = now, []
        for world in self._worlds.values():
            row = self._heartbeats[world.attempt].row(world.number)
            if row != self._beats.get(world.number):
                self._beats[world.number] = row
                news.append([world.number, row])
        started = [heads for heads, local in self._tickets.items() if server.started(local)]
        self.channel.send({"beats": news, "started": started, "clock": now})

    def _forget_heartbeats(self) -> None:
        for heartbeats in self._heartbeats.values():
            heartbeats.close()
        self._heartbeats.clear()

    def close(self) -> None:
        """End every process."""
        if self.server is not None:
            self.server.close()
        self._forget_heartbeats()
