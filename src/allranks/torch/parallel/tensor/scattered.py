"""Sequence parallelism: between tensor-parallel regions a rank has some positions of each sequence.

    forward                                  backward
    first block: own positions               all-gather of the gradient
    column of a region: all-gather           reduce-scatter of the gradient; all-gather once more
    row of a region: reduce-scatter          all-gather of the gradient
    last block: all-gather                   own positions of the gradient

An all-reduce is a reduce-scatter and an all-gather: a region sends what it sends without, and once
more the input that its columns gather again in backward, as no rank keeps it whole. Weights that
are not cut see some positions in the blocks, and their gradients are summed over the ranks after
backward. Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.nn import functional as F

from allranks.torch.checkpoint.tree import local
from allranks.torch.comm.comm import Comm
from allranks.torch.context_parallel.exchange import POSITIONS, SequenceExchange, Span
from allranks.torch.model.layers import own_kind
from allranks.torch.parallel.tensor.exchange import part_sizes

DIMS = 3  # (sample, position, feature)


class ScatteredExchange(SequenceExchange):
    """The ranks of the tensor axis. `span` is how the sequence lies on them, within a block.

    `cut` gives the ids of the weights of which each rank has a part: `fully_shard` puts others in
    their places while they are gathered.
    """

    why = (
        "a rank has some positions of the sequence in a block, but for what is between the columns "
        "and the row of a part that is cut over features or heads: elsewhere a block may not look "
        "along the sequence, draw by torch.nn.functional.dropout, or use what is not cut along it"
    )
    do = "cut attention by heads (tensor_plan), use nn.Dropout, or leave sequence=yes out"
    cuts_arguments = False

    def __init__(self, comm: Comm, asked: str) -> None:
        super().__init__(comm)
        self.asked = asked
        self.cut: Callable[[], Container[int]] = frozenset
        self.span: Span | None = None
        self._is_proving = False
        self._known: dict[tuple[int, int], bool] = {}
        self._calls: Counter[int] = Counter()

    @contextmanager
    def within(self, span: Span) -> Iterator[None]:
        """Within, activations outside of regions are this rank's positions."""
        before, self.span = self.span, span
        self._calls.clear()
        try:
            yield
        finally:
            self.span = before

    @contextmanager
    def proved(self) -> Iterator[None]:
        before, self._is_proving = self._is_proving, True
        try:
            yield
        finally:
            self._is_proving = before

    def own_rows(self, whole: Tensor, span: Span, dim: int = POSITIONS) -> Tensor:
        """This rank's positions of what all ranks hold; backward gathers."""
        return self.own_part(whole, dim)

    def whole_rows(self, own: Tensor, span: Span, *, is_last: bool) -> Tensor:
        """The positions of all ranks; what follows is the same on all of them."""
        return self.whole(own, POSITIONS, span.whole)

    def is_summed(self, weight: nn.Parameter) -> bool:
        return id(weight) not in self.cut()

    def lies_along(self, layer: nn.Module, activations: Tensor) -> bool:
        """Whether the input of a layer is this rank's positions of a sequence.

        Raises `RequestError` for one that only looks so: the same call was proved with another.
        """
        if self.span is None:
            return False
        shape, span = activations.shape, self.span
        found = activations.ndim == DIMS and shape[POSITIONS] == span.local
        call = id(layer), self._calls[id(layer)]
        self._calls[id(layer)] += 1
        if self._is_proving:
            self._known[call] = found
        elif found != self._known.get(call, found):
            raise self.refusal(
                f"a {own_kind(layer).__name__} that is given a tensor of shape {tuple(shape)}, "
                f"where a rank has {span.local} of {span.whole} positions: in the first pass what "
                f"it was given was {'not ' * found}the positions of a rank"
            )
        return found

    def rows_of_all(self, own: Tensor) -> AllRows:
        """The positions of all ranks, for columns; one all-gather."""
        assert self.span is not None
        if _are_functorch_transforms_active():
            raise self.refusal("a layer within vmap, grad or another transform of torch.func")
        return AllRows(self, own, self.span.whole)

    def own_sum(self, parts: Tensor, name: str) -> Tensor:
        """This rank's positions of the sum over the ranks; one reduce-scatter."""
        assert self.span is not None
        if _are_functorch_transforms_active():
            raise self.refusal("a layer within vmap, grad or another transform of torch.func")
        if parts.ndim != DIMS or parts.shape[POSITIONS] != self.span.whole:
            raise self.refusal(
                f"a row-parallel Linear in {name!r} that gives activations of shape "
                f"{tuple(parts.shape)}, for a sequence of {self.span.whole} positions"
            )
        found: Tensor = _OwnSum.apply(self, parts)  # type: ignore[no-untyped-call]
        return found

    def scatter(self, whole: Tensor) -> Tensor:
        """The sum over the ranks of (n, t, f), this rank's positions of it. No gradient."""
        sizes = part_sizes(whole.shape[POSITIONS], self.comm.size)
        rows = whole.movedim(POSITIONS, 0)
        padded = rows.new_zeros(self.comm.size * sizes[0], *rows.shape[1:])
        padded[: len(rows)] = rows
        own = padded.new_empty(sizes[0], *rows.shape[1:])
        if self.kind == "gradients":
            self.gathered += padded.nbytes
        self.comm.reduce_scatter(own, padded, self.kind).wait()
        return own[: sizes[self.comm.rank]].movedim(0, POSITIONS).contiguous()

    def sum_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of these weights over the ranks, a message for each type of number.

        Of those that lie in parts on other axes, too, this rank's part, as ranks of this axis have
        the same one.
        """
        found: list[Tensor] = []
        for weight in weights:
            if weight.grad is not None:
                weight.grad = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                found.append(local(weight.grad))
        some = [grad for grad in found if grad.numel()]
        for kind in dict.fromkeys(grad.dtype for grad in some):
            grads = [grad for grad in some if grad.dtype == kind]
            flat = torch.cat([grad.flatten() for grad in grads]).to(self.comm.device)
            totals = self.sum_(flat).split([grad.numel() for grad in grads])
            for grad, total in zip(grads, totals, strict=True):
                grad.copy_(total.view_as(grad))


class AllRows:
    """The positions of all ranks as the input of columns, which keep this rank's own.

    Backward gathers them once more for all columns, where one of them needs the gradient of its
    weight.
    """

    def __init__(self, exchange: ScatteredExchange, own: Tensor, length: int) -> None:
        device = own.device.type
        if torch.is_autocast_enabled(device) and own.dtype == torch.float32:
            own = own.to(torch.get_autocast_dtype(device))  # what is sent is what is multiplied
        self.own = own
        self.again = _Again(exchange, length)
        self.whole = _AllRows.apply(self.again, own)  # type: ignore[no-untyped-call]

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of the positions of all ranks."""
        kind = self.own.dtype
        bias = None if bias is None else bias.to(kind)
        found: Tensor = _Linear.apply(self.again, self.own, self.whole, weight.to(kind), bias)  # type: ignore[no-untyped-call]
        return found


class _Again:
    """What was gathered once, and is gathered again when backward needs it; `users` columns do."""

    def __init__(self, exchange: ScatteredExchange, length: int) -> None:
        self.exchange, self.length = exchange, length
        self.users, self.whole = 0, cast("Tensor | None", None)

    def gathered(self, own: Tensor) -> Tensor:
        return self.exchange.all(own, POSITIONS, self.length)

    def gathered_once(self, own: Tensor) -> Tensor:
        """For all columns; for each by itself where its gradient is differentiated, too."""
        if torch.is_grad_enabled():
            found: Tensor = _AllRows.apply(self, own)  # type: ignore[no-untyped-call]
            return found
        if self.whole is None:
            self.whole = self.gathered(own)
        return self.whole


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: _Again, own: Tensor) -> Tensor:
        ctx.again = again
        return again.gathered(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        exchange = ctx.again.exchange
        if torch.is_grad_enabled():
            return None, _OwnSum.apply(exchange, gradient)  # type: ignore[no-untyped-call]
        return None, exchange.scatter(gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, again: _Again, own: Tensor, whole: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.again = again
        again.users += 1
        ctx.save_for_backward(own, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        own, weight = ctx.saved_tensors
        again, (_, _, of_whole, of_weight, of_bias) = ctx.again, ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        found: list[Tensor | None] = [None, None, None]
        if of_whole:
            found[0] = gradient @ weight
        if of_weight:
            found[1] = flat.t() @ again.gathered_once(own).flatten(0, -2)
        if of_bias:
            found[2] = flat.sum(0)
        again.users -= 1
        if again.users <= 0:
            again.whole = None
        return None, None, *found


class _OwnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: ScatteredExchange, parts: Tensor) -> Tensor:
        ctx.exchange, ctx.length = exchange, parts.shape[POSITIONS]
        return exchange.scatter(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            again = _Again(ctx.exchange, ctx.length)
            return None, _AllRows.apply(again, gradient)  # type: ignore[no-untyped-call]
        return None, ctx.exchange.all(gradient, POSITIONS, ctx.length)
