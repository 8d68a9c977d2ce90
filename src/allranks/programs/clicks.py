"""Clicks on advertisements: a wide and deep model whose weights are all but all in two tables.

The data is made up in the shape of Criteo's (`clicks_data`), with a structure that can be learnt.
Tables have sparse gradients: a step touches few of their rows. `rows` says how large they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adagrad, Optimizer

from allranks.errors import RequestError
from allranks.programs.clicks_data import COUNTS, FEWEST, PAIRS, ClickLaw
from allranks.programs.models.wide_and_deep import WideAndDeep
from allranks.torch.task import Task

BINS, WIDEST = 48, 6.0  # of the score, for the area under the curve
TRAINING, EVALUATION = 0, 1


@dataclass(kw_only=True)
class ClickThrough(Task):
    """Tell who clicks; the area under the ROC curve (`auc`) comes to at least 0.80, of 0.91.

    `rows` is the number of values of the largest category, of about 4.5 `rows` in all; `dim` the
    size of an embedding, `crossed` the rows for pairs of categories.
    """

    batch_size: int = 512
    epochs: int = 2
    lr: float = 0.05
    samples: int = 65536
    held_out: int = 8192
    rows: int = 2000
    dim: int = 8
    width: int = 64
    crossed: int = 4096

    def __post_init__(self) -> None:
        if self.rows < FEWEST or min(self.dim, self.width // 2, self.crossed) < 1:
            raise RequestError(
                asked=f"rows={self.rows} dim={self.dim} width={self.width} crossed={self.crossed}",
                found="a table or a layer without numbers",
                why=f"a category has at least {FEWEST} values, a network at least two features",
                do=f"rows of {FEWEST} or more, width of 2 or more, dim and crossed of 1 or more",
            )
        self.law = ClickLaw(self.rows)

    def model(self) -> nn.Module:
        return WideAndDeep(
            self.law.sizes,
            COUNTS,
            dim=self.dim,
            width=self.width,
            pairs=PAIRS,
            crossed=self.crossed,
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adagrad(model.parameters(), lr=self.lr)

    def train_data(self) -> tuple[Tensor, ...]:
        return self._made(self.samples, TRAINING)

    def eval_data(self) -> tuple[Tensor, ...]:
        return self._made(self.held_out, EVALUATION)

    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch[2], reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        clicks = batch[2] > 0.5
        right = ((output > 0) == clicks).sum()
        places = ((output + WIDEST) * (BINS / 2 / WIDEST)).long().clamp(0, BINS - 1)
        shares = {"accuracy": (right, len(clicks))}
        for name, chosen in (("clicks", clicks), ("others", ~clicks)):
            counted = torch.bincount(places[chosen], minlength=BINS)
            shares |= {f"{name}_{bin}": (counted[bin], len(clicks)) for bin in range(BINS)}
        return shares

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """`auc`: the chance that a click has a higher score than another sample, by bins."""
        if f"clicks_{BINS - 1}" not in metrics:
            return metrics
        clicks, others = (
            [metrics.pop(f"{name}_{bin}") for bin in range(BINS)] for name in ("clicks", "others")
        )
        above, below = 0.0, 0.0
        for click, other in zip(clicks, others, strict=True):
            above += click * (below + other / 2)
            below += other
        pairs = sum(clicks) * below
        return {**metrics, "auc": above / pairs} if pairs else metrics

    def _made(self, samples: int, part: int) -> tuple[Tensor, ...]:
        """Counts (n, 13), categories (n, 26), clicks (n,)."""
        found = self.law.samples(samples, part)
        arrays = found.counts, found.categories, found.clicks
        return tuple(torch.from_numpy(array) for array in arrays)
