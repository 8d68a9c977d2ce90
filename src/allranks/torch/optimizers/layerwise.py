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
            given = [p for p in group["params"] if p.grad is not None]
            for parameter in given:
                self._refuse_sparse(parameter)
            for device in dict.fromkeys(p.device for p in given):
                layers = [p for p in given if p.ndim > 1 and p.device == device]
                vectors = [p for p in given if p.ndim <= 1 and p.device == device]
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
    for what, value in settings.items():
        if not 0 <= value < float("inf"):
            raise RequestError(
                asked=f"{name}({what}={value})",
                found=str(value),
                why=f"{what} is a number that is not negative",
                do=f"{what} of 0 or more",
            )
