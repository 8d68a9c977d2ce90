"""Wide & Deep: a linear model of sparse features and their pairs, added to a network of embeddings.

Cheng et al. 2016, arXiv 1606.07792. All categories share one table for each side, one row for each
value of a category: a lookup is one request, and the tables hold nearly all of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn


class WideAndDeep(nn.Module):
    """Counts (n, counts) and categories (n, features) to a score (n,): the log-odds of a click.

    `sizes` are the numbers of values of the features, `pairs` those whose products the wide side
    has too, in `crossed` rows, by a hash. Tables have sparse gradients. `dim`: of an embedding.
    """

    first: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        counts: int,
        *,
        dim: int,
        width: int,
        pairs: Sequence[tuple[int, int]] = (),
        crossed: int = 1,
    ) -> None:
        super().__init__()
        total = sum(sizes)
        self.pairs, self.crossed, self.total = tuple(pairs), crossed, total
        self.register_buffer("first", torch.tensor([0, *accumulate(sizes)][:-1]), persistent=False)
        rows = total + (crossed if self.pairs else 0)
        self.wide = nn.EmbeddingBag(rows, 1, mode="sum", sparse=True)
        self.deep = nn.Embedding(total, dim, sparse=True)
        self.linear = nn.Linear(counts, 1)
        self.layers = nn.Sequential(
            nn.Linear(len(sizes) * dim + counts, width),
            nn.ReLU(),
            nn.Linear(width, width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, 1),
        )
        nn.init.zeros_(self.wide.weight)
        nn.init.normal_(self.deep.weight, std=0.1)

    def forward(self, counts: Tensor, categories: Tensor) -> Tensor:
        logs = counts.log1p()
        rows = categories + self.first
        embedded = self.deep(rows).flatten(1)  # (n, features * dim)
        deep = self.layers(torch.cat([embedded, logs], 1))
        wide = self.wide(torch.cat([rows, *self._crossed(categories)], 1)) + self.linear(logs)
        score: Tensor = (wide + deep).squeeze(1)
        return score

    def _crossed(self, categories: Tensor) -> list[Tensor]:
        """(n, 1) for each pair: the row of its product."""
        return [
            self.total
            + ((categories[:, first] * 8191 + categories[:, other]) * 131 + place).remainder(
                self.crossed
            )[:, None]
            for place, (first, other) in enumerate(self.pairs)
        ]
