"""Sends rows to the ranks of their experts and back: two all-to-alls, and two in backward.

    forward      rows -> their experts' ranks, outputs -> back
    backward     gradients of outputs -> their experts' ranks, gradients of rows -> back

The number of rows depends on the data, so ranks exchange counts before (`control`). A rank without
rows makes the same calls with empty tensors. Experts see the rows of all ranks, so their gradient
is the sum over these already, and nothing is divided.
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
    """The ranks of `comm`, each with the same number of experts, in order.

    `exchanged` are the bytes of rows that steps have sent to other ranks, by the rows that were
    routed there. `is_idle` tells whether a pass is made only for other ranks: then this rank sends
    no rows. Messages are counted as `kind`; `room` is the largest number of experts of a layer.
    """

    def __init__(self, comm: Comm, is_idle: Callable[[], bool]) -> None:
        self.comm, self.is_idle = comm, is_idle
        self.kind, self.exchanged, self.room = "control", 0, 0

    @contextmanager
    def opened(self, kind: str) -> Iterator[None]:
        """Within, messages of passes are of that kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def computed(self, rows: Tensor, counts: list[list[int]], compute: Compute) -> Tensor:
        """The outputs of the experts of all ranks for rows that are sorted by expert.

        All ranks call this; `counts` are the rows of each rank for each expert.
        """
        local, experts = counts[self.comm.rank], len(counts[0]) // self.comm.size
        start = self.comm.rank * experts
        sizes = [row[start : start + experts] for row in counts]  # (source, own expert)
        gives = [sum(local[at : at + experts]) for at in range(0, len(local), experts)]
        takes = [sum(row) for row in sizes]
        received = exchanged(self, rows, gives, takes)
        of_experts = _transposed(sizes)
        outputs = compute(_by_expert(received, sizes), [sum(column) for column in of_experts])
        return exchanged(self, _by_expert(outputs, of_experts), takes, gives)

    def close_pass(self) -> None:
        """End a forward pass: detects ranks that have skipped a layer which others call.

        All ranks call this after the same number of forward passes; layers that backward recomputes
        come in between, on all ranks. Raises `RequestError` if others call a layer.
        """
        self.sizes(torch.zeros(0, dtype=torch.int64, device=self.comm.device), END)

    def sizes(self, counts: Tensor, layer: int) -> list[list[int]]:
        """How many rows each rank has for each expert. Sends all counts.

        All ranks call this for the same `layer`; raises `RequestError` if they call different ones.
        Messages of all layers have the same size, so that this is detected. If counts are on a
        device, the host waits for it once, here.
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

    def exchange_rows(self, rows: Tensor, gives: list[int], takes: list[int]) -> Tensor:
        """Send rows, split by `gives`, to the ranks; returns their rows, `takes` of each."""
        received = rows.new_empty(sum(takes), *rows.shape[1:])
        if self.kind == "gradients":
            away = sum(gives) - gives[self.comm.rank]
            self.exchanged += away * rows.shape[1] * rows.element_size()
        self.comm.all_to_all(received, rows.contiguous(), takes, gives, self.kind).wait()
        return received


def exchanged(exchange: ExpertExchange, rows: Tensor, gives: list[int], takes: list[int]) -> Tensor:
    """`ExpertExchange.exchange_rows`; backward sends the gradients the other way."""
    output: Tensor = _Exchanged.apply(exchange, rows, gives, takes)  # type: ignore[no-untyped-call]
    return output


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: ExpertExchange, rows: Tensor, gives: list[int], takes: list[int]
    ) -> Tensor:
        ctx.exchange, ctx.gives, ctx.takes = exchange, gives, takes
        return exchange.exchange_rows(rows, gives, takes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.exchange_rows(gradient, ctx.takes, ctx.gives), None, None


def _by_expert(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Reorder runs of rows from the row order to the column order of `sizes`."""
    runs = rows.split([size for row in sizes for size in row])
    across = len(sizes[0])
    return torch.cat(
        [runs[i] for column in range(across) for i in range(column, len(runs), across)]
    )


def _transposed(sizes: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*sizes, strict=True)]


def _another_layer() -> RequestError:
    return RequestError(
        asked="--strategy expert",
        found="ranks that call the mixtures of the model in different orders, or other ones",
        why="the rows of a layer go to its experts on all ranks: they would be mixed",
        do="let forward call every MixtureOfExperts for every batch, in one order",
    )
