"""LARS: momentum with a rate for each layer. You, Gitman and Ginsburg 2017, arXiv 1708.03888.

    λ = η‖w‖ / (‖g‖ + β‖w‖)        1 where a length is 0
    v ← m·v + γ·λ·(g + β·w)
    w ← w − v

η is `trust`, β `weight_decay`, m `momentum`, γ the rate of the step. Biases and the weights of
norms get plain momentum, without λ and without decay.

The paper has the rate inside of the velocity, so a velocity remembers the rates of the steps that
it is made of: after a rate is cut, updates go on for a while at the old one; after a warm-up step
they lag behind. Goyal et al. 2017 put that right by v ← m·(γ'/γ)·v + … at each change. With
`rate_in_velocity=False` the velocity is torch's own, u ← m·u + λ·(g + β·w) and w ← w − γ·u, which
is the corrected form at every step and the same as the paper's while the rate stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from allranks.torch.optimizers.layerwise import Layerwise, check_settings, trust_ratio


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling. With `trust` 0.001 rates are large: 10 is not unusual."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        rate_in_velocity: bool = True,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        check_settings("LARS", **numbers)
        super().__init__(params, {**numbers, "rate_in_velocity": rate_in_velocity})

    def update(self, group: dict[str, Any], weights: list[Tensor], *, are_layers: bool) -> None:
        updates = [w.grad for w in weights if w.grad is not None]
        if are_layers:
            updates = _scaled(weights, updates, group["weight_decay"], group["trust"])
        for weight in weights:
            if "velocity" not in self.state[weight]:
                self.state[weight]["velocity"] = torch.zeros_like(weight)
        velocities = [self.state[weight]["velocity"] for weight in weights]
        rate, inside = float(group["lr"]), group["rate_in_velocity"]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates, alpha=rate if inside else 1.0)
        torch._foreach_add_(weights, velocities, alpha=-1.0 if inside else -rate)


def _scaled(
    weights: list[Tensor], gradients: list[Tensor], decay: float, trust: float
) -> list[Tensor]:
    """λ·(g + β·w) of each layer."""
    updates = torch._foreach_add(gradients, weights, alpha=decay)
    lengths = zip(torch._foreach_norm(weights), torch._foreach_norm(gradients), strict=True)
    for update, (weight, gradient) in zip(updates, lengths, strict=True):
        ratio = trust * weight / (gradient + decay * weight)
        update.mul_(trust_ratio(ratio, weight, gradient))
    return list(updates)
