"""Sequence parallelism: between tensor-parallel regions a rank has some positions of each sequence.

    forward                                  backward
    first block: this rank's positions       all-gather of the gradient
    column of a region: all-gather           reduce-scatter of the gradient; all-gather once more
    row of a region: reduce-scatter          all-gather of the gradient
    last block: all-gather                   this rank's positions of the gradient

An all-reduce is a reduce-scatter and an all-gather, so a region sends as much as without sequence
parallelism, and once more the input, which its columns gather again in backward. In the blocks,
weights that are not cut see some positions, and their gradients are summed over the ranks after
backward. Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.nn import functional as F

from allranks.torch.comm.comm import Comm
from allranks.torch.model.layers import own_kind
from allranks.torch.parallel.context.exchange import POSITIONS, SequenceExchange, Span
from allranks.torch.parallel.tensor.exchange import LinearMap, applied
from allranks.torch.strategies.layout import part_sizes

DIMS = 3  # (sample, position, feature)


class ScatteredExchange(SequenceExchange):
    """The collectives of the tensor axis. `span` is the cut of the sequence within a block.

    `cut` returns the current ids of cut weights: `fully_shard` replaces them while they are
    gathered.
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
        """This rank's positions of a full tensor; backward gathers."""
        return self.own_part(whole, dim)

    def whole_rows(self, local: Tensor, span: Span, *, is_last: bool) -> Tensor:
        """Gather the positions of all ranks."""
        return self.whole(local, POSITIONS, span.whole)

    def is_summed(self, weight: nn.Parameter) -> bool:
        return id(weight) not in self.cut()

    def lies_along(self, layer: nn.Module, activations: Tensor) -> bool:
        """Whether the input of a layer is this rank's positions of a sequence.

        Raises `RequestError` if this differs from the same call in the first check.
        """
        if self.span is None:
            return False
        shape, span = activations.shape, self.span
        is_along = activations.ndim == DIMS and shape[POSITIONS] == span.local
        call = id(layer), self._calls[id(layer)]
        self._calls[id(layer)] += 1
        if self._is_proving:
            self._known[call] = is_along
        elif is_along != self._known.get(call, is_along):
            raise self.refusal(
                f"a {own_kind(layer).__name__} that is given a tensor of shape {tuple(shape)}, "
                f"where a rank has {span.local} of {span.whole} positions: in the first pass what "
                f"it was given was {'not ' * is_along}the positions of a rank"
            )
        return is_along

    def rows_of_all(self, part: Tensor) -> AllRows:
        """Gather the positions of all ranks for columns; one all-gather."""
        assert self.span is not None
        if _are_functorch_transforms_active():
            self.refuse_transform()
        return AllRows(self, part, self.span.whole)

    def own_sum(self, parts: Tensor, name: str) -> Tensor:
        """This rank's positions of the sum over the ranks; one reduce-scatter."""
        assert self.span is not None
        if _are_functorch_transforms_active():
            self.refuse_transform()
        if parts.ndim != DIMS or parts.shape[POSITIONS] != self.span.whole:
            raise self.refusal(
                f"a row-parallel Linear in {name!r} that gives activations of shape "
                f"{tuple(parts.shape)}, for a sequence of {self.span.whole} positions"
            )
        return self.summed_positions(parts)

    def refuse_transform(self, *tensors: Tensor) -> NoReturn:
        raise self.refusal("a layer within vmap, grad or another transform of torch.func")

    def summed_positions(self, parts: Tensor) -> Tensor:
        """This rank's positions of the sum over the ranks; backward gathers."""
        length = parts.shape[POSITIONS]

        def transposed(gradient: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                return self.all_positions(gradient, length)
            return self.all(gradient, POSITIONS, length)

        again, batched = self.summed_positions, self.refuse_transform
        return applied(LinearMap(self.scatter, transposed, again, batched), parts)

    def all_positions(self, part: Tensor, length: int) -> Tensor:
        """The positions of all ranks; backward sums this rank's over the ranks."""

        def transposed(gradient: Tensor) -> Tensor:
            return (self.summed_positions if torch.is_grad_enabled() else self.scatter)(gradient)

        def again(part: Tensor) -> Tensor:
            return self.all_positions(part, length)

        run = partial(self.all, along=POSITIONS, size=length)
        return applied(LinearMap(run, transposed, again, self.refuse_transform), part)

    def scatter(self, whole: Tensor) -> Tensor:
        """The sum over the ranks of (n, t, f), this rank's positions of it. No gradient."""
        sizes = part_sizes(whole.shape[POSITIONS], self.comm.size)
        rows = whole.movedim(POSITIONS, 0)
        padded = rows.new_zeros(self.comm.size * sizes[0], *rows.shape[1:])
        padded[: len(rows)] = rows
        part = padded.new_empty(sizes[0], *rows.shape[1:])
        if self.kind == "gradients":
            self.gathered += padded.nbytes
        self.comm.reduce_scatter(part, padded, self.kind).wait()
        return part[: sizes[self.comm.rank]].movedim(0, POSITIONS).contiguous()


class AllRows:
    """The positions of all ranks as the input of columns, which save only this rank's part.

    Backward gathers them once more for all columns, if a column needs the gradient of its weight.
    """

    def __init__(self, exchange: ScatteredExchange, part: Tensor, length: int) -> None:
        device = part.device.type
        if torch.is_autocast_enabled(device) and part.dtype == torch.float32:
            part = part.to(torch.get_autocast_dtype(device))  # cast before it is sent
        self.part = part
        self.again = _Again(exchange, length)
        self.whole = exchange.all_positions(part, length)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of the positions of all ranks."""
        kind = self.part.dtype
        bias = None if bias is None else bias.to(kind)
        output: Tensor = _Linear.apply(self.again, self.part, self.whole, weight.to(kind), bias)  # type: ignore[no-untyped-call]
        return output


class _Again:
    """Gathers the input again when backward needs it; `users` columns still need it."""

    def __init__(self, exchange: ScatteredExchange, length: int) -> None:
        self.exchange, self.length = exchange, length
        self.users, self.whole = 0, cast("Tensor | None", None)

    def gathered_once(self, part: Tensor) -> Tensor:
        """Gather once for all columns; for each separately if gradients are differentiated too."""
        if torch.is_grad_enabled():
            return self.exchange.all_positions(part, self.length)
        if self.whole is None:
            self.whole = self.exchange.all(part, POSITIONS, self.length)
        return self.whole


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, again: _Again, part: Tensor, whole: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.again = again
        again.users += 1
        ctx.save_for_backward(part, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        part, weight = ctx.saved_tensors
        again, (_, _, of_whole, of_weight, of_bias) = ctx.again, ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        grads: list[Tensor | None] = [None, None, None]
        if of_whole:
            grads[0] = gradient @ weight
        if of_weight:
            grads[1] = flat.t() @ again.gathered_once(part).flatten(0, -2)
        if of_bias:
            grads[2] = flat.sum(0)
        again.users -= 1
        if again.users <= 0:
            again.whole = None
        return None, None, *grads
