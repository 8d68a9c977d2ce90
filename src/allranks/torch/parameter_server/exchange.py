"""What a worker pulls and pushes: its side of the strategy, while it is linked to servers.

A worker pushes gradients (`Exchange`), or the change of its weights in mode=delta (`Changes`).

    pull    weights of all servers; with update=worker the sum of the gradients
    push    the gradient of each parameter, copied into the layout of its server

With update=worker (`LocalUpdate`) a worker pulls the gradient and updates its own weights:

    servers   sum <- the parts of step t; factor, rates      (as without it)
    worker    pulls factor · sum, and the hyperparameters of the update
              w, optimizer <- update(w, optimizer, factor · sum)

MXNet's kvstore works like this if the optimizer is not on it. The servers also update, after they
have answered: their weights go into checkpoints, and to a worker which missed the step before (it
has just joined, or another one did its part). That worker pulls all weights and optimizer states.
As all update the same pieces by the same numbers, all have the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.strategies.cards.parameter_server import LINE, STAIRCASE
from allranks.torch.checkpoint.state import unpacked
from allranks.torch.data.batch import Batch
from allranks.torch.parameter_server.flat import Flat
from allranks.torch.parameter_server.links import Links, SharedNumbers
from allranks.torch.parameter_server.pulled_tables import Lookups, pull_tables
from allranks.torch.parameter_server.row_table import split
from allranks.torch.parameter_server.served_tables import (
    RowGradients,
    TableGradients,
    leave_rows,
    numbers_of,
    rows_in,
)
from allranks.torch.parameter_server.service import Done
from allranks.torch.parameter_server.shard import Shard, plain_hyperparameters
from allranks.torch.parameter_server.strategy import ParameterServer, Side
from allranks.torch.step.gradients import Gradients, make_dense
from allranks.torch.step.tally import Tally
from allranks.training.work_queue import Chunk

CHECKED_PASSES = 8
"""Steps of a worker in which weights are compared with copies, as a write may change nothing at
first. Later steps compare `weight._version`, which misses writes through `weight.data`."""


NONE = -1


class LocalUpdate:
    """The pieces of every server, with an optimizer for them and their `versions`."""

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
        """The servers may have other weights: load the full state at the next pull."""
        self.versions = [NONE] * len(self._shards)

    def load(self, server: int, answer: Message, flat: Flat, body: memoryview) -> None:
        """Reach the version of a server: by its gradient in `flat`, or by its full state."""
        shard = self._shards[server]
        if "kept" in answer:
            whole = body[: shard.layout.nbytes]
            shard.load(shard.layout.new(whole), unpacked(body[len(whole) :]))
        elif answer["update"] is not None:
            how: dict[str, Any] = answer["update"]
            shard.update(flat, how["groups"], how["unused"])
        shard.weights.write_to(self._strategy.weights)
        self.versions[server] = int(answer["version"])


class Exchange(Side):
    """What a worker pulls and pushes: its side of the strategy, while it is linked to servers."""

    def __init__(self, strategy: ParameterServer) -> None:
        super().__init__(strategy)
        self._local = [(layout.new(), layout.new()) for layout in strategy.layouts]
        self.gradients, self.weights = map(list, zip(*self._local, strict=True))
        self._is_shared = [False] * len(self._local)
        self._checks_left = CHECKED_PASSES
        self.links: Links | None = None
        self.era = self.version = -1
        self.number = -1
        self.moved: dict[str, Any] = {"pushed": 0, "pulled": [0] * len(self._local), "kept": 0}
        """The bytes pushed so far, pulled from each server, and pulled of optimizer states."""
        self.local_update = LocalUpdate(strategy) if strategy.updates_on_worker else None
        self.tables = {table.plan.name: (n, table) for n, table in enumerate(strategy.tables)}
        self.lookups = Lookups(self._pull_rows, self._used)
        pull_tables(strategy.model, self.lookups, self.tables)
        tables = [strategy.parameters[table.position] for table in strategy.tables]
        leave_rows(tables, strategy.step.optimizer)

    def link(self, links: Links, era: int, hello: Message, *, shares: bool = True) -> None:
        """Use these servers; with `shares` through shared memory, if they are on this host."""
        layouts = self.strategy.layouts
        offers = [SharedNumbers.offer(layout) if shares else (None, {}) for layout in layouts]
        links.open(hello, [offer for _, offer in offers])
        for server, (shared, _) in enumerate(offers):
            self._lay(server, shared if links.shares[server] else None)
            if shared is not None:
                shared.hide()
        self.links, self.era, self.version = links, era, -1
        if self.local_update is not None:
            self.local_update.forget()

    def _lay(self, server: int, shared: SharedNumbers | None) -> None:
        """Put gradient and weights into the memory shared with a server, if there is one."""
        gradient, weights = self._local[server]
        if shared is not None:
            gradient, weights = shared.gradient, shared.weights
        self._is_shared[server] = shared is not None
        self.gradients[server], self.weights[server] = gradient, weights
        if not self.strategy.updates_on_worker and not self.strategy.pushes_changes:
            weights.be_memory_of(self.strategy.parameters)

    def unlink(self) -> None:
        """Leave the servers; drop the statistics of a forward pass which this interrupted."""
        self.strategy.step.scope.moments.clear()
        if self.links is not None:
            self.links.close()
        self.links = None

    def pull(self, version: int) -> None:
        """Load weights of this version or a later one into the model; waits for them."""
        links = self.links
        assert links is not None
        for server in range(len(self.weights)):
            request: dict[str, Any] = {"pull": version, "era": self.era}
            if self.local_update is not None:
                request["has"] = self.local_update.versions[server]
            links.send(server, request)
        self.receive_weights()

    def receive_weights(self) -> None:
        """Receive the requested weights."""
        self.lookups.forget()
        parameters = self.strategy.weights
        for server, answer, body in self.receive():
            if self.local_update is None:
                self.weights[server].write_to(parameters)
            else:
                self.local_update.load(server, answer, self.weights[server], body)

    def receive(self) -> list[tuple[int, Message, memoryview]]:
        """The answers of all servers to a pull."""
        links, answers = self.links, []
        assert links is not None
        for server, flat in enumerate(self.weights):
            answer, body = links.receive(server, flat.place)
            self.moved["pulled"][server] += int(answer.get("numbers", flat.layout.nbytes))
            self.moved["kept"] += max(0, len(body) - flat.layout.nbytes)
            answers.append((server, answer, body))
        self.version = min(int(answer["version"]) for _, answer, _ in answers)
        return answers

    def push(
        self, header: dict[str, Any], rows: TableGradients | None = None, *, pulls: bool = False
    ) -> None:
        """Send the gradients in `.grad` to all servers.

        With `pulls` also say which parameters have none, and request weights.
        """
        touched = self.lookups.gradients() if rows is None else rows
        for table, (ids, gradient) in touched.items():
            self._push_rows(table, ids, gradient)
        tables = self.strategy.tables
        absent = [table.position for table in tables if table.plan.name not in touched]
        gradients = [
            p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
            for p in self.strategy.parameters
        ]
        missing = [flat.read_from(gradients) for flat in self.gradients]
        more = [{"unused": positions + absent} for positions in missing] if pulls else []
        self.push_numbers(header, more, pulls=pulls)

    def push_numbers(
        self, header: dict[str, Any], more: Sequence[dict[str, Any]] = (), *, pulls: bool = False
    ) -> None:
        """Send `gradients` to all servers, with the fields `more` of each; request weights."""
        links = self.links
        assert links is not None
        for server, flat in enumerate(self.gradients):
            extra = more[server] if more else {}
            body = () if self._is_shared[server] else (flat.buffer,)
            links.send(server, {"push": {**header, **extra}, "era": self.era}, *body)
            self.moved["pushed"] += flat.layout.nbytes
            if pulls:
                links.send(server, {"pull": -1, "era": self.era})

    # --- rows of tables -------------------------------------------------------------------

    def _pull_rows(self, table: str, ids: Tensor) -> Tensor:
        """Send requests to all servers that have some of the rows, then wait for all."""
        links = self.links
        assert links is not None
        number, placed = self.tables[table]
        rows = torch.empty(len(ids), placed.plan.dim, dtype=placed.plan.kind)
        places = enumerate(split(ids, len(links.servers)))
        parts = [(server, at) for server, at in places if len(at)]
        for server, at in parts:
            request = {"table": number, "count": len(at)}
            links.send(server, {"rows": request, "era": self.era}, numbers_of(ids[at]))
        for server, at in parts:
            _, body = links.receive(server)
            rows[at] = rows_in(body, len(at), placed.plan.dim, placed.plan.kind)
            self.moved["pulled"][server] += len(body)
        return rows

    def _push_rows(self, table: str, ids: Tensor, gradient: Tensor) -> None:
        """Send each server its rows; they count with the dense push that follows."""
        links = self.links
        assert links is not None
        number, _ = self.tables[table]
        for server, at in enumerate(split(ids, len(links.servers))):
            if len(at):
                header = {"table": number, "count": len(at)}
                body = numbers_of(ids[at]), numbers_of(gradient[at])
                links.send(server, {"hold": header, "era": self.era}, *body)
                self.moved["pushed"] += sum(map(len, body))

    def _used(self, table: str) -> None:
        """Backward has reached a lookup in a table (called during backward)."""
        self.strategy.step.mark(self.tables[table][1].position)

    # --- out of step: the update of a step of this process ----------------------------------

    def compute(self, batch: Batch) -> Tally:
        """Forward and backward, with the gradients in `.grad`.

        Raises `RequestError` if the passes have written weights: the next pull would overwrite
        them.
        """
        step = self.strategy.step
        weights = dict(zip(step.names, step.parameters, strict=True))
        versions = {name: weight._version for name, weight in weights.items()}
        checked = weights if self._checks_left else {}
        before = {name: weight.detach().clone() for name, weight in checked.items()}
        tally = self.strategy.compute(batch)
        written = {name for name, weight in weights.items() if weight._version != versions[name]}
        written |= _changed(before, weights)
        if written:
            raise RequestError(
                asked=f"--strategy {self.strategy.name}",
                found=f"the model writes {', '.join(sorted(written))} in its forward or backward "
                "pass",
                why="servers have the weights, and update them only by gradients",
                do="compute new tensors from the weights instead, or use another strategy",
            )
        self._checks_left = max(0, self._checks_left - 1)
        return tally

    def check_gradients(self, tally: Tally) -> None:
        """Raise `RequestError` if the gradient of a parameter that was used is not in `.grad`."""
        tables = (table.position for table in self.strategy.tables)
        make_dense(self.strategy.parameters, len({*tally.unused(), *tables}))

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, RowGradients(self.strategy.parameters, self.strategy.tables, self.lookups)

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        """Within, parameters have no gradient: the servers apply it."""
        assert isinstance(gradients, RowGradients)
        header = {
            "number": self.number,
            "groups": plain_hyperparameters(self.strategy.step.optimizer),
        }
        self.push(header, gradients.of_tables, pulls=True)
        for parameter in gradients.parameters:
            parameter.grad = None
        yield
        self.receive_weights()


def _changed(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> set[str]:
    """The weights which differ: torch's version counter misses `weight.data.clamp_()`."""
    pairs = {name: (was, now[name]) for name, was in before.items()}
    return {n for n, pair in pairs.items() if not torch.allclose(*pair, 0, 0, equal_nan=True)}


def ramp(kind: str, start: float, over: int, rounds: int) -> float:
    """The factor f of a change, after so many rounds n of all workers.

    It grows from `start` = c in steps of `over` = m rounds:

        staircase   min(1, c · (floor(n / m) + 1))        line   min(1, c + (1 - c) · n / m)
    """
    if kind == STAIRCASE:
        return min(1.0, start * (rounds // over + 1))
    if kind == LINE:
        return min(1.0, start + (1 - start) * rounds / over)
    return 1.0


class Changes(Side):
    """mode=delta: a worker trains alone and pushes the change of its weights.

    This is CNTK's asynchronous SGD on Multiverso. `exchange` is linked to the servers.

        base     the weights that it has pulled
        w        `every` steps of its own optimizer, from the base on
        change   f · (base - w)       the server subtracts it from its weights on arrival
        base, w  <- the weights in the server's answer; with `pipeline`, those in its answer to the
                 push before, so that training does not wait: another thread pushes meanwhile

    Every change is relative to the base the worker began with, so nothing counts twice. A restarted
    worker begins with an empty optimizer state.
    """

    def __init__(self, exchange: Exchange, workers: int) -> None:
        super().__init__(exchange.strategy)
        self.exchange, self.workers = exchange, workers
        self.options = self.strategy.context.options
        self._bases = [layout.new() for layout in self.strategy.layouts]
        self._sender: ThreadPoolExecutor | None = None
        if self.options["pipeline"] == "yes":
            self._sender = ThreadPoolExecutor(1, "allranks-changes")
        self._in_flight: Future[None] | None = None
        self._done: Done | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether there is a push that is not known to have reached all servers."""
        return self._done is not None

    def begin(self) -> None:
        """Make the pulled weights the base."""
        for base, weights in zip(self._bases, self.exchange.weights, strict=True):
            base.copy_(weights)

    def push(self, chunk: Chunk, done: Done) -> Done | None:
        """Push the change of a chunk, and continue from newer weights.

        Returns the chunk which all servers have: this one, or with `pipeline` the one before.
        """
        before = self.settle()  # the last push reads this memory until then
        rounds = chunk.first // (self.options["every"] * self.workers)
        part = ramp(
            self.options["ramp"], self.options["ramp_from"], self.options["ramp_over"], rounds
        )
        self._take_changes(part)
        if self._sender is None:
            self._send(chunk.number)
            self._go_on()
            return done
        self._go_on()  # from the answer to the push before
        self._done = done
        self._in_flight = self._sender.submit(self._send, chunk.number)
        return before

    def settle(self) -> Done | None:
        """Wait for the push under way, if there is one; returns its chunk."""
        if self._in_flight is not None:
            self._in_flight.result()
        done, self._done, self._in_flight = self._done, None, None
        return done

    @torch.no_grad()
    def _take_changes(self, part: float) -> None:
        weights = self.strategy.weights
        for base, change in zip(self._bases, self.exchange.gradients, strict=True):
            change.read_from(weights)
            for change_flat, base_flat in zip(change.flats, base.flats, strict=True):
                torch.sub(base_flat, change_flat, out=change_flat).mul_(part)

    def _send(self, number: int) -> None:
        self.exchange.push_numbers({"number": number, "change": True}, pulls=True)
        self.exchange.receive()

    def _go_on(self) -> None:
        self.begin()
        for base in self._bases:
            base.write_to(self.strategy.weights)

    def forget(self) -> None:
        """The servers are left; the push under way may have reached them or not."""
        links: Links | None = self.exchange.links
        if self._in_flight is not None:
            if links is not None:
                links.shut()
            with suppress(Disconnected):
                self._in_flight.result()
        self._in_flight = self._done = None

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()
