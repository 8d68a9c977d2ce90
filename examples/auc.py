"""A metric that is no mean: the area under the ROC curve, from counts that ranks can add.

    allranks train auc.py --ranks 2

A metric is a pair (sum, count). The scores are counted in bins, of each class by itself; counts add
over batches and ranks, and `finalize` makes the area of them. Scores of one bin count as ties, so
it is exact but for those: with 1,000 bins that is the third digit or later.
"""

from dataclasses import dataclass
from typing import Any

import torch

from allranks.programs.digits import Digits

BINS = 1000


@dataclass(kw_only=True)
class EvenOrOdd(Digits):
    """How well the score tells odd digits from even ones."""

    epochs: int = 1

    def metrics(self, output: torch.Tensor, batch: Any) -> dict[str, Any]:
        odd = batch[1] % 2 == 1
        bins = (output.softmax(dim=1)[:, 1::2].sum(dim=1).clamp(0, 1) * (BINS - 1)).long()
        counts = {
            f"{name}/{number}": (count, len(bins))
            for name, chosen in (("odd", odd), ("even", ~odd))
            for number, count in enumerate(torch.bincount(bins[chosen], minlength=BINS).tolist())
        }
        return {**super().metrics(output, batch), **counts}

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        odd, even = (
            torch.tensor([metrics.pop(f"{name}/{n}", 0.0) for n in range(BINS)]).double()
            for name in ("odd", "even")
        )
        below = even.cumsum(0) - even / 2  # even ones with a lower score, and half of the ties
        return {**metrics, "auc": float((odd * below).sum() / (odd.sum() * even.sum()))}
