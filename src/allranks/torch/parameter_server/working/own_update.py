"""`update=worker`: a worker updates weights of its own, by the gradient that it pulls.

    servers   sum <- the parts of step t; factor, rates      (as without it)
    worker    pulls factor · sum, and what the scheduler said of the update
              w, optimizer <- update(w, optimizer, factor · sum)

So MXNet's kvstore works where the optimizer is not on it. The servers update as well, behind what
they answer: by theirs a checkpoint is made, and a worker goes on that has not seen the step before,
because it has just come, or another one did its part. It pulls weights and what the optimizer
keeps, whole. As all update the same pieces by the same numbers, all have the same bits.
"""

from __future__ import annotations

import copy
from typing import Any

from allranks.launcher.nodes.channel import Message
from allranks.torch.parameter_server.flat import Flat
from allranks.torch.parameter_server.shard import Shard
from allranks.torch.parameter_server.state import unpacked
from allranks.torch.parameter_server.strategy import ParameterServer

NONE = -1


class OwnUpdate:
    """The pieces of every server with an optimizer for them; `versions` are those they have."""

    def __init__(self, strategy: ParameterServer) -> None:
        self._strategy = strategy
        known = {id(p): p for p in strategy.parameters}
        self._shards = []
        for layout in strategy.layouts:
            optimizer = copy.deepcopy(strategy.step.optimizer, dict(known))
            shard = Shard(layout, optimizer, strategy.parameters)
            shard.weights.be_memory_of(strategy.parameters)
            self._shards.append(shard)
        self.forget()

    def forget(self) -> None:
        """The servers may have other weights: what is here is not gone on from."""
        self.versions = [NONE] * len(self._shards)

    def take(self, server: int, answer: Message, flat: Flat, body: memoryview) -> None:
        """Have the version that a server has: by its gradient in `flat`, or by all that it has."""
        shard = self._shards[server]
        if "kept" in answer:
            whole = body[: shard.layout.nbytes]
            shard.load(shard.layout.new(whole), unpacked(answer["kept"], body[len(whole) :]))
        elif answer["update"] is not None:
            how: dict[str, Any] = answer["update"]
            shard.update(flat, how["groups"], how["unused"])
        shard.weights.write_to([p.detach() for p in self._strategy.parameters])
        self.versions[server] = int(answer["version"])
