"""A parameter server: it sums and applies what workers push, and sends what they pull.

The evaluator of a job with servers is here too.

    sender      message                           answer
    scheduler   load   version, era; body         version              weights and optimizer
                squares  unused                   squares              once all parts are there
                add    factor; body               version              sum <- factor · sum + body
                apply  factor, groups, unused     version
                pass                              version              the step updates nothing
                fetch  state                      version; body        weights, and optimizer
                put; body                         version              other weights, for a check
                gradients                         version; body        the sum of all parts
                load_rows   table, step, columns; body      rows of a table, and their state
                fetch_rows  table, state          step, columns, widths; body
    all         hello                                 memory: whether it is shared
    worker      hold   table, count; body         none                 rows, for the next push
                rows   table, count; body         rows, as they are
                push   step, part; body           none
                push   number, groups, unused; body
                push   number, change; body       none                 the change of the weights
                pull   version, has               version; body        this version, or a later one
                with update=worker                version, update; body   a gradient after `has`
                                                  version, kept; body  or weights and optimizer

An `era` begins whenever weights are loaded: at the start, and from the checkpoint after a restart
of the scheduler. A push of an earlier era is dropped, and a pull is answered `stale`. For a worker
on the same host the bodies are in shared memory (`links`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allranks.checkpoint.checkpointer import is_below, values_of
from allranks.checkpoint.format import Manifest, unflatten
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines
from allranks.launcher.messages import ANSWER_S, Answering, Connection, connect
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.launcher.world import World
from allranks.strategies.cards.parameter_server import SERVER
from allranks.torch.build import BuiltModel
from allranks.torch.checkpoint.plan import read_files
from allranks.torch.checkpoint.state import DTYPES, load_model_state, packed, unpacked
from allranks.torch.parameter_server.flat import Flat
from allranks.torch.parameter_server.links import SharedNumbers, largest_message
from allranks.torch.parameter_server.served_tables import ServedTables, numbers_of
from allranks.torch.parameter_server.shard import Shard
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.trainer import Trainer
from allranks.training import work_queue

SCHEDULER_ID = 1 << 30
OVER = "over"
NO_ERA = -1
OF_THE_SUM = ("squares", "add", "apply", "gradients")
"""Messages of the scheduler which need the sum of all parts of a step."""
WAITED_FOR = ("load", "apply", "pass")
"""Messages after which waiting pulls are answered."""


class Server(Answering):
    """Serves one shard, to workers with the same `digest`.

    Calls `reached` with the version before each update.
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
        super().__init__(listener, secret, largest_message(layout.nbytes + rows))
        self.tables = tables or ServedTables((), shard.optimizer, 0, 1)
        self.shard, self.layout, self.digest, self.in_step = shard, layout, digest, in_step
        self._reached = reached
        self.era = NO_ERA
        self._pushed_gradients: dict[int, Flat] = {}
        self._shared: dict[int, SharedNumbers] = {}
        self._of_thread = threading.local()

    def admit(self, connection: Connection, hello: Message) -> int:
        if hello.get("digest") != self.digest:
            connection.send({"refused": "its model has other weights, or another layout of them"})
            raise Disconnected("its model is another one")
        peer = SCHEDULER_ID if hello.get("role") == "scheduler" else int(hello["index"])
        shared = SharedNumbers.open(self.layout, hello.get("memory", {}))
        self._shared.pop(peer, None)
        with self.changed:
            self.tables.drop(peer)
        if shared is not None:
            self._shared[peer] = shared
        connection.send({"memory": shared is not None})
        return peer

    def place(self, peer: int, message: Message, size: int) -> memoryview:
        """A push overwrites the memory of the worker's last push, which is not needed any more."""
        if size != self.layout.nbytes or peer == SCHEDULER_ID:
            return memoryview(bytearray(size))
        return self._gradient_of(peer).buffer

    def answer(self, peer: int, connection: Connection, message: Message, body: memoryview) -> None:
        if peer == SCHEDULER_ID:
            self._execute(connection, message, body)
        elif "hold" in message:
            with self.changed:
                self.tables.hold(peer, message["hold"], body)
        elif "rows" in message:
            self._rows_pulled(connection, message["rows"], body, int(message["era"]))
        elif "push" in message:
            self._pushed(peer, message["push"], int(message["era"]))
        else:
            self._pulled(peer, connection, message)

    def lost(self, peer: int, connection: Connection, error: Exception) -> None:
        """Peers reconnect by themselves; the scheduler notices one which does not."""

    # --- workers --------------------------------------------------------------------------

    def _pushed(self, peer: int, push: Message, era: int) -> None:
        gradient = self._gradient_of(peer)
        with self.changed:
            if era != self.era:
                self.tables.drop(peer)
                return
            if self.in_step:
                self._part_came(peer, int(push["step"]), int(push["part"]), gradient)
            elif "change" in push:
                self._reached(self.shard.version)
                self.shard.change(int(push["number"]), gradient)
            else:
                number, unused = int(push["number"]), push["unused"]
                self._reached(self.shard.version)
                stale = self.shard.push(number, peer, gradient, push["groups"], unused)
                if stale is not None:
                    slower = self.shard.slower(stale)
                    self.tables.push(peer, push["groups"], slower, unused)
            self.tables.drop(peer)

    def _part_came(self, peer: int, step: int, part: int, gradient: Flat) -> None:
        if step == self.shard.version and self.shard.add_part(part, gradient):
            self.tables.add_part(peer, part)
            if self.shard.is_complete:
                self.changed.notify_all()

    def _pulled(self, peer: int, connection: Connection, message: Message) -> None:
        version, era = int(message["pull"]), int(message["era"])
        shared = self._shared.get(peer)
        weights = self._copy_for_this_thread() if shared is None else shared.weights
        with self.changed:
            self._wait(lambda: self.era > era or self._has(era, version))
            is_there = self._has(era, version)
            if is_there:  # the worker overwrites its last gradient after this answer
                self.shard.keep(self._gradient_of(peer))
                body: list[Any] = [] if shared is not None else [weights.buffer]
                answer = {"version": self.shard.version}
                if self.shard.hands_on:
                    body = self._hand_on(int(message["has"]), weights, answer, body)
                else:
                    self.shard.pull(peer, weights)
        if is_there:
            connection.send(answer, *body)
        else:
            connection.send({"stale": self.era})

    def _hand_on(self, has: int, into: Flat, answer: Message, body: list[Any]) -> list[Any]:
        """The body for a worker at a version: one gradient, or the full state if it is older."""
        last = self.shard.last
        answer["update"], answer["numbers"] = None, 0
        if last is not None and has == self.shard.version:
            return []
        answer["numbers"] = self.layout.nbytes
        if last is None or (has, last.version) != (last.version - 1, self.shard.version):
            answer["kept"] = True
            return self._whole_state()
        answer["update"] = last.settings
        if last.gradient is None:
            answer["numbers"] = 0
            return []
        into.copy_(last.gradient)
        return body

    def _whole_state(self, *, optimizer: bool = True) -> list[bytes]:
        """Copies of the weights, and of the state of their optimizer."""
        state = packed(self.shard.optimizer_state()) if optimizer else []
        return [bytes(self.shard.weights.buffer), *map(bytes, state)]

    def _gradient_of(self, peer: int) -> Flat:
        """Memory for its pushes, made at the first one: a server may hold only rows of tables."""
        shared = self._shared.get(peer)  # another thread may end the connection
        if shared is not None:
            return shared.gradient
        if peer not in self._pushed_gradients:
            self._pushed_gradients[peer] = self.layout.new()
        return self._pushed_gradients[peer]

    def _rows_pulled(
        self, connection: Connection, request: Message, body: memoryview, era: int
    ) -> None:
        with self.changed:
            rows = None if era != self.era else self.tables.pull(request, body)
        if rows is None:
            connection.send({"stale": self.era})
        else:
            connection.send({}, numbers_of(rows))

    def _has(self, era: int, version: int) -> bool:
        return self.era == era and self.shard.version >= version

    def _copy_for_this_thread(self) -> Flat:
        """A copy of the weights which does not change while this thread sends it."""
        if not hasattr(self._of_thread, "copy"):
            self._of_thread.copy = self.layout.new()
        copy: Flat = self._of_thread.copy
        return copy

    def _wait(self, until: Any) -> None:
        self.changed.wait_for(lambda: self.is_closed or until())
        if self.is_closed:
            raise Disconnected("this server is at its end")

    # --- the scheduler --------------------------------------------------------------------

    def _execute(self, connection: Connection, message: Message, body: memoryview) -> None:
        shard, answer, pieces = self.shard, dict[str, Any](), list[Any]()
        with self.changed:
            if message["do"] in OF_THE_SUM:  # tallies may arrive before gradients
                self._wait(lambda: shard.is_complete)
            match message["do"]:
                case "load":
                    self._load(message, body)
                case "squares":
                    unused = message["unused"]
                    answer["squares"] = shard.squares(unused) + self.tables.squares(unused)
                case "load_rows":
                    self.era = NO_ERA  # pushes are of the old weights until all is loaded
                    self.tables.load(message, body)
                case "fetch_rows":
                    number = int(message["table"])
                    answer, pieces = self.tables.fetch(number, with_state=message["state"])
                case "add":
                    self.tables.scale(float(message["factor"]))
                    shard.add(self.layout.new(bytearray(body)), float(message["factor"]))
                case "apply":
                    self._reached(shard.version)
                    update = float(message["factor"]), message["groups"], message["unused"]
                    shard.apply(*update)
                    self.tables.apply(*update)
                case "pass":
                    self.tables.forget()
                    shard.pass_over()
                case "fetch":
                    pieces = self._whole_state(optimizer=message["state"])
                case "put":
                    shard.put(self.layout.new(bytearray(body)))
                case "gradients":
                    pieces = [bytes(shard.gradient.buffer)]
                case other:
                    raise ValueError(f"to {other!r}, which no server does")
            answer["version"] = shard.version
            if message["do"] in WAITED_FOR:
                self.changed.notify_all()
        connection.send(answer, *pieces)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def _load(self, message: Message, body: memoryview) -> None:
        cut = self.layout.nbytes
        state = unpacked(body[cut:])
        self.shard.load(self.layout.new(bytearray(body[:cut])), state)
        self.shard.begin(int(message["version"]))
        self.era = int(message["era"])


class ServedTrainer(Trainer):
    """Keeps no table whose rows are on servers: the processes of a node build the model in turn.

    A table on meta never gets memory.
    """

    def _place_model(self) -> BuiltModel:
        assert isinstance(self.strategy, ParameterServer)
        self.strategy.builds_in_turn = self.strategy.rows_travel
        return super()._place_model()


def serve(trainer: Trainer, world: World, events: JsonLines) -> None:
    """Run a server until the scheduler says that the job is over.

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
                    continue  # the scheduler restarts, or the job ends
                if message.get("work") == OVER:
                    break
    finally:
        if server is not None:
            server.close()
    events.event("done", version=shard.version)
    heartbeat.enter("done")


MODEL = "common/model"


def evaluate_checkpoints(trainer: Trainer, job: Job, world: World, events: JsonLines) -> None:
    """Evaluate the checkpoints of `job` in this process alone, until its scheduler is done."""

    def evaluate(step: int, state: dict[str, Any]) -> dict[str, float]:
        trainer.faults.reach("step", step)
        load_model_state(trainer.strategy.model, state)
        return trainer.evaluate()

    work_queue.evaluate_checkpoints(job, world, trainer.heartbeat, events, _model_state, evaluate)
    trainer.heartbeat.enter("done")


def _model_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The weights and buffers in a checkpoint; the optimizer state is not read."""
    wanted = {path: saved for path, saved in manifest.tensors.items() if is_below(path, MODEL)}
    targets: dict[str, Tensor] = {
        path: torch.empty(saved.shape, dtype=DTYPES[saved.dtype]) for path, saved in wanted.items()
    }
    read_files(folder, wanted, targets)
    state: dict[str, Any] = unflatten(values_of(manifest)[0]["model"], targets)
    return state
