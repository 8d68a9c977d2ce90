"""What a worker pulls and pushes: its side of the strategy, while it is linked to servers.

    pull    weights of all servers; with update=worker the sum of the gradients
    push    the gradient, which backward leaves where it is sent from (`LaidOut`)

With update=worker (`OwnUpdate`) a worker updates weights of its own, by the gradient that it pulls:

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.launcher.nodes.channel import Message
from allranks.torch.data.batch import Batch
from allranks.torch.parallel.data.buckets import MOVED_BYTES, Moved
from allranks.torch.parameter_server.flat import Flat
from allranks.torch.parameter_server.links import CalledBack, Links, Stale
from allranks.torch.parameter_server.memory import SharedNumbers
from allranks.torch.parameter_server.shard import Shard
from allranks.torch.parameter_server.state import hyper_parameters_said, unpacked
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.parameter_server.tables.pulled import Lookups, pull_tables
from allranks.torch.parameter_server.tables.remote import Found, RemoteRows, RowGradients
from allranks.torch.parameter_server.tables.served import let_go
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.training.progress import StepResult

CHECKED_PASSES = 8
"""Steps of a worker in which weights are compared with copies; later ones go by torch's count of
writes, which `weight.data` does not add to. A write may change nothing in the first of them."""


class LaidOut:
    """Gradients of `parameters` in `flats`, one for each server.

    Those of tensors that are cut, or lie on a device, backward leaves elsewhere. A step calls
    `begin` before its passes, `finished` in them, and `settle` after them.
    """

    def __init__(self, flats: Sequence[Flat], parameters: Sequence[nn.Parameter]) -> None:
        homes = {at: home for flat in flats for at, home in flat.homes_of(parameters).items()}
        large = {at: home for at, home in homes.items() if home[1].nbytes >= MOVED_BYTES}
        self._parameters, self._moved = parameters, Moved(large, read_later=True)
        self._small = [home for at, home in homes.items() if at not in large]

    def begin(self) -> None:
        """All gradients are zero, or yet to be made."""
        for parameter in self._parameters:
            parameter.grad = None
        self._moved.begin()
        if self._small:
            torch._foreach_zero_([view for _, view in self._small])
        for parameter, view in self._small:
            parameter.grad = view

    def finished(self, position: int) -> None:
        """Backward has finished a gradient (called during backward)."""
        self._moved.finished(position)

    def settle(self) -> None:
        """All passes are over."""
        self._moved.settle()


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


class Exchange:
    """What a worker pulls and pushes: its side of the strategy, while it is linked to servers."""

    def __init__(self, strategy: ParameterServer, worker: int) -> None:
        self.strategy, self.worker = strategy, worker
        self._own = [(layout.new(), layout.new()) for layout in strategy.layouts]
        self.gradients, self.weights = map(list, zip(*self._own, strict=True))
        self._is_shared = [False] * len(self._own)
        self._checks_left = CHECKED_PASSES
        self.links: Links | None = None
        self.era = self.version = -1
        self.number = -1
        self.tally: Tally | None = None
        self.moved: dict[str, Any] = {"pushed": 0, "pulled": [0] * len(self._own), "kept": 0}
        """The bytes that were pushed so far, those that were pulled from each server, and those of
        what optimizers keep."""
        self.own = OwnUpdate(strategy) if strategy.updates_on_worker else None
        self.rows = RemoteRows(strategy.tables, self.moved)
        self.lookups = Lookups(self.rows, self._used)
        pull_tables(strategy.model, self.lookups, self.rows.tables)
        for one in strategy.tables:
            let_go(strategy.parameters[one.position], strategy.step.optimizer)

    def _used(self, table: str) -> None:
        """Backward has reached a lookup in a table."""
        self.strategy.step.mark(self.rows.tables[table][1].position)

    def link(self, links: Links, era: int, hello: Message, *, shares: bool = True) -> None:
        """Go on with these servers: in memory that is shared, where they can and it `shares`."""
        layouts = self.strategy.layouts
        offers = [SharedNumbers.offer(layout) if shares else (None, {}) for layout in layouts]
        links.open(hello, [offer for _, offer in offers])
        for server, (shared, _) in enumerate(offers):
            self._lay(server, shared if links.shares[server] else None)
            if shared is not None:
                shared.hide()
        self.laid_out = LaidOut(self.gradients, self.strategy.parameters)
        self.strategy.step.on_gradient = self.laid_out.finished
        self.links, self.era, self.version = links, era, -1
        if self.own is not None:
            self.own.forget()
        self.rows.link(links, era)

    def _lay(self, server: int, shared: SharedNumbers | None) -> None:
        """Let gradient and weights lie in the memory that is shared with a server, if any is."""
        gradient, weights = self._own[server]
        if shared is not None:
            gradient, weights = shared.gradient, shared.weights
        self._is_shared[server] = shared is not None
        self.gradients[server], self.weights[server] = gradient, weights
        if self.strategy.weights_lie_where_they_come:
            weights.be_memory_of(self.strategy.parameters)

    def unlink(self) -> None:
        """Leave the servers; of a forward pass that this has cut off nothing is counted."""
        step = self.strategy.step
        step.scope.moments.clear()
        step.on_gradient = None
        if self.links is not None:
            self.links.close()
        self.links = None

    def pull(self, version: int) -> None:
        """The model has weights of this version or a later one from here on."""
        links = self.links
        assert links is not None
        for server in range(len(self.weights)):
            asked: dict[str, Any] = {"pull": version, "era": self.era}
            if self.own is not None:
                asked["has"] = self.own.versions[server]
            links.send(server, asked)
        self.take()

    def take(self) -> None:
        """Take the weights that were asked for, and in step what is told with them.

        Raises `CalledBack`, with all answers heard, where other work comes first.
        """
        self.lookups.forget()
        parameters = [p.detach() for p in self.strategy.parameters]
        for server, answer, body in self.receive():
            if self.own is None:
                self.weights[server].write_to(parameters)
            else:
                self.own.take(server, answer, self.weights[server], body)

    def receive(self) -> list[tuple[int, Message, memoryview]]:
        """The answers of all servers to a pull; raises as `take` does."""
        found = []
        for server, flat in enumerate(self.weights):
            answer, body = self._answer(server)
            if "stale" in answer:
                raise Stale(f"server {server} has been loaded anew")
            if "again" in answer:
                continue
            self.moved["pulled"][server] += int(answer.get("numbers", flat.layout.nbytes))
            self.moved["kept"] += max(0, len(body) - flat.layout.nbytes)
            found.append((server, answer, body))
        if len(found) < len(self.weights):
            raise CalledBack
        self.version = min(int(answer["version"]) for _, answer, _ in found)
        return found

    def _answer(self, server: int) -> tuple[Message, memoryview]:
        """What a server answers to a pull; the body of what is told comes before the weights.

        Numbers in the layout go where they lie; what has more to it has memory of its own.
        """
        links, flat = self.links, self.weights[server]
        assert links is not None
        answer, size = links.header(server)
        if "told" in answer:
            told = memoryview(bytearray(int(answer["told_bytes"])))
            links.fill(server, told)
            self.strategy.hear(answer["told"], told)
            size -= len(told)
        fits = size <= flat.layout.nbytes
        body = flat.place(size) if fits else memoryview(bytearray(size))
        links.fill(server, body)
        return answer, body

    def push(
        self,
        said: dict[str, Any],
        rows: Found | None = None,
        *,
        unused: bool = False,
        pulls: bool = False,
    ) -> None:
        """Send the gradients where they lie in `.grad` to all servers; then ask for weights."""
        touched = self.lookups.gradients() if rows is None else rows
        for table, (ids, gradient) in touched.items():
            self.rows.push(table, ids, gradient)
        absent = self.rows.absent(touched)
        gradients = [
            p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
            for p in self.strategy.parameters
        ]
        missing = [flat.read_from(gradients) for flat in self.gradients]
        more = [{"unused": positions + absent} for positions in missing] if unused else []
        self.push_numbers(said, more, pulls=pulls)

    def push_numbers(
        self,
        said: dict[str, Any],
        more: Sequence[dict[str, Any]] = (),
        *,
        pulls: bool = False,
    ) -> None:
        """Send what lies in `gradients` to all servers, and `more` to each; ask for weights."""
        links = self.links
        assert links is not None
        for server, flat in enumerate(self.gradients):
            own = more[server] if more else {}
            body = () if self._is_shared[server] else (flat.buffer,)
            links.send(server, {"push": {**said, **own}, "era": self.era}, *body)
            self.moved["pushed"] += flat.layout.nbytes
            if pulls:
                links.send(server, {"pull": -1, "era": self.era})

    # --- out of step: the update of a step of this process ----------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        self.tally = self.compute(batch)
        return self.tally

    def compute(self, batch: Batch) -> Tally:
        """Forward and backward; gradients are left in `gradients`, and leave from there.

        Raises `RequestError` for weights that the passes have written: they are lost with the next
        ones that come.
        """
        step = self.strategy.step
        weights = dict(zip(step.names, step.parameters, strict=True))
        self.laid_out.begin()
        versions = {name: weight._version for name, weight in weights.items()}
        checked = weights if self._checks_left else {}
        before = {name: weight.detach().clone() for name, weight in checked.items()}
        tally = self.strategy.accumulate(batch)
        self.laid_out.settle()
        written = {name for name, weight in weights.items() if weight._version != versions[name]}
        written |= _changed(before, weights)
        if written:
            raise RequestError(
                asked=f"--strategy {self.strategy.name}",
                found=f"the model writes {', '.join(sorted(written))} in its forward or backward "
                "pass",
                why="servers hold the weights, and update them by gradients alone",
                do="compute what is used from the weights, or take another strategy",
            )
        self._checks_left = max(0, self._checks_left - 1)
        return tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, RowGradients(self.strategy.parameters, self.rows, self.lookups)

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        """Within, the optimizer finds no gradient: the servers have applied it."""
        assert isinstance(gradients, RowGradients)
        said = {
            "number": self.number,
            "groups": hyper_parameters_said(self.strategy.step.optimizer),
        }
        self.push(said, gradients.found, unused=True, pulls=True)
        for parameter in gradients.parameters:
            parameter.grad = None
        yield
        self.take()

    def after_update(self, result: StepResult) -> None:
        """The weights are here already."""

    def take_weights(self, *, optimizer: bool = False) -> None:
        """A worker has what it pulled."""

    def put_weights(self) -> None:
        """A worker changes nothing on a server but by a gradient."""


def _changed(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> set[str]:
    """Which weights have other numbers: `weight.data.clamp_()` is not in torch's count."""
    pairs = {name: (was, now[name]) for name, was in before.items()}
    return {n for n, pair in pairs.items() if not torch.allclose(*pair, 0, 0, equal_nan=True)}
