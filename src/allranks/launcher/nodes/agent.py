"""The agent of a node owns the node's processes and executes the commands of the job's head.

    python -P -m allranks.launcher.nodes.agent        (reads its ticket from stdin)

One runs on every node. It connects to the head, proves that it knows the key of the job, reports
the facts of its node, and starts a fork server. It decides nothing: it forwards exits, beats and
signals to the head. If the head is gone, or silent for too long, the agent ends every process of
the node and itself. The fork server does the same if the agent dies.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from allranks.errors import (
    EXIT_BAD_REQUEST,
    EXIT_INTERRUPTED,
    EXIT_PLACE_FAILED,
    AllranksError,
    Interrupted,
    PlaceError,
    RequestError,
)
from allranks.launcher.nodes.channel import (
    Channel,
    Disconnected,
    Message,
    Refused,
    connected,
    wait_for,
)
from allranks.launcher.nodes.facts import Doorbell, Ringing, candidates, digest_of, facts
from allranks.launcher.nodes.join import ANY, Ticket
from allranks.launcher.nodes.nodes import NodeRanks
from allranks.launcher.processes.fork_server_client import ForkServer, check_hash_seed
from allranks.launcher.processes.linux import die_with_parent
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.supervisor import Signals
from allranks.launcher.world import World

TICK_S = 0.1
RETRY_S = 0.2
CONNECT_S = 5.0
PROBE_S = 3.0
SUSPENDED_S = 2.0
PATIENCE = 0.7  # of the head's time-out: a node ends its ranks before the head gives it up


class Agent:
    """One node of a job, from its first word to its last."""

    def __init__(self, ticket: Ticket, signals: Signals) -> None:
        """`signals` are those that the scheduler or a user of this node sends to the agent."""
        self.ticket, self.signals = ticket, signals
        self.node = World.from_environment().rank if ticket.node is None else ticket.node
        self._listener: socket.socket | None = None
        self._reserved: list[Reservation] = []
        self._doorbell: Doorbell | None = None
        self._ringing: Ringing | None = None
        self._answers = {
            "ping": lambda message: self.channel.send({"answer": True}),
            "digest": lambda message: self.channel.send({"answer": digest_of(message["program"])}),
            "probe": self._probe,
            "see": self._see,
            "start": self._start,
            "listen": self._listen,
            "reserve": self._reserve,
            "spawn": self._spawn,
            "signal": lambda message: self._ranks.signal(message["ticket"], message["signal"]),
            "stands": self._stands,
            "orders": lambda message: self._ranks.put_orders(message["orders"]),
            "alive": self._alive,
        }

    @property
    def name(self) -> str:
        """The name of this node in messages."""
        number = "a node" if self.node == ANY else f"node {self.node}"
        return f"{number} ({socket.gethostname()})"

    def run(self) -> int:
        """Join the job and serve it to its end; returns the exit code of the job."""
        with ExitStack() as stack:
            self.channel = self._connected()
            stack.callback(self.channel.close)
            self._ranks = NodeRanks(self.channel)
            self._doorbell = Doorbell(secrets.token_hex(16))
            stack.callback(self._let_go)
            self.channel.send(self._introduction(self._doorbell))
            return self._serve()

    def _connected(self) -> Channel:
        """The head, once it answers; raises `PlaceError` if it does not, or refuses this node."""
        ticket = self.ticket
        deadline = time.monotonic() + ticket.join_timeout_s
        while True:
            for number in self.signals.received():
                first = signal.Signals(number).name
                raise Interrupted(f"{self.name} got {first} before the job began")
            for address in ticket.addresses:
                remaining_s = max(0.1, deadline - time.monotonic())
                try:
                    where = (address, ticket.port)
                    return connected(where, ticket.key, min(remaining_s, CONNECT_S))
                except Refused as error:
                    raise PlaceError(
                        f"{self.name} is refused at {address}:{ticket.port}: {error}"
                    ) from error
                except (OSError, UnicodeError) as error:
                    problem = str(error)
            if time.monotonic() > deadline:
                tried = ", ".join(f"{address}:{ticket.port}" for address in ticket.addresses)
                raise PlaceError(
                    f"{self.name} found nobody at {tried} for "
                    f"{ticket.join_timeout_s:g} s: {problem}. Is node 0 started, and can this "
                    "address be reached from here?"
                )
            time.sleep(RETRY_S)

    def _introduction(self, doorbell: Doorbell) -> Message:
        interfaces = candidates(self.channel.own_address, self.ticket.interface)
        return {
            "joins": self.node,
            "facts": facts(self.ticket.program).to_data(),
            "interfaces": [[interface.name, interface.address] for interface in interfaces],
            "doorbell": [doorbell.port, doorbell.token],
            "words": list(self.ticket.words),
            "clock": time.monotonic(),
        }

    def _serve(self) -> int:
        looked_at = time.monotonic()
        while True:
            ready = [self.channel, self._doorbell, self._ranks.server]
            behind = [self.channel] if self.channel.is_behind else []
            wait_for([end for end in ready if end is not None], TICK_S, behind)
            if self._doorbell is not None:
                self._doorbell.answer()
            for message in self.channel.receive():
                if message["do"] == "leave":
                    return self._leave(message)
                self._obey(message)
            self._answer_probe()
            self._report()
            now = time.monotonic()
            if now - looked_at > SUSPENDED_S:  # suspended: the head was not silent
                self.channel.heard_at = now
            looked_at = now
            if self.channel.silent_s() > PATIENCE * self.ticket.node_timeout_s:
                raise PlaceError(
                    f"{self.name} heard nothing of the head of the job for "
                    f"{PATIENCE * self.ticket.node_timeout_s:g} s: its processes are ended"
                )

    def _obey(self, message: Message) -> None:
        """Execute a command of the head. If it fails, send `broken`: the head drops the node."""
        try:
            self._answers[message["do"]](message)
        except Disconnected:
            raise
        except (AllranksError, OSError) as error:
            self.channel.send({"broken": f"{type(error).__name__}: {error}"})

    def _leave(self, message: Message) -> int:
        if message.get("text"):
            print(message["text"], file=sys.stderr)
        return int(message["code"])

    def _report(self) -> None:
        """Send new exits, beats and signals to the head."""
        self.channel.flush()
        for number in self.signals.received():
            self.channel.send({"asked": signal.Signals(number).name})
        self._ranks.report()

    def _probe(self, message: Message) -> None:
        """Connect to all other nodes; the answer follows when all replied, or after `PROBE_S`."""
        self._ringing = Ringing(message["nodes"], PROBE_S)

    def _answer_probe(self) -> None:
        if self._ringing is not None and self._ringing.is_over():
            self.channel.send({"answer": self._ringing.reached})
            self._ringing = None

    def _see(self, message: Message) -> None:
        """Check that this node sees the file that the head wrote, and change to its folder."""
        try:
            os.chdir(message["cwd"])
            is_equal = Path(message["path"]).read_text() == message["content"]
            problem = "" if is_equal else f"{message['path']} holds something else here"
        except OSError as error:
            problem = str(error)
        self.channel.send({"answer": problem})

    def _start(self, message: Message) -> None:
        """Start the fork server. All nodes have probed each other, so the doorbell closes."""
        self._close_doorbell()
        check_hash_seed(message["hash_seed"])
        modules = tuple(message["modules"])
        self._ranks.server = ForkServer(modules, message["hash_seed"])

    def _listen(self, message: Message) -> None:
        """Open the port at which the ranks of all nodes meet."""
        self._close_listener()
        self.channel.send({"answer": self._opened_port(message["address"])})

    def _opened_port(self, address: str) -> int:
        """The port of a listener at this one address; opens it if there is none."""
        if self._listener is None:
            self._listener = socket.create_server((address, 0), backlog=1024)
        return int(self._listener.getsockname()[1])

    def _reserve(self, message: Message) -> None:
        for reservation in self._reserved:
            reservation.close()
        self._reserved = [Reservation(message["count"], message["address"])]
        self.channel.send({"answer": list(self._reserved[0].ports)})

    def _spawn(self, message: Message) -> None:
        if not message["process"]["hosts_store"]:
            self._ranks.spawn(message, -1)
            return
        port = self._opened_port(message["address"])
        assert self._listener is not None
        self._ranks.spawn(message, self._listener.fileno())
        self._close_listener()
        self.channel.send({"listens": [message["process"]["rank"], port]})

    def _stands(self, message: Message) -> None:
        self.channel.send({"answer": self._ranks.stands(message["tickets"])})

    def _alive(self, message: Message) -> None:
        self._ranks.wake()
        self.channel.send({"alive": message["at"], "clock": time.monotonic()})

    def _close_doorbell(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
        self._doorbell = None

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def _let_go(self) -> None:
        """End every process of this node."""
        self._ranks.close()
        for reservation in self._reserved:
            reservation.close()
        if self._ringing is not None:
            self._ringing.close()
        self._close_doorbell()
        self._close_listener()


def serve(ticket: Ticket) -> int:
    """Be the agent of this node, to the end of the job; returns the exit code of the job."""
    with Signals() as signals:
        agent = Agent(ticket, signals)
        try:
            return agent.run()
        except Refused as error:
            raise PlaceError(str(error)) from error
        except Disconnected as error:
            raise PlaceError(f"{agent.name} lost the head of the job: {error}") from error


def main() -> NoReturn:
    """Run the agent that a head started; exits with the exit code of the job."""
    code = EXIT_PLACE_FAILED
    try:
        ticket = Ticket.from_line(sys.stdin.readline())
        if ticket.follows:
            die_with_parent()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        code = serve(ticket)
    except RequestError as error:
        code = EXIT_BAD_REQUEST
        print(f"allranks: {error}", file=sys.stderr)
    except AllranksError as error:
        print(f"allranks: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
