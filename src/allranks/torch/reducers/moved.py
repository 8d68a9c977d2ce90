"""Gradients that are written where they belong as soon as backward has made them.

Backward adds to the `.grad` that it finds, which begins as zeros: a write and a read more than to
keep what it makes. Where it finds none, what it makes is moved: the same bits, 0 + g.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from allranks.torch.step.gradients import gradient_taken

MOVED_BYTES = 2**16  # from here on a pass through memory takes longer than a call from Python


class Moved:
    """The `homes` of gradients, by the positions of their parameters.

    A pass, or several, begins with `begin` and ends with `settle`; `finished` is called for each
    gradient that a backward pass has finished.
    """

    def __init__(self, homes: Mapping[int, tuple[nn.Parameter, Tensor]]) -> None:
        self._homes = homes
        self._awaited: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def begin(self) -> None:
        """Let backward make all of them anew."""
        self._awaited = dict(self._homes)
        for parameter, _ in self._homes.values():
            parameter.grad = None

    def finished(self, position: int) -> None:
        """Backward has finished a gradient (called during backward): the first one is moved."""
        if position in self._awaited:
            self._move(*self._awaited.pop(position))

    def _move(self, parameter: nn.Parameter, home: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            raise gradient_taken(parameter)
        if gradient.is_sparse:
            home.zero_().add_(gradient)
        else:
            torch.add(gradient, 0, out=home)  # no copy: 0 + -0.0 is 0.0
        parameter.grad = home

    def settle(self) -> None:
        """Let gradients be zero that no pass has made."""
        for parameter, home in self._awaited.values():
            if parameter.grad is not None:
                raise gradient_taken(parameter)
            parameter.grad = home.zero_()
        self._awaited = {}
