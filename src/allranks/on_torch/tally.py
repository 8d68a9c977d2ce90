"""The tally: what a step reports, as numbers that are summed with the last bucket of gradients.

    [ loss sum | weight, samples, used? per parameter | BatchNorm: weight, mean, variance per layer ]

It rides on the gradients, so that no step sends a message for bookkeeping: every rank knows after
the step the loss and the weight of the whole global batch, whether anybody had a sample, which
parameters any rank used, and the moments for the running statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from allranks.on_torch.layers import Scope, shard_norms

CACHED_COUNTS = 64


@dataclass(frozen=True)
class Totals:
    """What the tally says once it is summed over all ranks."""

    loss: float
    weight: float
    samples: int
    unused: tuple[int, ...]


class TallyLayout:
    """Where each number of the tally stands, for one model and its trainable parameters."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        self.like = parameters[0]
        self.parameters = len(parameters)
        self.counts = slice(1, 3 + len(parameters))
        self.norms = shard_norms(model)
        self.moments = []
        self.size = self.counts.stop
        for norm in self.norms:
            start, self.size = self.size, self.size + 1 + 2 * norm.num_features
            self.moments.append(slice(start, self.size))
        self._cache: dict[tuple[float, int], Tensor] = {}

    def tally(self, tensor: Tensor | None = None) -> Tally:
        """A tally over `tensor`, (size,); a new one of zeros if there is none."""
        if tensor is None:
            tensor = self.like.new_zeros(self.size, requires_grad=False)
        return Tally(self, tensor)

    def counts_of(self, weight: float, samples: int, used: list[bool]) -> Tensor:
        """Weight, samples and flags as a tensor; those of a usual step are made once."""
        if not all(used):
            return self.like.new_tensor([weight, samples, *used])
        found = self._cache.get((weight, samples))
        if found is None:
            found = self.like.new_tensor([weight, samples, *used])
            if len(self._cache) < CACHED_COUNTS:
                self._cache[weight, samples] = found
        return found


class Tally:
    """One tally: filled micro-batch by micro-batch, closed with its leaf, read once it is summed."""

    def __init__(self, layout: TallyLayout, tensor: Tensor) -> None:
        self.layout, self.tensor = layout, tensor
        self._loss, self._counts = tensor[0], tensor[layout.counts]
        self._head = tensor[: layout.counts.stop]
        self._weight, self._samples = 0.0, 0

    def add(self, loss: Tensor, weight: float, samples: int, scope: Scope) -> None:
        """Add what a micro-batch gave, with the moments that its forward pass left in `scope`."""
        self._loss.add_(loss)
        self._weight += weight
        self._samples += samples
        for norm, where in zip(self.layout.norms, self.layout.moments, strict=True):
            found = scope.moments.pop(norm.index, None)
            if found is not None:
                self.tensor[where].add_(found)

    def close(self, used: list[bool]) -> None:
        """The leaf is complete; `used` says which parameters got a gradient."""
        self._counts.add_(self.layout.counts_of(self._weight, self._samples, used))
        self._weight, self._samples = 0.0, 0

    def totals(self) -> Totals:
        """Read the sums."""
        loss, weight, samples, *flags = self._head.tolist()
        unused = () if min(flags) > 0 else tuple(i for i, flag in enumerate(flags) if not flag)
        return Totals(loss, weight, int(samples), unused)

    def update_norms(self) -> None:
        """One update of all running statistics, from the moments of all shards."""
        for norm, where in zip(self.layout.norms, self.layout.moments, strict=True):
            norm.update_running(self.tensor[where])
