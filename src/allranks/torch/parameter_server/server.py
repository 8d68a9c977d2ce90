"""A server's end of the wire: it sums and applies what workers push, and sends what they pull.

    who         message                           answer
    scheduler   load   version, era, kept; body   version              weights and optimizer
                squares  unused                   squares              once all parts are there
                add    factor; body               version              sum <- factor · sum + body
                apply  factor, groups, unused     version
                pass                              version              the step updates nothing
                fetch                             version, kept; body  weights and optimizer
                call_back                         version              to who waits: `again`
                tell   told; body                 version              what the next step is made of
                peek                              version; body        weights alone
                put; body                         version              other weights, for a check
                gradients                         version; body        the sum of all parts
                load_rows   table, step, columns; body      rows of a table, and their state
                fetch_rows  table, state          step, columns, widths; body
                apply, pass and tell say `told`, with a body: what workers are told with weights;
                what is said `silent` is not answered
    all         hello                                 memory: whether it is shared
    worker      hold   table, count; body         none                 rows, for the next push
                rows   table, count; body         rows, as they are
                push   step, part; body           none
                push   number, groups, unused; body
                push   number, change; body       none                 what it has changed
                pull   version, has               version; body        this version, or a later one
                                                  told, told_bytes     in step: first in the body
                with update=worker                version, update; body   a gradient after `has`
                                                  version, kept; body  or weights and optimizer

An `era` begins whenever weights are loaded: after the scheduler was started again, from its
checkpoint. What a worker brings of an era before is dropped, and it is told so (`stale`). With a
worker of the same host the bodies are in memory that both share (`memory`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from allranks.job.run_folder import JsonLines
from allranks.launcher.messages.answering import ANSWER_S, Answering
from allranks.launcher.messages.connection import Connection
from allranks.launcher.messages.meeting_point import connect
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.launcher.world import World
from allranks.strategies.cards.parameter_server import SERVER
from allranks.torch.build import BuiltModel
from allranks.torch.parameter_server.flat import Flat
from allranks.torch.parameter_server.memory import SharedNumbers
from allranks.torch.parameter_server.shard import Shard
from allranks.torch.parameter_server.state import packed, unpacked
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.parameter_server.tables.served import ServedTables, answer_rows
from allranks.torch.trainer import Trainer

SCHEDULER_ID = 1 << 30
LOOK_S = 0.2
KEPT = 16
"""The optimizer keeps at most so many times the bytes of the weights."""
OVER = "over"
NO_ERA = -1
OF_THE_SUM = ("add", "apply", "gradients")
"""What the scheduler says of the sum of all parts of a step."""
WAITED_FOR = ("load", "apply", "pass", "call_back")
"""What workers that wait go on by."""


class Server(Answering):
    """Serves one shard. `digest` is what workers must have in common with it.

    `reached` is called with the version that an update is about to make.
    """

    def __init__(
        self,
        shard: Shard,
        listener: socket.socket,
        secret: str,
        digest: str,
        in_step: bool,
        reached: Callable[[int], None] = lambda version: None,
        tables: ServedTables | None = None,
    ) -> None:
        layout = shard.layout
        rows = 0 if tables is None else tables.most_bytes
        super().__init__(listener, secret, (1 + KEPT) * (layout.nbytes + rows) + (1 << 20))
        self.tables = tables or ServedTables((), shard.optimizer, 0, 1)
        self.shard, self.layout, self.digest, self.in_step = shard, layout, digest, in_step
        self._reached = reached
        self.era = NO_ERA
        self._told: tuple[Message, bytes] | None = None
        self._calls_back = False
        self._brought: dict[int, Flat] = {}
        self._shared: dict[int, SharedNumbers] = {}
        self._own = threading.local()

    def admit(self, connection: Connection, hello: Message) -> int:
        if hello.get("digest") != self.digest:
            connection.send({"refused": "its model has other weights, or another layout of them"})
            raise Disconnected("its model is another one")
        who = SCHEDULER_ID if hello.get("role") == "scheduler" else int(hello["index"])
        shared = SharedNumbers.open(self.layout, hello.get("memory", {}))
        self._shared.pop(who, None)
        with self.changed:
            self.tables.drop(who)
        if shared is not None:
            self._shared[who] = shared
        connection.send({"memory": shared is not None})
        return who

    def place(self, who: int, message: Message, size: int) -> memoryview:
        """What a worker pushes goes where its last push was, which is not needed any more."""
        if size != self.layout.nbytes or who == SCHEDULER_ID:
            return memoryview(bytearray(size))
        return self._gradient_of(who).buffer

    def answer(self, who: int, connection: Connection, message: Message, body: memoryview) -> None:
        if who == SCHEDULER_ID:
            self._obey(connection, message, body)
        elif "hold" in message:
            with self.changed:
                self.tables.hold(who, message["hold"], body)
        elif "rows" in message:
            self._rows_pulled(connection, message["rows"], body, int(message["era"]))
        elif "push" in message:
            self._pushed(who, message["push"], int(message["era"]))
        else:
            self._pulled(who, connection, message)

    def lost(self, who: int, connection: Connection, error: Exception) -> None:
        """Whoever it is comes again by itself, or is found missing by the scheduler."""

    # --- workers --------------------------------------------------------------------------

    def _pushed(self, who: int, push: Message, era: int) -> None:
        shared = self._shared.get(who)
        gradient = self._gradient_of(who) if shared is None else shared.gradient
        with self.changed:
            if era != self.era:
                self.tables.drop(who)
                return
            if self.in_step:
                self._part_came(who, int(push["step"]), int(push["part"]), gradient)
            elif "change" in push:
                self._reached(self.shard.version)
                self.shard.change(int(push["number"]), gradient)
            else:
                number, unused = int(push["number"]), push["unused"]
                self._reached(self.shard.version)
                stale = self.shard.push(number, who, gradient, push["groups"], unused)
                if stale is not None:
                    slower = self.shard.slower(stale)
                    self.tables.push(who, push["groups"], slower, unused)
            self.tables.drop(who)

    def _part_came(self, who: int, step: int, part: int, gradient: Flat) -> None:
        if step == self.shard.version and self.shard.bring(part, gradient):
            self.tables.bring(who, part)
            if self.shard.is_complete:
                self.changed.notify_all()

    def _pulled(self, who: int, connection: Connection, message: Message) -> None:
        version, era = int(message["pull"]), int(message["era"])
        shared = self._shared.get(who)
        found = self._copy_for_this_thread() if shared is None else shared.weights
        with self.changed:
            self._wait(lambda: self.era > era or self._calls_back or self._has(era, version))
            is_stale, is_there = self.era != era, self._has(era, version)
            told = self._told
            if is_there:  # and only then does a worker write where its last gradient is
                self.shard.keep(self._gradient_of(who) if shared is None else shared.gradient)
                body: list[Any] = [] if shared is not None else [found.buffer]
                answer = {"version": self.shard.version}
                if self.shard.hands_on:
                    body = self._hand_on(int(message["has"]), found, answer, body)
                else:
                    self.shard.pull(who, found)
        if is_there:
            if told is not None:
                answer |= told[0]
                body.insert(0, told[1])
            connection.send(answer, *body)
        else:
            connection.send({"stale": self.era} if is_stale else {"again": version})

    def _hand_on(self, has: int, into: Flat, answer: Message, body: list[Any]) -> list[Any]:
        """What a worker that has a version updates by; all that there is, where that is too old."""
        last = self.shard.last
        answer["update"], answer["numbers"] = None, 0
        if last is not None and has == self.shard.version:
            return []
        answer["numbers"] = self.layout.nbytes
        if last is None or (has, last.version) != (last.version - 1, self.shard.version):
            answer["kept"], more = packed(self.shard.kept())
            return [bytes(self.shard.weights.buffer), *map(bytes, more)]
        answer["update"] = last.said
        if last.gradient is None:
            answer["numbers"] = 0
            return []
        into.copy_(last.gradient)
        return body

    def _gradient_of(self, who: int) -> Flat:
        """What it has pushed; a server may hold rows of tables, and nothing else."""
        if who not in self._brought:
            self._brought[who] = self.layout.new()
        return self._brought[who]

    def _rows_pulled(
        self, connection: Connection, asked: Message, body: memoryview, era: int
    ) -> None:
        with self.changed:
            found = None if era != self.era else self.tables.pull(asked, body)
        if found is None:
            connection.send({"stale": self.era})
        else:
            connection.send({}, *answer_rows(found))

    def _has(self, era: int, version: int) -> bool:
        return self.era == era and self.shard.version >= version

    def _copy_for_this_thread(self) -> Flat:
        """Memory in which weights stay as they are while they are sent."""
        if not hasattr(self._own, "copy"):
            self._own.copy = self.layout.new()
        found: Flat = self._own.copy
        return found

    def _wait(self, until: Any) -> None:
        self.changed.wait_for(lambda: self.is_closed or until())
        if self.is_closed:
            raise Disconnected("this server is at its end")

    # --- the scheduler --------------------------------------------------------------------

    def _obey(self, connection: Connection, message: Message, body: memoryview) -> None:
        shard, answer, pieces = self.shard, dict[str, Any](), list[Any]()
        with self.changed:
            if message["do"] in OF_THE_SUM:  # tallies may come before gradients
                self._wait(lambda: shard.is_complete)
            match message["do"]:
                case "load":
                    self._load(message, body)
                case "squares":
                    answer["squares"] = self._squares(connection, message["unused"])
                case "load_rows":
                    self.era = NO_ERA  # what comes until all is loaded is of weights before
                    self.tables.load(message, body)
                case "fetch_rows":
                    number = int(message["table"])
                    answer, pieces = self.tables.fetch(number, with_state=message["state"])
                case "add":
                    self.tables.scale(float(message["factor"]))
                    shard.add(self.layout.new(bytearray(body)), float(message["factor"]))
                case "apply":
                    self._apply(message)
                case "pass":
                    self.tables.forget()
                    shard.pass_over()
                    self._calls_back = False
                case "call_back" | "tell":
                    self._calls_back = message["do"] == "call_back"
                case "fetch":
                    answer["kept"], more = packed(shard.kept())
                    pieces = [bytes(shard.weights.buffer), *map(bytes, more)]
                case "peek":
                    pieces = [bytes(shard.weights.buffer)]
                case "put":
                    shard.put(self.layout.new(bytearray(body)))
                case "gradients":
                    pieces = [bytes(shard.gradient.buffer)]
                case other:
                    raise ValueError(f"to {other!r}, which no server does")
            if "told" in message:
                self._told = {"told": message["told"], "told_bytes": len(body)}, bytes(body)
            answer["version"] = shard.version
            if message["do"] in WAITED_FOR:
                self.changed.notify_all()
        if not message.get("silent"):
            connection.send(answer, *pieces)

    def _apply(self, message: Message) -> None:
        self._reached(self.shard.version)
        done = float(message["factor"]), message["groups"], message["unused"]
        self.shard.apply(*done)
        self.tables.apply(*done)
        self._calls_back = False

    def _squares(self, connection: Connection, unused: list[int]) -> float | None:
        """Those of the step, once all parts are there; `None` if the scheduler says more before."""
        while not self.shard.is_complete:
            if connection.has_more:
                return None
            self.changed.wait(LOOK_S)
            if self.is_closed:
                raise Disconnected("this server is at its end")
        return self.shard.squares(unused) + self.tables.squares(unused)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def _load(self, message: Message, body: memoryview) -> None:
        cut = self.layout.nbytes
        kept = unpacked(message["kept"], body[cut:])
        self.shard.load(self.layout.new(bytearray(body[:cut])), kept)
        self.shard.begin(int(message["version"]))
        self._calls_back = False
        self.era = int(message["era"])


class ServedTrainer(Trainer):
    """Keeps no table that lies on servers: one process of a node after the other builds the model.

    What the model has on meta of a table is never given memory.
    """

    def _place_model(self) -> BuiltModel:
        assert isinstance(self.strategy, ParameterServer)
        self.strategy.builds_in_turn = self.strategy.rows_travel
        return super()._place_model()


def serve(trainer: Trainer, world: World, events: JsonLines) -> None:
    """Be a server until the scheduler says that it is over.

    It listens at the address by which it reaches the scheduler. Raises `PeerLost` if no scheduler
    answers for `patience_s`.
    """
    strategy, heartbeat = trainer.strategy, trainer.heartbeat
    assert isinstance(strategy, ParameterServer)
    strategy.workers = trainer.job.ranks
    shard, digest = strategy.shard(world.role_index), strategy.digest
    tables = strategy.served_tables(world.role_index)
    patience_s = float(strategy.context.options["patience_s"])
    server: Server | None = None

    def reached(version: int) -> None:
        heartbeat.at_step(version)
        trainer.faults.reach("step", version)

    heartbeat.enter("exchange")
    try:
        while True:
            with connect(world, 1 << 20, ANSWER_S, patience_s) as scheduler:
                if server is None:
                    here = socket.create_server((scheduler.own_address, 0), backlog=256)
                    server = Server(
                        shard, here, world.secret, digest, strategy.in_step, reached, tables
                    )
                    server.start()
                    events.event(
                        "ready", host=socket.gethostname(), role=SERVER, index=world.role_index
                    )
                try:
                    hello = {"role": SERVER, "index": world.role_index, "digest": digest}
                    scheduler.ask({**hello, "port": server.port})
                    scheduler.waits_for_ever()
                    message, _ = scheduler.receive()
                except Disconnected:
                    continue  # it is started again, or this is the end
                if message.get("work") == OVER:
                    break
    finally:
        if server is not None:
            server.close()
    events.event("done", version=shard.version)
    heartbeat.enter("done")
