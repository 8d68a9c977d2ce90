"""The weights for evaluation, where they differ from the trained ones.

    average <- decay * average + (1 - decay) * weight        after every update

The exponential moving average is stored in addition to the weights. Only trained weights are
averaged; buffers are the model's own. Polyak and Juditsky 1992; Tarvainen and Valpola 2017, arXiv
1703.01780. An optimizer with two modes computes the weights for evaluation from its state, as
schedule-free ones do: Defazio et al. 2024, arXiv 2405.15682.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.torch.checkpoint.state import local
from allranks.torch.step.gradients import multiply_


class Owned(Protocol):
    """`Strategy.owned`."""

    def __call__(self, *, writes: bool = False) -> AbstractContextManager[None]: ...


class MovingAverage:
    """The average of parameters, which starts with their values when they are added.

    Each rank averages the part that it updates: within `owned()`, the parameters are that part.
    """

    def __init__(self, decay: float, owned: Owned) -> None:
        self.decay, self._owned = decay, owned
        self.names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._tensors: list[Tensor] = []

    def add(self, names: list[str], parameters: list[nn.Parameter]) -> None:
        """Average these too, from now on; those that are averaged already continue."""
        known = set(self.names)
        with self._owned():
            for name, parameter in zip(names, parameters, strict=True):
                if name not in known:
                    self.names.append(name)
                    self._parameters.append(parameter)
                    self._tensors.append(parameter.detach().clone())

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> None:
        """Add the weights after an update, unless `skip` is 1. No communication.

        It rounds differently with a flag than without one: a training always has it, or never.
        """
        with self._owned():
            pairs = zip(self._tensors, self._parameters, strict=True)
            here = [(local(t), local(p)) for t, p in pairs if not p.is_meta]
            if not here:
                return
            averages, weights = [t for t, _ in here], [p for _, p in here]
            if skip is None:
                torch._foreach_lerp_(averages, weights, 1 - self.decay)
            else:  # not where an update was skipped
                steps = torch._foreach_sub(weights, averages)
                multiply_(list(steps), (1 - self.decay) * (1 - skip.double()))
                torch._foreach_add_(averages, steps)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model holds the average."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap in place, so that views of a weight's memory see the average too."""
        with self._owned(writes=True):
            for parameter, tensor in zip(self._parameters, self._tensors, strict=True):
                weight = parameter.clone()
                parameter.copy_(tensor)
                tensor.copy_(weight)

    def state(self) -> dict[str, Tensor]:
        """The averages by the names of their weights; the tensors themselves."""
        return dict(zip(self.names, self._tensors, strict=True))

    @torch.no_grad()
    def load_state(self, model: nn.Module, state: dict[str, Tensor] | None) -> None:
        """Load what `state` returned; without a state, start with the current weights."""
        if state is not None and state.keys() != set(self.names):
            weights = dict(model.named_parameters())
            self.names, self._parameters, self._tensors = [], [], []
            self.add(list(state), [weights[name] for name in state])
        with self._owned():
            for name, tensor, parameter in zip(
                self.names, self._tensors, self._parameters, strict=True
            ):
                tensor.copy_(parameter if state is None else state[name])


class TwoModes:
    """An optimizer with `train()` for its steps, and `eval()` for the weights to evaluate.

    The weights of `train()` are restored to the bit: they are not computed from those of `eval()`,
    but copied back. Each rank changes the mode of the part that it updates (`owned`).
    """

    def __init__(self, optimizer: Any, owned: Owned) -> None:
        self._optimizer, self._owned = optimizer, owned
        with owned(writes=True):
            optimizer.train()

    @staticmethod
    def are_in(optimizer: Optimizer) -> bool:
        """Whether an optimizer has two modes."""
        return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model has the weights of `eval()`. Every rank enters this."""
        with self._owned(writes=True):
            self._optimizer.train()  # a callback may have left it in the other mode
            weights = [(p, p.detach().clone()) for p in self._parameters()]
            self._optimizer.eval()
        try:
            yield
        finally:
            with self._owned(writes=True):
                self._put_back(weights)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights of `eval()`, by name; within `owned`, what this rank updates of them."""
        weights = [(p, p.detach().clone()) for p in self._parameters()]
        self._optimizer.eval()
        try:
            trained = {id(parameter) for parameter, _ in weights}
            named = model.named_parameters()
            return {name: p.detach().clone() for name, p in named if id(p) in trained}
        finally:
            self._put_back(weights)

    @torch.no_grad()
    def _put_back(self, weights: list[tuple[nn.Parameter, Tensor]]) -> None:
        self._optimizer.train()
        for parameter, weight in weights:
            parameter.copy_(weight)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"])
