"""LAMB: AdamW whose step has, in each layer, the length of its weights times the rate.

    m ← β₁·m + (1 − β₁)·g          v ← β₂·v + (1 − β₂)·g²
    r = m̂ / (√v̂ + ε) + λ·w        m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
    w ← w − γ · φ(‖w‖) / ‖r‖ · r    the ratio is 1 where a length is 0

You et al. 2019, arXiv 1904.00962, Algorithm 2, with φ(z) = z, or z held between two limits. Two
variants are in use, and both are here: `bias_correction=True` is the algorithm as the paper prints
it; `False` takes m and v as they are, as the program that trained BERT with it does. Lengths are
Euclidean ones. As in that program, biases and the weights of norms get Adam's step, without ratio
and without decay; `adapt_vectors=True` treats them as layers, as the printed algorithm does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from allranks.errors import RequestError
from allranks.torch.optimizers.layerwise import Layerwise, check_settings, trust_ratio


class LAMB(Layerwise):
    """Layer-wise adaptive moments. `weight_limits` are those of φ, (lowest, highest) length."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        weight_limits: tuple[float, float] | None = None,
        adapt_vectors: bool = False,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        check_settings("LAMB", **numbers)
        if not all(0 <= beta < 1 for beta in betas):
            raise RequestError(
                asked=f"LAMB(betas={betas})",
                found=str(betas),
                why="a moment keeps a part of itself in each step, and never all of it",
                do="for example betas=(0.9, 0.999)",
            )
        choices = {
            "betas": betas,
            "bias_correction": bias_correction,
            "weight_limits": weight_limits,
            "adapt_vectors": adapt_vectors,
        }
        super().__init__(params, {**numbers, **choices})

    def update(self, group: dict[str, Any], weights: list[Tensor], *, are_layers: bool) -> None:
        adapted = are_layers or group["adapt_vectors"]
        updates = self._adam(group, weights)
        if adapted and group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if adapted:
            _scale(weights, updates, group["weight_limits"])
        torch._foreach_add_(weights, updates, alpha=-float(group["lr"]))

    def _adam(self, group: dict[str, Any], weights: list[Tensor]) -> list[Tensor]:
        """m̂ / (√v̂ + ε) of each parameter; every one counts the steps that it had a gradient in."""
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["step"] = 0
                state["first"], state["second"] = torch.zeros_like(weight), torch.zeros_like(weight)
            state["step"] += 1
        firsts = [self.state[weight]["first"] for weight in weights]
        seconds = [self.state[weight]["second"] for weight in weights]
        gradients = [w.grad for w in weights if w.grad is not None]
        one, two = group["betas"]
        torch._foreach_mul_(firsts, one)
        torch._foreach_add_(firsts, gradients, alpha=1 - one)
        torch._foreach_mul_(seconds, two)
        torch._foreach_addcmul_(seconds, gradients, gradients, 1 - two)
        roots = torch._foreach_sqrt(seconds)
        updates = firsts
        if group["bias_correction"]:
            steps = [self.state[weight]["step"] for weight in weights]
            updates = list(torch._foreach_div(firsts, [1 - one**step for step in steps]))
            torch._foreach_div_(roots, [(1 - two**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(updates, roots))


def _scale(
    weights: list[Tensor], updates: list[Tensor], limits: tuple[float, float] | None
) -> None:
    """Give each update the length φ(‖w‖)."""
    lengths = zip(torch._foreach_norm(weights), torch._foreach_norm(updates), strict=True)
    for update, (weight, length) in zip(updates, lengths, strict=True):
        wanted = weight if limits is None else weight.clamp(*limits)
        update.mul_(trust_ratio(wanted / length, wanted, length))
