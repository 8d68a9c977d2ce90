"""Mixup: each image is mixed with another one. Zhang et al. 2017, arXiv 1710.09412.

    allranks train mixup.py --ranks 2 --bitwise

The partner is drawn in `augment`, whose generator belongs to the sample, from all images: so it is
the same on any number of ranks. `collate` could draw as well, and be the same: each shard is then
collated by itself, and the partner is one of the few images of that shard.
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
        if not self.training:  # an evaluation, of images that are not mixed
            return super().loss(output, batch)
        _, one, other, share = batch
        return share * F.cross_entropy(output, one, reduction="none") + (
            1 - share
        ) * F.cross_entropy(output, other, reduction="none")
