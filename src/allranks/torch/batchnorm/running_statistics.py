"""The running statistics of all BatchNorm layers, updated at once from the moments of a step.

`moments` are those of all layers, one after the other: weight, weighted mean, weighted variance.
Nothing is read on the host. A layer that no shard had moments for keeps what it has. No
communication: every rank has the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allranks.torch.model.layers import ShardNorm


class RunningStatistics:
    """Those of `norms`, whose moments stand in this order in a tensor on the device of `like`."""

    def __init__(self, norms: Sequence[ShardNorm], like: Tensor) -> None:
        self.norms, self.like = norms, like
        self.sizes = [n for norm in norms for n in (1, norm.num_features, norm.num_features)]
        own = torch.tensor([1 + 2 * norm.num_features for norm in norms], dtype=torch.long)
        self.layer = torch.arange(len(norms)).repeat_interleave(own).to(like.device)
        self.weights = (own.cumsum(0) - own).to(like.device)
        self._asked: list[float | None] = []

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """One update of all layers that any shard was normalised by in this step."""
        if not self.norms:
            return
        weights = moments[self.weights]
        had_some = weights > 0
        statistics = [norm.running_statistics() for norm in self.norms]
        counted = [number for number, own in enumerate(statistics) if len(own) > 2]
        counts = [statistics[number][2] for number in counted]
        if counts:
            more = had_some.to(counts[0].dtype)
            by_layer = more.unbind()
            torch._foreach_add_(counts, [_to(by_layer[n], statistics[n][2]) for n in counted])
        rates = self._rates(statistics) * had_some
        ones = torch.ones_like(weights)
        found = moments / torch.where(had_some, weights, ones)[self.layer]
        new, rate = (x.split(self.sizes) for x in (found, rates[self.layer]))
        running = [tensor for own in statistics for tensor in own[:2]]
        places = [at for at in range(len(self.sizes)) if at % 3]
        torch._foreach_lerp_(
            running,
            [_to(new[at], tensor) for at, tensor in zip(places, running, strict=True)],
            [_to(rate[at], tensor) for at, tensor in zip(places, running, strict=True)],
        )

    def _rates(self, statistics: list[list[Tensor]]) -> Tensor:
        """How far each layer goes: its momentum, or one over its updates, this one included."""
        asked = [norm.running_rate() for norm in self.norms]
        if asked != self._asked:
            self._asked = asked
            self._given = self.like.new_tensor([rate or 0.0 for rate in asked])
            self._cumulative = torch.tensor(
                [rate is None for rate in asked], device=self.like.device
            )
        if None not in asked:
            return self._given
        done = torch.stack([_to(own[-1].reshape(-1)[0], self.like) for own in statistics])
        return torch.where(self._cumulative, done.clamp(min=1).reciprocal(), self._given)


def _to(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like, non_blocking=True)
