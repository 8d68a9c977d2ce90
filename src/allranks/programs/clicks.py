"""Clicks on advertisements: a wide and deep model with nearly all of its weights in two tables.

The data is synthetic, in the shape of Criteo's, with a structure that can be learnt. Tables have
sparse gradients: a step touches few of their rows. `rows` is their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adagrad, Optimizer

from allranks.errors import RequestError
from allranks.programs.models.wide_and_deep import WideAndDeep
from allranks.torch.task import Task

# --- clicks data ---------------------------------------------------------------------------------
# Synthetic clicks on advertisements in the shape of Criteo's: 13 counts and 26 categories a sample.
#
# The features have from 4 to `rows` categories, in a geometric series, with frequencies by Zipf's
# law: the first category of a feature is in every few samples, most others in none. A click depends
# on the effect of each category, on pairs of categories, and on the counts. The effect of a
# category is a hash of its number, so no table of effects is needed. Nothing is downloaded.


COUNTS, CATEGORIES = 13, 26
FEWEST = 4
PAIRS = ((0, 1), (2, 3), (4, 5))  # of features with few values
FADING = 0.9  # how much less the next feature says than one with fewer values
BIAS, STRENGTH = -3.0, 1.8  # more than a quarter of the samples are clicks, as in Criteo's
Numbers = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Clicks:
    """The counts (n, 13), the categories (n, 26), each from 0 on, and whether it is a click (n,).

    `chances` (n,) are the probabilities of the clicks: the best possible prediction.
    """

    counts: NDArray[np.float32]
    categories: Ids
    clicks: NDArray[np.float32]
    chances: Numbers


@dataclass(frozen=True)
class ClickLaw:
    """The distribution of samples; `rows` is the number of values of the last category."""

    rows: int
    seed: int = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of values of each category."""
        ratio = (self.rows / FEWEST) ** (1 / (CATEGORIES - 1))
        return tuple(round(FEWEST * ratio**feature) for feature in range(CATEGORIES))

    def samples(self, count: int, part: int) -> Clicks:
        """`count` samples of part `part` (training 0, evaluation 1): the same at every call."""
        random = np.random.Generator(np.random.Philox(key=[self.seed, part]))
        depth = random.random((count, CATEGORIES))
        categories = ((np.array(self.sizes) + 1.0) ** depth).astype(np.int64) - 1
        counts = np.floor(np.exp(random.standard_normal((count, COUNTS)) + 1))
        chances = 1 / (1 + np.exp(-self._score(counts, categories)))
        clicks = random.random(count) < chances
        return Clicks(counts.astype(np.float32), categories, clicks.astype(np.float32), chances)

    def _score(self, counts: Numbers, categories: Ids) -> Numbers:
        """The logarithm of the odds of a click: (n,)."""
        feature = np.arange(CATEGORIES)
        shares = FADING**feature / np.linalg.norm(FADING**feature)
        alone = _effect(self.seed, feature, categories) @ shares
        pairs = sum(
            _effect(self.seed + 1, np.int64(a), categories[:, a] * 997 + categories[:, b])
            for a, b in PAIRS
        )
        logs = np.log1p(counts) - 1.3
        slopes = _effect(self.seed + 2, np.int64(0), np.arange(COUNTS))
        curved = logs[:, 0] * logs[:, 1] - logs[:, 2] * logs[:, 3]
        total = alone + pairs / np.sqrt(len(PAIRS)) + logs @ slopes / np.sqrt(COUNTS) + curved / 2
        score: Numbers = BIAS + STRENGTH * total
        return score


def _effect(seed: int, feature: Ids | np.int64, category: Ids) -> Numbers:
    """A number of mean 0 and variance 1 for each category of a feature: splitmix64 of both."""
    with np.errstate(over="ignore"):
        word = category.astype(np.uint64) * np.uint64(64) + np.asarray(feature).astype(np.uint64)
        word += np.uint64(0x9E3779B97F4A7C15) * np.uint64(seed + 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
        word ^= word >> np.uint64(31)
    return ((word >> np.uint64(11)) / 2.0**53 - 0.5) * 12**0.5


BINS, WIDEST = 48, 6.0  # of the score, for the area under the curve
TRAINING, EVALUATION = 0, 1


@dataclass(kw_only=True)
class ClickThrough(Task):
    """Predict clicks; the area under the ROC curve (`auc`) reaches at least 0.80, of 0.91.

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
        return self._tensors(self.samples, TRAINING)

    def eval_data(self) -> tuple[Tensor, ...]:
        return self._tensors(self.held_out, EVALUATION)

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

    def _tensors(self, samples: int, part: int) -> tuple[Tensor, ...]:
        """Counts (n, 13), categories (n, 26), clicks (n,)."""
        clicks = self.law.samples(samples, part)
        arrays = clicks.counts, clicks.categories, clicks.clicks
        return tuple(torch.from_numpy(array) for array in arrays)
