"""Dropout whose mask belongs to the shard: drawn by (seed, step, shard, layer, call, element)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from allranks.torch.model.layers import OfShard, Scope
from allranks.torch.random import keyed_rng as keyed
from allranks.torch.random.counter import Words

DROPOUTS: dict[type[nn.Module], int] = {
    nn.Dropout: 0,  # dimensions after (sample, channel) that share one draw
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}


flagged: Any = torch.ops.aten.native_dropout_backward.default  # tensor * flags * scale


class TensorPart(NamedTuple):
    """What a tensor is of a larger one: along `dim`, from `start` on, of `whole` elements.

    Or, one behind the other, several `stretches` of it: (start, length) of each.
    """

    dim: int
    start: int
    whole: int
    stretches: tuple[tuple[int, int], ...] = ()


class ShardDropout(OfShard, nn.Module):
    """Dropout whose mask belongs to the shard. Made from a dropout layer by `swap_layers`.

    `part_of` says what a rank sees of an activation that ranks hold parts of. A compiled graph
    reads the number of the layer from `slot`.
    """

    shared_dims: int
    p: float
    slot: Tensor
    part_of: Callable[[Tensor], TensorPart | None] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.p == 0:  # nothing to draw, and nothing that a compiler would have to know of
            return input
        if not (self.training and self.scope.pieces):
            return super().forward(input)  # type: ignore[no-any-return]
        shape = list(input.shape)
        part = None if self.part_of is None else self.part_of(input)
        for dim in range(len(shape) - self.shared_dims, len(shape)):
            shape[dim] = 1
        if torch.compiler.is_compiling():
            return without(input, self.p, keyed.row_keys(input, self.slot), shape, part)
        return dropped(self.scope, self.index, input, self.p, shape, part)


def dropped(
    scope: Scope,
    index: int,
    input: Tensor,
    rate: float,
    shape: Sequence[int],
    part: TensorPart | None = None,
) -> Tensor:
    """`input` without some of it, drawn for each sample; `shape` is that of the mask.

    Where `input` is a `part`, what is drawn for it is what the whole has there.
    """
    if rate == 0:
        return input
    keys = scope.keys.of_rows(index, input.shape, "Dropout")
    return without(input, rate, keys, shape, part)


def without(
    input: Tensor, rate: float, keys: Words | Tensor, shape: Sequence[int], part: TensorPart | None
) -> Tensor:
    """`input` times a mask of this shape: a row of it for each key."""
    if part is not None and len(part.stretches) > 1:
        ends = itertools.accumulate(length for _, length in part.stretches)
        pieces = [
            without(
                input.narrow(part.dim, end - length, length),
                rate,
                keys,
                [length if dim == part.dim else size for dim, size in enumerate(shape)],
                TensorPart(part.dim, start, part.whole),
            )
            for end, (start, length) in zip(ends, part.stretches, strict=True)
            if length
        ]
        return torch.cat(pieces, part.dim)
    starts = [0] * len(shape)
    if part is not None:
        starts[part.dim] = part.start
    if _takes_flags(input):
        flags = keyed.drawn_flags(keys, shape[1:], starts[1:], keyed.threshold(rate), input)
        if flags is not None:
            return scaled(input, flags.expand_as(input), keyed.scale_of(rate, input.dtype))
    return input * keyed.drawn(keys, shape[1:], starts[1:], keyed.mask_of(rate, input.dtype), input)


def _takes_flags(input: Tensor) -> bool:
    """Whether what `scaled` does is the product with a mask: no transform looks into it."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or not input.is_floating_point()
    )


class _Scaled(torch.autograd.Function):
    """Keeps flags of one byte for backward, where a product would keep a mask of its own type."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, flags: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(flags)
        ctx.scale = scale
        output: Tensor = flagged(input, flags, scale)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (flags,) = ctx.saved_tensors
        return flagged(gradients[0], flags, ctx.scale), None, None


def scaled(input: Tensor, flags: Tensor, scale: float) -> Tensor:
    """`input` times `scale` where a flag is, times 0 elsewhere; a kernel forward and backward."""
    apply: Any = _Scaled.apply
    output: Tensor = apply(input, flags, scale)
    return output
