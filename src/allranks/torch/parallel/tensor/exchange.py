"""The collectives of the tensor axis, and what backward sends for each.

    forward                          backward
    nothing (`copied`)               all-reduce of the gradient
    all-reduce (`summed`)            nothing
    all-gather (`gathered`)          this rank's part of the gradient
    this rank's part (`own_part`)    all-gather of the gradient

Every rank of the axis runs the model on the same samples, so all make the same calls, and tensors
that are not cut are the same on all. Each function is the backward of another one, so all can be
differentiated any number of times, and transformed by `torch.func`. Shoeybi et al. 2019,
Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active

from allranks.torch.checkpoint.state import local
from allranks.torch.comm.comm import Comm
from allranks.torch.strategies.layout import Along, part_sizes


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of 2^k tensors along a binary tree: in pairs, then pairs of pairs, and so on."""
    sums = list(parts)
    while len(sums) > 1:
        sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


class TensorExchange:
    """The collectives of the axis. `reduced` and `gathered` are the bytes of full tensors that
    steps have all-reduced and all-gathered.

    While a pass `is_open`, user code sees cut weights in full. Messages are counted as `kind`. With
    `leaves` each rank has so many parts of every sum, which are added along one tree on any number
    of ranks.
    """

    def __init__(self, comm: Comm, leaves: int = 0) -> None:
        self.comm, self.leaves = comm, leaves
        self.is_open, self.kind = False, "control"
        self.reduced = self.gathered = 0
        self.weights: dict[Any, Tensor] = {}  # that user code has read in this pass
        self.refuses_parts = False  # of a weight that is cut over another axis too
        self.gathers_at_once = False  # if parts may be freed within a pass
        self._weights: dict[int, Tensor] | None = None

    @contextmanager
    def opened(self, kind: str) -> Iterator[None]:
        """Within, passes run through the model; their messages are of that kind."""
        before = self.is_open, self.kind
        self.is_open, self.kind = True, kind
        self.weights.clear()
        try:
            yield
        finally:
            self.is_open, self.kind = before
            self.weights.clear()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within, the engine reads the parts of this rank."""
        before, self.is_open = self.is_open, False
        try:
            yield
        finally:
            self.is_open = before

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Within, each weight is gathered only once."""
        self._weights = {}
        try:
            yield
        finally:
            self._weights = None

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a contiguous tensor over the ranks, in place."""
        if self.kind == "gradients":
            self.reduced += tensor.nbytes
        self.comm.all_reduce(tensor, self.kind).wait()
        return tensor

    def sum_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of these weights over the ranks, one message for each dtype.

        Of a weight that is also cut over other axes, it sums the local part, which is the same on
        all ranks of this axis.
        """
        local_grads: list[Tensor] = []
        for weight in weights:
            if weight.grad is not None:
                weight.grad = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                local_grads.append(local(weight.grad))
        some = [grad for grad in local_grads if grad.numel()]
        for kind in dict.fromkeys(grad.dtype for grad in some):
            grads = [grad for grad in some if grad.dtype == kind]
            flat = torch.cat([grad.flatten() for grad in grads]).to(self.comm.device)
            totals = self.sum_(flat).split([grad.numel() for grad in grads])
            for grad, total in zip(grads, totals, strict=True):
                grad.copy_(total.view_as(grad))

    def tree_sum(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of the leaves of all ranks: first of this rank, then of all ranks' sums."""
        subtotal = tree_sum(parts).contiguous()
        if self.comm.size == 1:
            return subtotal
        sums = subtotal.new_empty(self.comm.size * subtotal.numel())
        if self.kind == "gradients":
            self.gathered += sums.nbytes
        self.comm.all_gather(sums, subtotal.view(-1), self.kind).wait()
        return tree_sum(sums.view(self.comm.size, *subtotal.shape).unbind())

    def all(self, part: Tensor, along: int | Along, size: int) -> Tensor:
        """Gather the parts of all ranks along a dimension, which has `size` elements in full."""
        dim, runs = along if isinstance(along, Along) else (along, 1)
        if self.comm.size == 1:
            return part.clone(memory_format=torch.contiguous_format)
        if runs > 1:
            gathered = self.all(part.unflatten(dim, (runs, -1)), dim + 1, size // runs)
            return gathered.flatten(dim, dim + 1)
        sizes = part_sizes(size, self.comm.size)
        part = part.movedim(dim, 0)
        if part.shape[0] != sizes[self.comm.rank]:
            raise AssertionError(f"{part.shape[0]} of {size} on rank {self.comm.rank}: {sizes}")
        padded = part.new_zeros(sizes[0], *part.shape[1:])
        padded[: part.shape[0]] = part
        whole = padded.new_empty(self.comm.size * sizes[0], *padded.shape[1:])
        if self.kind == "gradients":
            self.gathered += whole.nbytes
        self.comm.all_gather(whole, padded, self.kind).wait()
        return whole[:size].movedim(0, dim).contiguous()

    def local_part(self, whole: Tensor, along: int | Along) -> Tensor:
        """This rank's part of a tensor; a view if there is one run."""
        along = along if isinstance(along, Along) else Along(along)
        return along.local_part(whole, self.comm.size, self.comm.rank)

    def copied(self, input: Tensor) -> Tensor:
        """The input of layers of which each rank computes a part."""
        return _call(_Copied, self, input)

    def summed(self, part: Tensor) -> Tensor:
        """The sum over the ranks, in place: no one else may use `part`."""
        if _are_functorch_transforms_active():
            return _call(_SummedAnew, self, part)  # they support no in-place writes
        return _call(_Summed, self, part)

    def copied_leaves(self, input: Tensor) -> tuple[Tensor, ...]:
        """The input once for each leaf; backward adds the gradients along the tree."""
        return tuple(_CopiedLeaves.apply(self, input))  # type: ignore[no-untyped-call]

    def summed_leaves(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of the leaves of all ranks, along the tree."""
        return _call(_SummedLeaves, self, *parts)

    def whole(self, part: Tensor, along: int | Along, size: int) -> Tensor:
        """The parts of all ranks, concatenated along a dimension."""
        return _call(_Gathered, self, part, along, size)

    def whole_weight(self, part: Tensor, along: Along, size: int) -> Tensor:
        """A full weight; within `remembered`, always the same tensor."""
        if self._weights is None:
            return self.whole(part, along, size)
        if id(part) not in self._weights:
            self._weights[id(part)] = self.whole(part, along, size)
        return self._weights[id(part)]

    def own_part(self, whole: Tensor, along: int | Along) -> Tensor:
        """This rank's part of a tensor that all ranks have."""
        return _call(_OwnPart, self, whole, along)


def _call(function: Any, *arguments: Any) -> Tensor:
    output: Tensor = function.apply(*arguments)
    return output


def _batched(info: Any, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the batch dimension of `vmap` in front."""
    pairs = zip(tensors, dims, strict=True)
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in pairs
    ]


def _behind_batch(along: int | Along) -> Along:
    """The same dimension of a tensor with another one in front."""
    dim, runs = along if isinstance(along, Along) else (along, 1)
    return Along(dim + (dim >= 0), runs)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(exchange: TensorExchange, input: Tensor) -> Tensor:
        return input.view_as(input)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.exchange = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        copy = gradient.clone(memory_format=torch.contiguous_format)
        return None, (ctx.exchange.summed if torch.is_grad_enabled() else ctx.exchange.sum_)(copy)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, dims: Any, exchange: TensorExchange, input: Tensor) -> tuple[Tensor, int]:
        return exchange.copied(*_batched(info, dims[1:], [input])), 0


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(exchange: TensorExchange, part: Tensor) -> Tensor:
        return exchange.sum_(part.contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.exchange = inputs[0]
        if output is inputs[1]:
            ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.copied(gradient) if torch.is_grad_enabled() else gradient


class _SummedAnew(torch.autograd.Function):
    """The sum in new memory."""

    @staticmethod
    def forward(exchange: TensorExchange, part: Tensor) -> Tensor:
        return exchange.sum_(part.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.exchange = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.copied(gradient)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:
        return _call(_SummedAnew, ctx.exchange, tangent)

    @staticmethod
    def vmap(info: Any, dims: Any, exchange: TensorExchange, part: Tensor) -> tuple[Tensor, int]:
        return _call(_SummedAnew, exchange, *_batched(info, dims[1:], [part])), 0


class _CopiedLeaves(torch.autograd.Function):
    @staticmethod
    def forward(exchange: TensorExchange, input: Tensor) -> tuple[Tensor, ...]:
        return tuple(input.view_as(input) for _ in range(exchange.leaves))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.exchange = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return None, ctx.exchange.summed_leaves(gradients)
        return None, ctx.exchange.tree_sum(gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> tuple[Tensor, ...]:
        return tuple(tangent.view_as(tangent) for _ in range(ctx.exchange.leaves))

    @staticmethod
    def vmap(info: Any, dims: Any, exchange: TensorExchange, input: Tensor) -> Any:
        return exchange.copied_leaves(*_batched(info, dims[1:], [input])), (0,) * exchange.leaves


class _SummedLeaves(torch.autograd.Function):
    @staticmethod
    def forward(exchange: TensorExchange, *parts: Tensor) -> Tensor:
        return exchange.tree_sum(parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.exchange = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradient = gradient.contiguous()
        if torch.is_grad_enabled():
            return None, *ctx.exchange.copied_leaves(gradient)
        return None, *[gradient] * ctx.exchange.leaves

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor:
        return cast("TensorExchange", ctx.exchange).summed_leaves(tangents)

    @staticmethod
    def vmap(info: Any, dims: Any, exchange: TensorExchange, *parts: Tensor) -> tuple[Tensor, int]:
        return exchange.summed_leaves(_batched(info, dims[1:], parts)), 0


class Joined(torch.autograd.Function):
    """Concatenates leaves of features; in backward each gets a gradient in memory of its own.

    The rounding of a product depends on the shapes and strides of its inputs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*parts: Tensor) -> Tensor:
        return torch.cat(parts, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        parts = gradient.chunk(ctx.count, -1)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return torch.cat(tangents, -1)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(exchange: TensorExchange, part: Tensor, along: int | Along, size: int) -> Tensor:
        return exchange.all(part, along, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.exchange, _, ctx.along, ctx.size = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return None, ctx.exchange.own_part(gradient, ctx.along), None, None
        return None, ctx.exchange.local_part(gradient, ctx.along).contiguous(), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *unused: None) -> Tensor:
        return cast("TensorExchange", ctx.exchange).whole(tangent, ctx.along, ctx.size)

    @staticmethod
    def vmap(
        info: Any, dims: Any, exchange: TensorExchange, part: Tensor, along: int | Along, size: int
    ) -> tuple[Tensor, int]:
        (part,) = _batched(info, dims[1:2], [part])
        return exchange.whole(part, _behind_batch(along), size), 0


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(exchange: TensorExchange, whole: Tensor, along: int | Along) -> Tensor:
        return exchange.local_part(whole, along).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.exchange, whole, ctx.along = inputs
        ctx.size = whole.shape[ctx.along.dim if isinstance(ctx.along, Along) else ctx.along]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gather = ctx.exchange.whole if torch.is_grad_enabled() else ctx.exchange.all
        return None, gather(gradient, ctx.along, ctx.size), None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *unused: None) -> Tensor:
        return cast("TensorExchange", ctx.exchange).own_part(tangent, ctx.along)

    @staticmethod
    def vmap(
        info: Any, dims: Any, exchange: TensorExchange, whole: Tensor, along: int | Along
    ) -> tuple[Tensor, int]:
        (whole,) = _batched(info, dims[1:2], [whole])
        return exchange.own_part(whole, _behind_batch(along)), 0
