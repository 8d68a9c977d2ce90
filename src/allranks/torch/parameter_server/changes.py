"""`mode=delta`: a worker trains alone and pushes the change of its weights (CNTK on Multiverso).

    base     the weights that it has pulled
    w        `every` steps of its own optimizer, from the base on
    change   f · (base - w)         the server subtracts it from its weights on arrival
    base, w  <- the weights in the server's answer; with `pipeline`, those in its answer to the
             push before, so that training does not wait: another thread pushes meanwhile

    f        the ramp, over the rounds n of all workers so far, from c in steps of m rounds:
             staircase   min(1, c · (floor(n / m) + 1))          line   min(1, c + (1 - c) · n / m)

Every change is relative to the base the worker began with, so nothing counts twice. A restarted
worker begins with an empty optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from allranks.launcher.nodes.channel import Disconnected
from allranks.strategies.cards.parameter_server import LINE, STAIRCASE
from allranks.torch.data.batch import Batch
from allranks.torch.parameter_server.exchange import Exchange
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.service import Done
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.training.progress import StepResult
from allranks.training.work_queue import Chunk


def ramp(kind: str, start: float, over: int, rounds: int) -> float:
    """The factor f of a change after so many rounds."""
    if kind == STAIRCASE:
        return min(1.0, start * (rounds // over + 1))
    if kind == LINE:
        return min(1.0, start + (1 - start) * rounds / over)
    return 1.0


class Changes:
    """The strategy in a worker which trains alone; `exchange` is linked to the servers."""

    def __init__(self, exchange: Exchange, workers: int) -> None:
        self.exchange, self.workers = exchange, workers
        self.options = exchange.strategy.context.options
        self.tally: Tally | None = None
        self._bases = [layout.new() for layout in exchange.strategy.layouts]
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
        weights = [p.detach() for p in self.exchange.strategy.parameters]
        for base, change in zip(self._bases, self.exchange.gradients, strict=True):
            change.read_from(weights)
            for change_flat, base_flat in zip(change.flats, base.flats, strict=True):
                torch.sub(base_flat, change_flat, out=change_flat).mul_(part)

    def _send(self, number: int) -> None:
        self.exchange.push_numbers({"number": number, "change": True}, pulls=True)
        self.exchange.receive()

    def _go_on(self) -> None:
        self.begin()
        weights = [p.detach() for p in self.exchange.strategy.parameters]
        for base in self._bases:
            base.write_to(weights)

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

    # --- the step of this process -----------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        self.tally = self.exchange.strategy.compute(batch)
        return self.tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        return local, Gradients(self.exchange.strategy.parameters)

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        yield

    def after_update(self, result: StepResult) -> None:
        """Nothing to do: `push` follows the last step of a chunk."""

    def take_weights(self, *, optimizer: bool = False) -> None:
        """Nothing to do: a worker has its own weights."""

    def put_weights(self) -> None:
        """Nothing to do: a worker changes servers only by its pushes."""
