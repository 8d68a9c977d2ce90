"""Dropout whose mask belongs to the shard: drawn by (seed, step, shard, layer, call)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from allranks.torch.model.layers import OfShard, Scope
from allranks.training.order import random_key

DROPOUTS: dict[type[nn.Module], int] = {
    nn.Dropout: 0,  # dimensions after (sample, channel) that share one draw
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}
TOKEN_DIMS = 3  # (sample, position, feature)


class Part(NamedTuple):
    """What a tensor is of a larger one: along `dim`, from `start` on, of `whole` elements."""

    dim: int
    start: int
    whole: int


class ShardDropout(OfShard, nn.Module):
    """Dropout whose mask belongs to the shard. Made from a dropout layer by `swap_layers`.

    `part_of` says what a rank sees of an activation that ranks hold parts of.
    """

    shared_dims: int
    p: float
    part_of: Callable[[Tensor], Part | None] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.scope.pieces):
            return super().forward(input)  # type: ignore[no-any-return]
        shape = list(input.shape)
        part = None if self.part_of is None else self.part_of(input)
        if part is not None:
            shape[part.dim] = part.whole
        for dim in range(len(shape) - self.shared_dims, len(shape)):
            shape[dim] = 1
        return dropped(self.scope, self.index, input, self.p, shape, part)


def dropped(
    scope: Scope,
    index: int,
    input: Tensor,
    rate: float,
    shape: list[int],
    part: Part | None = None,
) -> Tensor:
    """`input` without some of it, drawn for each shard; `shape` is that of the mask.

    Where `input` is a `part`, the mask is drawn for the whole of it.
    """
    if rate == 0:
        return input
    call = scope.calls.get(index, 0)
    scope.calls[index] = call + 1
    rows = scope.rows("Dropout", input)
    draws = torch.empty(shape, device=input.device)
    generator = scope.generator_on(input.device)
    is_whole = list(input.shape)
    if part is not None:
        is_whole[part.dim] = part.whole
    positions = len(shape) == TOKEN_DIMS and shape == is_whole
    for piece, count, some in zip(scope.pieces, rows, draws.split(rows), strict=True):
        generator.manual_seed(random_key(scope.seed, scope.step, piece.shard, index, call))
        if piece.samples == piece.shard_size and not positions:
            some.uniform_(generator=generator)
            continue
        # part of a shard: draw for the whole shard, take the rows of this piece
        per_sample = count // piece.samples
        size = [piece.shard_size * per_sample, *shape[1:]]
        if positions:  # (position, row, feature): more padding adds draws at the end
            size[:2] = size[1::-1]
        whole = torch.empty(size, device=some.device).uniform_(generator=generator)
        if positions:
            whole = whole.transpose(0, 1)
        some.copy_(whole[piece.start * per_sample : piece.stop * per_sample])
    if part is not None:
        draws = draws.narrow(part.dim, part.start, input.shape[part.dim])
    keep = draws.ge(rate).to(input.dtype)
    return input * keep.div_(1 - rate) if rate < 1 else input * keep
