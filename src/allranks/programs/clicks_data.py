"""Clicks on advertisements, made up in the shape of Criteo's: 13 counts and 26 categories a sample.

Categories are as many as 4 to `rows`, in a geometric row, and as often as Zipf's law says: the
first of a feature in every few samples, most of the others in none. Whether somebody clicks follows
from what each category adds, from pairs of categories, and from the counts; what a category adds is
a hash of its number, so that no table of it is kept, however many there are. Nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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

    `chances` (n,) are the probabilities that the clicks are drawn with: nobody can tell better.
    """

    counts: NDArray[np.float32]
    categories: Ids
    clicks: NDArray[np.float32]
    chances: Numbers


@dataclass(frozen=True)
class ClickLaw:
    """The law by which samples are made; `rows` is the number of values of the last category."""

    rows: int
    seed: int = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many values each category has."""
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
            _effect(self.seed + 1, np.int64(one), categories[:, one] * 997 + categories[:, other])
            for one, other in PAIRS
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
