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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.autograd.function import once_differentiable

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

        def transposed(gradient: Tensor) -> Tensor:
            copy = gradient.clone(memory_format=torch.contiguous_format)
            return (self.summed if torch.is_grad_enabled() else self.sum_)(copy)

        return applied(LinearMap(_view, transposed, _view, self.copied), input)

    def summed(self, part: Tensor) -> Tensor:
        """The sum over the ranks, in place: no one else may use `part`."""
        if _are_functorch_transforms_active():
            return self._summed_anew(part)  # they support no in-place writes

        def transposed(gradient: Tensor) -> Tensor:
            return self.copied(gradient) if torch.is_grad_enabled() else gradient

        anew = self._summed_anew
        return applied(LinearMap(lambda t: self.sum_(t.contiguous()), transposed, anew, anew), part)

    def _summed_anew(self, part: Tensor) -> Tensor:
        """The sum in new memory."""

        def sum_anew(part: Tensor) -> Tensor:
            return self.sum_(part.clone(memory_format=torch.contiguous_format))

        anew = self._summed_anew
        return applied(LinearMap(sum_anew, self.copied, anew, anew), part)

    def copied_leaves(self, input: Tensor) -> tuple[Tensor, ...]:
        """The input once for each leaf; backward adds the gradients along the tree."""

        def copies(input: Tensor) -> tuple[Tensor, ...]:
            return tuple(input.view_as(input) for _ in range(self.leaves))

        def transposed(*gradients: Tensor) -> Tensor:
            return (self.summed_leaves if torch.is_grad_enabled() else self.tree_sum)(gradients)

        how = LinearMap(copies, transposed, copies, self.copied_leaves)
        return tuple(_Applied.apply(how, input))  # type: ignore[no-untyped-call]

    def summed_leaves(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of the leaves of all ranks, along the tree."""

        def transposed(gradient: Tensor) -> tuple[Tensor, ...]:
            gradient = gradient.contiguous()
            if torch.is_grad_enabled():
                return self.copied_leaves(gradient)
            return (gradient,) * self.leaves

        def again(*parts: Tensor) -> Tensor:
            return self.summed_leaves(parts)

        return applied(
            LinearMap(lambda *parts: self.tree_sum(parts), transposed, again, again), *parts
        )

    def whole(self, part: Tensor, along: int | Along, size: int) -> Tensor:
        """The parts of all ranks, concatenated along a dimension."""

        def transposed(gradient: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                return self.own_part(gradient, along)
            return self.local_part(gradient, along).contiguous()

        how = LinearMap(
            lambda part: self.all(part, along, size),
            transposed,
            lambda part: self.whole(part, along, size),
            lambda part: self.whole(part, _behind_batch(along), size),
        )
        return applied(how, part)

    def own_part(self, whole: Tensor, along: int | Along) -> Tensor:
        """This rank's part of a tensor that all ranks have."""
        size = whole.shape[along.dim if isinstance(along, Along) else along]

        def transposed(gradient: Tensor) -> Tensor:
            return (self.whole if torch.is_grad_enabled() else self.all)(gradient, along, size)

        how = LinearMap(
            lambda whole: self.local_part(whole, along).contiguous(),
            transposed,
            lambda whole: self.own_part(whole, along),
            lambda whole: self.own_part(whole, _behind_batch(along)),
        )
        return applied(how, whole)


@dataclass(frozen=True)
class LinearMap:
    """A linear function of tensors, to be differentiated.

    `run` computes it, and `transposed` the gradients of its inputs. `again` is the whole function,
    of tangents, and `batched` that of tensors with one dimension more in front.
    """

    run: Callable[..., Any]
    transposed: Callable[..., Any]
    again: Callable[..., Any]
    batched: Callable[..., Any]


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(how: LinearMap, *tensors: Tensor) -> Any:
        return how.run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.how = inputs[0]
        if any(output is tensor for tensor in inputs[1:]):
            ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = ctx.how.transposed(*gradients)
        return None, *(back if isinstance(back, tuple) else (back,))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Any:
        return ctx.how.again(*tangents)

    @staticmethod
    def vmap(info: Any, dims: Any, how: LinearMap, *tensors: Tensor) -> Any:
        output = how.batched(*_batched(info, dims[1:], tensors))
        return output, (0,) * len(output) if isinstance(output, tuple) else 0


def applied(how: LinearMap, *tensors: Tensor) -> Tensor:
    """The value of a linear function, which can be differentiated any number of times."""
    output: Tensor = _Applied.apply(how, *tensors)  # type: ignore[no-untyped-call]
    return output


def _view(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


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


def by_pair(
    run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], tensor: Tensor
) -> Tensor:
    """`run(tensor)`, whose gradient is that of `back`; it is differentiable once."""
    output: Tensor = _ByPair.apply(run, back, tensor)  # type: ignore[no-untyped-call]
    return output


class _ByPair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
        tensor: Tensor,
    ) -> Tensor:
        ctx.back = back
        return run(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.back(gradient)
