"""Rows that go to the ranks of their experts, and come back: two all-to-alls, and two in backward.

    forward      rows -> their experts' ranks, outputs -> back
    backward     gradients of outputs -> their experts' ranks, gradients of rows -> back

How many rows there are follows the data: ranks tell each other before (`control`). A rank with no
row for anybody makes the same calls with nothing in them. Experts have the rows of all ranks, so
their gradient is the sum over these already, and nothing is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allranks.errors import RequestError
from allranks.torch.accelerator import tensor_of
from allranks.torch.comm.comm import Comm

END = -1  # in place of a layer: the forward pass is over
Compute = Callable[[Tensor, Sequence[int]], Tensor]


class ExpertExchange:
    """The ranks of `comm`, each with as many experts as any other, in order.

    `exchanged` are the bytes of rows that steps have sent to other ranks, counted by the rows that
    were routed there. `is_idle` says whether a pass is made for the others alone: then this rank
    sends no row of its own. `kind` is what messages are counted as, `room` the most experts that a
    layer has.
    """

    def __init__(self, comm: Comm, is_idle: Callable[[], bool]) -> None:
        self.comm, self.is_idle = comm, is_idle
        self.kind, self.exchanged, self.room = "control", 0, 0

    @contextmanager
    def opened(self, kind: str) -> Iterator[None]:
        """Within, what passes send is of that kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def computed(self, rows: Tensor, counts: list[list[int]], compute: Compute) -> Tensor:
        """What the experts of all ranks make of rows that are sorted by expert, in their order.

        All ranks call this; `counts` are the rows of each rank for each expert of all.
        """
        given, own = counts[self.comm.rank], len(counts[0]) // self.comm.size
        start = self.comm.rank * own
        sizes = [row[start : start + own] for row in counts]  # (source, own expert)
        gives = [sum(given[start : start + own]) for start in range(0, len(given), own)]
        takes = [sum(row) for row in sizes]
        received = exchanged(self, rows, gives, takes)
        outputs = compute(_by_expert(received, sizes), [sum(column) for column in _turned(sizes)])
        return exchanged(self, _by_expert(outputs, _turned(sizes)), takes, gives)

    def close_pass(self) -> None:
        """A forward pass is over: a rank that has skipped a layer meets those that are in it.

        All ranks call this after as many forward passes; layers that backward computes again come
        in between, on all of them. Raises `RequestError` where others call a layer.
        """
        self.sizes(torch.zeros(0, dtype=torch.int64, device=self.comm.device), END)

    def sizes(self, counts: Tensor, layer: int) -> list[list[int]]:
        """How many rows each rank has for each expert of all. Sends all counts.

        All ranks call this, for the same `layer`; raises `RequestError` where they call other ones.
        Every such message is of the same size, so that ranks in different layers find out. Where
        counts lie on a device the host waits for it once, here.
        """
        device, experts = self.comm.device, len(counts)
        part = tensor_of([layer, experts, *[0] * self.room], device)
        part[2 : 2 + experts] = counts
        whole = part.new_empty(self.comm.size * part.numel())
        self.comm.all_gather(whole, part, "control").wait()
        with self.comm.reading():
            rows = whole.view(self.comm.size, -1).tolist()
        if any(row[:2] != [layer, experts] for row in rows):
            raise _another_layer()
        return [row[2 : 2 + experts] for row in rows]

    def sent(self, rows: Tensor, gives: list[int], takes: list[int]) -> Tensor:
        """Send rows, cut into `gives`, to the ranks; returns what they sent, `takes` of each."""
        received = rows.new_empty(sum(takes), *rows.shape[1:])
        if self.kind == "gradients":
            away = sum(gives) - gives[self.comm.rank]
            self.exchanged += away * rows.shape[1] * rows.element_size()
        self.comm.all_to_all(received, rows.contiguous(), takes, gives, self.kind).wait()
        return received


def exchanged(exchange: ExpertExchange, rows: Tensor, gives: list[int], takes: list[int]) -> Tensor:
    """`ExpertExchange.sent`; backward sends the gradients the other way."""
    found: Tensor = _Exchanged.apply(exchange, rows, gives, takes)  # type: ignore[no-untyped-call]
    return found


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: ExpertExchange, rows: Tensor, gives: list[int], takes: list[int]
    ) -> Tensor:
        ctx.exchange, ctx.gives, ctx.takes = exchange, gives, takes
        return exchange.sent(rows, gives, takes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.sent(gradient, ctx.takes, ctx.gives), None, None


def _by_expert(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Rows that lie in runs of `sizes`, row by row of these, put in the order of its columns."""
    runs = rows.split([size for row in sizes for size in row])
    across = len(sizes[0])
    return torch.cat(
        [runs[i] for column in range(across) for i in range(column, len(runs), across)]
    )


def _turned(sizes: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*sizes, strict=True)]


def _another_layer() -> RequestError:
    return RequestError(
        asked="--strategy expert",
        found="ranks that call the mixtures of the model in different orders, or other ones",
        why="the rows of a layer go to its experts on all ranks: they would be mixed",
        do="let forward call every MixtureOfExperts for every batch, in one order",
    )
