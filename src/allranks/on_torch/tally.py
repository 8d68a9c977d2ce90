"""The tally: what a step reports, as numbers that are summed with the last bucket of gradients.

    [ loss sum, weight, samples | used? per parameter | BatchNorm: weight, mean, variance per layer ]

It rides on the gradients, so that no step sends a message for bookkeeping: every rank knows after
the step the loss and the weight of the whole global batch, whether anybody had a sample, which
parameters any rank used, and the moments for the running statistics.
"""

from __future__ import annotations

from torch import Tensor, nn

from allranks.on_torch.layers import Scope, ShardBatchNorm, shard_norms

HEADER = 3


class TallyLayout:
    """Where each number of the tally stands, for one model and its trainable parameters."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.norms: list[tuple[ShardBatchNorm, slice]] = []
        end = HEADER + len(parameters)
        for norm in shard_norms(model):
            start, end = end, end + 1 + 2 * norm.num_features
            self.norms.append((norm, slice(start, end)))
        self.size = end

    def write(
        self, tally: Tensor, loss: Tensor | None, weight: float, samples: int, scope: Scope
    ) -> None:
        """Add what this rank found to `tally` (but which parameters were used)."""
        if loss is not None:
            tally[0] += loss
        tally[1] += weight
        tally[2] += samples
        for norm, where in self.norms:
            found = scope.moments.pop(norm.index, None)
            if found is not None:
                tally[where] += found

    def mark_used(self, tally: Tensor, used: list[bool]) -> None:
        """Add which parameters got a gradient."""
        if all(used):
            tally[HEADER : HEADER + len(used)] += 1
        else:
            tally[HEADER : HEADER + len(used)] += tally.new_tensor(used)

    def unused(self, tally: Tensor) -> list[nn.Parameter]:
        """The parameters that no rank used in this step."""
        flags = tally[HEADER : HEADER + len(self.parameters)]
        if bool((flags > 0).all()):
            return []
        return [p for p, flag in zip(self.parameters, flags.tolist(), strict=True) if not flag]

    def update_norms(self, tally: Tensor) -> None:
        """One update of all running statistics, from the moments of all shards."""
        for norm, where in self.norms:
            norm.update_running(tally[where])
