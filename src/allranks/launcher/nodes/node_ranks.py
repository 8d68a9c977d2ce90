"""The ranks of one node, as its agent owns them: started in a fork server, reported to the head."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from allranks.errors import PlaceError
from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.nodes.channel import Channel, Message
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.oom import Kills
from allranks.launcher.processes.process import Process
from allranks.launcher.world import World

BEATS_S = 0.2


class NodeRanks:
    """The processes of a node. The head names each by a ticket of its own; it hears of every end.

    `server` is `None` once it has failed: the head has heard so.
    """

    def __init__(self, channel: Channel, server: ForkServer) -> None:
        self.channel = channel
        self.server: ForkServer | None = server
        self._heartbeats: dict[int, HeartbeatTable] = {}  # attempt -> the memory of its ranks
        self._own: dict[int, int] = {}  # ticket of the head -> ticket of the fork server here
        self._worlds: dict[int, World] = {}  # ticket -> who beats
        self._beats: dict[int, list[float]] = {}
        self._beats_at = 0.0
        self._kills = Kills.now()

    def spawn(self, message: Message, listener: int) -> None:
        """Start a process; it gets the socket `listener` if there is one (-1: none)."""
        assert self.server is not None
        given, ticket = message["process"], message["ticket"]
        process = Process(**{**given, "log": Path(given["log"])})
        heartbeats = self._heartbeats_of(process, ticket) if message["beats"] else None
        self._own[ticket] = self.server.spawn(process, heartbeats, listener)

    def _heartbeats_of(self, process: Process, ticket: int) -> HeartbeatTable:
        """The memory in which the ranks of this attempt beat; that of the last one is given up.

        Another job on this node begins with the same number of an attempt, once no rank of the one
        before is left: what that one wrote is not for it.
        """
        is_first = not self._worlds
        world = self._worlds[ticket] = World.from_environment(process.environment)
        if is_first or world.attempt not in self._heartbeats:
            self._forget_heartbeats()
            self._kills = Kills.now()
            self._heartbeats[world.attempt] = HeartbeatTable(world.local_size)
        return self._heartbeats[world.attempt]

    def signal(self, ticket: int, number: int) -> None:
        if self.server is not None and ticket in self._own:
            self.server.signal(self._own[ticket], number)

    def stands(self, tickets: Mapping[str, int]) -> dict[int, dict[str, Any]]:
        """Where each of these ranks stands, by its number."""
        assert self.server is not None
        own = {int(rank): self._own[t] for rank, t in tickets.items() if t in self._own}
        return {rank: asdict(stand) for rank, stand in self.server.stands(own).items()}

    def put_wanted(self, wanted: Sequence[float]) -> None:
        """Pass on to the ranks what is wanted of them."""
        for heartbeats in self._heartbeats.values():
            heartbeats.put_wanted(wanted)

    def wake(self) -> None:
        if self.server is not None:
            self.server.wake()

    def report(self) -> None:
        """Tell the head of new beats and exits."""
        if self.server is None:
            return
        self._report_beats(self.server)
        try:
            ended = self.server.exits(0.0)
        except PlaceError as error:
            self.channel.send({"broken": str(error)})
            self.server = None
            return
        for exit_ in ended:
            self._report_beats(self.server, at_once=True)  # how far it came, before it is gone
            ticket = next(heads for heads, own in self._own.items() if own == exit_.ticket)
            del self._own[ticket]
            self._worlds.pop(ticket, None)
            memory = Kills.now().since(self._kills)
            self.channel.send({"exited": {**asdict(exit_), "ticket": ticket, "memory": memory}})

    def _report_beats(self, server: ForkServer, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self._beats_at < BEATS_S and not at_once:
            return
        self._beats_at, news = now, []
        for world in self._worlds.values():
            row = self._heartbeats[world.attempt].row(world.local_rank)
            if row != self._beats.get(world.rank):
                self._beats[world.rank] = row
                news.append([world.rank, row])
        started = [heads for heads, own in self._own.items() if server.started(own)]
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
