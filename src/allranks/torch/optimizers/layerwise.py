"""What LARS and LAMB share: a rate for each layer, from the length of its weights and its update.

A layer is one parameter of more than one dimension. Biases and the weights of norms are vectors;
the programs that come with both papers leave them without a ratio and without decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from allranks.errors import RequestError


class Layerwise(Optimizer):
    """The step over all groups; a subclass says what becomes of the layers and vectors of one.

    State is kept for each parameter in `self.state` and nowhere else, so that checkpoints hold it.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                self._refuse_sparse(parameter)
            for device in dict.fromkeys(p.device for p in parameters):
                layers = [p for p in parameters if p.ndim > 1 and p.device == device]
                vectors = [p for p in parameters if p.ndim <= 1 and p.device == device]
                if layers:
                    self.update(group, layers, are_layers=True)
                if vectors:
                    self.update(group, vectors, are_layers=False)
        return loss

    def update(self, group: dict[str, Any], weights: list[Tensor], *, are_layers: bool) -> None:
        """Update these parameters of `group`, all of which have a dense gradient."""
        raise NotImplementedError

    def _refuse_sparse(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise RequestError(
                asked=f"{type(self).__name__} for a parameter of shape {tuple(parameter.shape)}",
                found="a sparse gradient",
                why="the length of the whole layer is needed, and its rows of zeros move too",
                do="build the embedding with sparse=False, or give it another optimizer",
            )


def trust_ratio(ratio: Tensor, *lengths: Tensor) -> Tensor:
    """`ratio`, or 1 where one of the lengths that it is made of is 0. Stays on the device."""
    positive = torch.stack([length > 0 for length in lengths]).all()
    return torch.where(positive, ratio, torch.ones_like(ratio))


def check_settings(name: str, **settings: float) -> None:
    """Raise `RequestError` for a setting that is negative or no number."""
    for setting, value in settings.items():
        if not 0 <= value < float("inf"):
            raise RequestError(
                asked=f"{name}({setting}={value})",
                found=str(value),
                why=f"{setting} is a number that is not negative",
                do=f"{setting} of 0 or more",
            )


# --- lamb ----------------------------------------------------------------------------------------
# LAMB: AdamW whose step has, in each layer, the length of its weights times the rate.
#
#     m ← β₁·m + (1 − β₁)·g          v ← β₂·v + (1 − β₂)·g²
#     r = m̂ / (√v̂ + ε) + λ·w        m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
#     w ← w − γ · φ(‖w‖) / ‖r‖ · r    the ratio is 1 where a length is 0
#
# You et al. 2019, arXiv 1904.00962, Algorithm 2, with φ(z) = z, or z held between two limits. Two
# variants are in use, and both are here: `bias_correction=True` is the algorithm as the paper
# prints it; `False` takes m and v as they are, as the program that trained BERT with it does.
# Lengths are Euclidean ones. As in that program, biases and the weights of norms get Adam's step,
# without ratio and without decay; `adapt_vectors=True` treats them as layers, as the printed
# algorithm does.


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
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(firsts, beta1)
        torch._foreach_add_(firsts, gradients, alpha=1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(seconds)
        updates = firsts
        if group["bias_correction"]:
            steps = [self.state[weight]["step"] for weight in weights]
            updates = list(torch._foreach_div(firsts, [1 - beta1**step for step in steps]))
            torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
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


# --- lars ----------------------------------------------------------------------------------------
# LARS: momentum with a rate for each layer. You, Gitman and Ginsburg 2017, arXiv 1708.03888.
#
#     λ = η‖w‖ / (‖g‖ + β‖w‖)        1 where a length is 0
#     v ← m·v + γ·λ·(g + β·w)
#     w ← w − v
#
# η is `trust`, β `weight_decay`, m `momentum`, γ the rate of the step. Biases and the weights of
# norms get plain momentum, without λ and without decay.
#
# The paper has the rate inside of the velocity, so a velocity remembers the rates of the steps that
# it is made of: after a rate is cut, updates go on for a while at the old one; after a warm-up step
# they lag behind. Goyal et al. 2017 put that right by v ← m·(γ'/γ)·v + … at each change. With
# `rate_in_velocity=False` the velocity is torch's own, u ← m·u + λ·(g + β·w) and w ← w − γ·u, which
# is the corrected form at every step and the same as the paper's while the rate stays as it is.


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
