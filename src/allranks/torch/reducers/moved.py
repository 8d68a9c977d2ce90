"""Gradients that are written where they belong as soon as backward has made them.

Backward adds to the `.grad` that it finds, which begins as zeros: a write and a read more than to
keep what it makes. Where it finds none, what it makes is moved: the same bits, 0 + g.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from allranks.torch.shared_memory.library import library
from allranks.torch.step.gradients import gradient_taken

LIBRARY = library()
MOVED_BYTES = 2**16  # from here on a pass through memory takes longer than a call from Python


class Moved:
    """The `homes` of gradients, by the positions of their parameters.

    A pass, or several, begins with `begin` and ends with `settle`; `finished` is called for each
    gradient that a backward pass has finished. Where all of them are read after the passes alone,
    `read_later`, and no cache holds them, they are written past it.
    """

    def __init__(
        self, homes: Mapping[int, tuple[nn.Parameter, Tensor]], *, read_later: bool = False
    ) -> None:
        self._homes = homes
        self._past_caches = read_later and self._outgrow_caches()
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
        elif self._past_caches and _lie_alike(gradient, home):
            at = home.data_ptr(), gradient.data_ptr(), home.numel()
            LIBRARY.move(*at, home.dtype == torch.float64)  # type: ignore[union-attr]
        else:
            torch.add(gradient, 0, out=home)  # no copy: 0 + -0.0 is 0.0
        parameter.grad = home

    def _outgrow_caches(self) -> bool:
        """Whether no cache holds them; without the library nobody asks."""
        nbytes = sum(home.nbytes for _, home in self._homes.values())
        return LIBRARY is not None and nbytes > LIBRARY.cache_bytes()

    def settle(self) -> None:
        """Let gradients be zero that no pass has made."""
        for parameter, home in self._awaited.values():
            if parameter.grad is not None:
                raise gradient_taken(parameter)
            parameter.grad = home.zero_()
        self._awaited = {}


def _lie_alike(gradient: Tensor, home: Tensor) -> bool:
    """Whether both are runs of numbers of one type, in memory that the library can read."""
    kinds = gradient.dtype == home.dtype in (torch.float32, torch.float64)
    cpu = gradient.device.type == home.device.type == "cpu"
    runs = gradient.is_contiguous() and home.is_contiguous()
    return kinds and cpu and runs and not gradient.is_neg() and not gradient.is_conj()
