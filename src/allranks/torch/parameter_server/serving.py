"""The process of a server; and the trainer of a worker or a server, which has no table whole."""

from __future__ import annotations

import socket

from allranks.job.run_folder import JsonLines
from allranks.launcher.messages.answering import ANSWER_S
from allranks.launcher.messages.meeting_point import connect
from allranks.launcher.nodes.channel import Disconnected
from allranks.launcher.world import World
from allranks.strategies.cards.parameter_server import SERVER
from allranks.torch.build import BuiltModel
from allranks.torch.parameter_server.server import OVER, Server
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.trainer import Trainer


class ServedTrainer(Trainer):
    """Builds the model on meta where there are tables, and computes all its weights but these.

    Where a model cannot be built so (`model_notes` says why), it is whole for a moment.
    """

    def _place_model(self) -> BuiltModel:
        assert isinstance(self.strategy, ParameterServer)
        self.strategy.builds_deferred = self.strategy.rows_travel
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
