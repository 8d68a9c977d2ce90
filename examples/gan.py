"""A GAN: a generator and a critic, each with an optimizer of its own, on points of a ring.

    allranks train gan.py --ranks 2 --bitwise

Both learn in the same step, from one forward pass each. The noise is drawn with the sample, so it
belongs to the sample and not to a rank. Two Adams are one Adam with two groups, as it treats every
weight by itself. Halves that take turns, each with batches of its own, are no task.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from allranks.torch import Task

NOISE = 4


class Gan(nn.Module):
    """Real points and noise in; what the critic says of the real, the fake, and the fake again."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(samples, 2) and (samples, NOISE) -> three times (samples,),
        and the fakes (samples, 2)."""
        fake = self.generator(noise)
        fixed = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        said = self.critic(real), self.critic(fake.detach())  # the critic learns from these
        told = functional_call(self.critic, fixed, (fake,))  # the generator from this
        return (*(s.squeeze(1) for s in (*said, told)), fake)


@dataclass(kw_only=True)
class Ring(Task):
    """Points at distance 1 from the middle."""

    batch_size: int = 256
    epochs: int = 30
    lr_generator: float = 1e-3
    lr_critic: float = 2e-3

    def model(self) -> nn.Module:
        return Gan()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": list(model.generator.parameters()), "lr": self.lr_generator},
            {"params": list(model.critic.parameters()), "lr": self.lr_critic},
        ]
        return torch.optim.Adam(groups, betas=(0.5, 0.9))

    def train_data(self) -> Any:
        return ring(4096, seed=1), torch.zeros(4096, NOISE)

    def eval_data(self) -> Any:
        random = torch.Generator().manual_seed(2)
        return ring(1024, seed=2), torch.randn(1024, NOISE, generator=random)

    def augment(self, sample: Any, random: np.random.Generator) -> Any:
        return sample[0], torch.from_numpy(random.standard_normal(NOISE)).to(sample[0])

    def inputs(self, batch: Any) -> Any:
        return batch

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        real, fake, told, _ = output
        return F.softplus(-real) + F.softplus(fake) + F.softplus(-told)

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        away = (output[3].norm(dim=1) - 1).abs()
        return {"away_from_ring": (away.sum(), len(away))}


def ring(points: int, seed: int) -> torch.Tensor:
    """(points, 2), each at distance 1."""
    random = torch.Generator().manual_seed(seed)
    angle = 2 * torch.pi * torch.rand(points, generator=random)
    return torch.stack([angle.cos(), angle.sin()], dim=1)
