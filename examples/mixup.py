"""Mixup: each image is mixed with another one. Zhang et al. 2017, arXiv 1710.09412.

    allranks train mixup.py --ranks 2 --bitwise

The partner is drawn in `augment`, whose generator belongs to the sample: so it is the same on any
number of ranks. Drawn in `collate`, the partner would come from whatever the rank has at hand.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from allranks.programs.digits import Digits


@dataclass(kw_only=True)
class Mixed(Digits):
    """Digits, two at a time."""

    alpha: float = 0.2

    @cached_property
    def digits(self) -> tuple[torch.Tensor, torch.Tensor]:
        return super().train_data()

    def train_data(self) -> Any:
        images, labels = self.digits
        return images, labels, labels, torch.ones(len(labels))

    def augment(self, sample: Any, random: np.random.Generator) -> Any:
        images, labels = self.digits
        other, share = int(random.integers(len(labels))), float(random.beta(self.alpha, self.alpha))
        mixed = share * sample[0] + (1 - share) * images[other]
        return mixed, sample[1], labels[other], torch.tensor(share)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        if len(batch) == 2:  # evaluated: an image and its label
            return super().loss(output, batch)
        _, one, other, share = batch
        return share * F.cross_entropy(output, one, reduction="none") + (
            1 - share
        ) * F.cross_entropy(output, other, reduction="none")
