"""Watches one forward and backward pass, and says where in the model a number is first not finite.

Used by `diagnose` alone: it looks at the output of every module, which no good step should pay for.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from allranks.torch.data.nested import tensors_in


def bad_rows(tensor: Tensor, samples: int) -> list[int]:
    """The samples, of `samples` along dimension 0, in whose rows something is not finite."""
    if tensor.ndim == 0 or not samples or tensor.shape[0] % samples:
        return []
    fine = torch.isfinite(tensor.detach()).reshape(samples, -1).all(dim=1)
    return [row for row, is_fine in enumerate(fine.tolist()) if not is_fine]


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


class Watch:
    """While it is entered: `output` and `gradient` name the module where each first went wrong.

    `rows` are the samples of the micro-batch, of `samples`, whose gradient was not finite there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._hooks: list[Any] = []
        self.begin(0)

    def begin(self, samples: int) -> None:
        """A micro-batch of `samples` samples comes next."""
        self.samples = samples
        self.output: str | None = None
        self.gradient: str | None = None
        self.rows: list[int] = []
        self._seen: list[Tensor] = []  # held, so that no two of them have one identity
        self._results: set[int] = set()  # those that are outputs of the whole model

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self.begin(0)

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if self.output is None and not is_finite(tensor):
                    self.output = name
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_back, name, id(tensor)))
                self._seen.append(tensor)
                if not name:
                    self._results.add(id(tensor))

        return look

    def _look_back(self, name: str, which: int, gradient: Tensor) -> None:
        if self.gradient is None and not is_finite(gradient):
            self.gradient = "" if which in self._results else name
            self.rows = bad_rows(gradient, self.samples)
