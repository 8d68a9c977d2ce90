"""`mode=delta`: a worker trains by itself, and pushes what that has changed (CNTK on Multiverso).

    base     the weights that it has pulled
    w        `every` steps of its own optimizer, from the base on
    change   f · (base - w)         the server subtracts it from its weights when it comes
    base, w  <- the weights that the server answers with; with `pipeline`, those that it has
             answered to the push before, so nobody waits: a thread pushes, while this one trains

    f        the ramp, over the rounds n of all workers so far, from c in steps of m rounds:
             staircase   min(1, c · (floor(n / m) + 1))          line   min(1, c + (1 - c) · n / m)

Every change is from the base that the worker began from, so nothing counts twice. A worker that
comes again begins with an optimizer that keeps nothing.
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
    """The part of a change that is pushed after so many rounds."""
    if kind == STAIRCASE:
        return min(1.0, start * (rounds // over + 1))
    if kind == LINE:
        return min(1.0, start + (1 - start) * rounds / over)
    return 1.0


class Changes:
    """The side of a worker that trains by itself; `exchange` is linked to the servers."""

    def __init__(self, exchange: Exchange, workers: int) -> None:
        self.exchange, self.workers = exchange, workers
        self.options = exchange.strategy.context.options
        self.tally: Tally | None = None
        self._bases = [layout.new() for layout in exchange.strategy.layouts]
        self._sender: ThreadPoolExecutor | None = None
        if self.options["pipeline"] == "yes":
            self._sender = ThreadPoolExecutor(1, "allranks-changes")
        self._sent: Future[None] | None = None
        self._done: Done | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether there is a change of which nobody knows yet that all servers have it."""
        return self._done is not None

    def begin(self) -> None:
        """The weights that were pulled are those that this worker goes on from."""
        for base, weights in zip(self._bases, self.exchange.weights, strict=True):
            base.copy_(weights)

    def push(self, chunk: Chunk, done: Done) -> Done | None:
        """Push what a chunk has changed, and go on from newer weights.

        Returns what is done for certain: this chunk, or with `pipeline` the one before it.
        """
        before = self.settle()  # until then the memory of the last change is read
        rounds = chunk.first // (self.options["every"] * self.workers)
        part = ramp(
            self.options["ramp"], self.options["ramp_from"], self.options["ramp_over"], rounds
        )
        self._take_changes(part)
        if self._sender is None:
            self._send(chunk.number)
            self._go_on()
            return done
        self._go_on()  # from what the push before was answered with
        self._done = done
        self._sent = self._sender.submit(self._send, chunk.number)
        return before

    def settle(self) -> Done | None:
        """Wait for what is under way, if anything is; returns what is done with it."""
        if self._sent is not None:
            self._sent.result()
        done, self._done, self._sent = self._done, None, None
        return done

    @torch.no_grad()
    def _take_changes(self, part: float) -> None:
        weights = [p.detach() for p in self.exchange.strategy.parameters]
        for base, change in zip(self._bases, self.exchange.gradients, strict=True):
            change.read_from(weights)
            for own, from_ in zip(change.flats, base.flats, strict=True):
                torch.sub(from_, own, out=own).mul_(part)

    def _send(self, number: int) -> None:
        self.exchange.push_numbers({"number": number, "change": True}, pulls=True)
        self.exchange.receive()

    def _go_on(self) -> None:
        self.begin()
        weights = [p.detach() for p in self.exchange.strategy.parameters]
        for base in self._bases:
            base.write_to(weights)

    def forget(self) -> None:
        """The servers are left: what is under way may have come there, or not."""
        links: Links | None = self.exchange.links
        if self._sent is not None:
            if links is not None:
                links.shut()
            with suppress(Disconnected):
                self._sent.result()
        self._sent = self._done = None

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
        """What has changed is pushed after the last step of a chunk."""

    def take_weights(self, *, optimizer: bool = False) -> None:
        """A worker has its own."""

    def put_weights(self) -> None:
        """A worker changes nothing on a server but by what it pushes."""
