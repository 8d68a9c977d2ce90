"""The gradient of a step of which each rank holds a part: its own rows of every parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from allranks.torch.checkpoint.tree import local
from allranks.torch.comm import Comm
from allranks.torch.model.reals import real_type, reals
from allranks.torch.reducers.exact_norm import exact_norm
from allranks.torch.step.gradients import Gradients, gradients_of


class GradientParts(Gradients):
    """`parts` are what this rank holds of the gradients; the `.grad` of the parameters are empty.

    `cut` gives this rank's part of a whole gradient. Parts of no dimension are the same on all
    ranks of `comm`.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        parts: Sequence[Tensor | None],
        cut: Callable[[Tensor], Tensor],
        comm: Comm,
        *,
        exact: bool = False,
    ) -> None:
        super().__init__(parameters, exact=exact)
        self.parts, self.cut, self.comm = list(parts), cut, comm

    def settle(self, unused: Sequence[int]) -> None:
        for position in unused:
            self.parts[position] = None

    def follow(self, parameters: list[nn.Parameter]) -> None:
        known = {id(p): part for p, part in zip(self.parameters, self.parts, strict=True)}
        self.parameters = parameters
        self.parts = [known.get(id(parameter)) for parameter in parameters]
        self._take()

    def add(self, value: Tensor) -> None:
        value.backward()
        self._take()

    def _take(self) -> None:
        """Add the own part of what stands in `.grad`, which is empty then."""
        for position, parameter in enumerate(self.parameters):
            if (gradient := parameter.grad) is not None:
                own, part = self.cut(gradient), self.parts[position]
                self.parts[position] = own.clone() if part is None else part.add_(own)
                parameter.grad = None

    def tensors(self) -> list[Tensor | None]:
        return self.parts

    def scale_(self, factor: float) -> None:
        torch._foreach_mul_(self._there, factor)

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Sends the squares of this rank's part, as `control`; with `exact` five numbers."""
        counted = [part for part in self._there if part.ndim or self.comm.rank == 0]
        if clips and self.exact:
            return exact_norm(counted, self._everywhere)
        own = torch.zeros(1, dtype=torch.float64, device=self.comm.device)
        for part in counted:
            own += reals(part).double().square().sum()
        return math.sqrt(self._everywhere(own).sum())

    def clip_(self, limit: float, norm: float) -> None:
        total = torch.tensor(norm, dtype=real_type(self.parameters[0].dtype))
        factor = (limit / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        torch._foreach_mul_(self._there, factor.to(self.comm.device))

    @property
    def _there(self) -> list[Tensor]:
        return [part for part in self.parts if part is not None]

    def _everywhere(self, row: Tensor) -> Tensor:
        """The rows of all ranks, (ranks, row)."""
        if self.comm.size == 1:
            return row[None]
        rows = row.new_empty(self.comm.size * row.numel())
        self.comm.all_gather(rows, row, "control").wait()
        return rows.view(self.comm.size, -1)


class CutGradients(Gradients):
    """The parts of the gradients that this rank holds. Every element counts once in the norm."""

    def __init__(self, parameters: list[nn.Parameter], shards: Comm, *, exact: bool) -> None:
        super().__init__(parameters, exact=exact)
        self.shards = shards

    def scale_(self, factor: float) -> None:
        for gradient in gradients_of(self.parameters):
            local(gradient).mul_(factor)

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Squares in float64, added in the order of the ranks. Sends 8 bytes to each, or 40."""
        gradients = gradients_of(self.parameters)
        counted = [local(g) for g in gradients if g.ndim or self.shards.rank == 0]
        if clips and self.exact:
            return exact_norm(counted, self._everywhere)
        lengths = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in counted]
        own = torch.zeros(1, dtype=torch.float64, device=self.shards.device)
        for length in lengths:
            own += length.square()
        return math.sqrt(math.fsum(self._everywhere(own).flatten().tolist()))

    def _everywhere(self, row: Tensor) -> Tensor:
        """The rows of all ranks that hold the gradient together, (ranks, row)."""
        rows = row.new_empty(self.shards.size * row.numel())
        self.shards.all_gather(rows, row, "control").wait()
        return rows.view(self.shards.size, -1)

    def clip_(self, limit: float, norm: float) -> None:
        kind = real_type(self.parameters[0].dtype)
        total = torch.tensor(norm, dtype=kind, device=self.shards.device)
        factor = (limit / (total + 1e-6)).clamp(max=1.0)  # as torch's clip_grads_with_norm_
        for gradient in gradients_of(self.parameters):
            local(gradient).mul_(factor)
