"""The gradient of a worker, which backward leaves where it is sent from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from allranks.torch.parallel.data.buckets import MOVED_BYTES, Moved
from allranks.torch.parameter_server.flat import Flat


class LaidOut:
    """Gradients of `parameters` in `flats`, one for each server.

    Those of tensors that are cut, or lie on a device, backward leaves elsewhere. A step calls
    `begin` before its passes, `finished` in them, and `settle` after them.
    """

    def __init__(self, flats: Sequence[Flat], parameters: Sequence[nn.Parameter]) -> None:
        homes = {at: home for flat in flats for at, home in flat.homes_of(parameters).items()}
        large = {at: home for at, home in homes.items() if home[1].nbytes >= MOVED_BYTES}
        self._parameters, self._moved = parameters, Moved(large, read_later=True)
        self._small = [home for at, home in homes.items() if at not in large]

    def begin(self) -> None:
        """All gradients are zero, or yet to be made."""
        for parameter in self._parameters:
            parameter.grad = None
        self._moved.begin()
        if self._small:
            torch._foreach_zero_([view for _, view in self._small])
        for parameter, view in self._small:
            parameter.grad = view

    def finished(self, position: int) -> None:
        """Backward has finished a gradient (called during backward)."""
        self._moved.finished(position)

    def settle(self) -> None:
        """All passes are over."""
        self._moved.settle()
