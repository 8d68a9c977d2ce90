"""The gradient of a step of which each rank holds a part."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor, nn

from allranks.torch.checkpoint.tree import local
from allranks.torch.comm import Comm
from allranks.torch.model.reals import reals
from allranks.torch.reducers.exact_norm import exact_norm
from allranks.torch.step.gradients import Gradients, as_tensor, gradients_of, multiply_

ROW = 4096  # numbers whose squares are added in their own type


class PartsOfRanks(Gradients):
    """What every such gradient is: each element counts once in the norm, whoever holds it.

    The ranks of `comm` hold it together. Parts of no dimension are the same on all of them.
    `squares` is the sum of all squares where it is known already.
    """

    def __init__(self, parameters: list[nn.Parameter], comm: Comm, *, exact: bool) -> None:
        super().__init__(parameters, exact=exact)
        self.comm = comm
        self.squares: Tensor | None = None

    @abstractmethod
    def held(self) -> list[Tensor]:
        """The memory of this rank's parts."""

    def counted(self) -> list[Tensor]:
        """Of these, what this rank counts in the norm."""
        return [part for part in self.held() if part.ndim or self.comm.rank == 0]

    def scale_(self, factor: float | Tensor) -> None:
        multiply_(self.held(), factor)
        if self.squares is not None:
            self.squares = self.squares * float(factor) ** 2

    def sign_(self) -> None:
        for part in self.held():
            part.sign_()

    def follow(self, parameters: list[nn.Parameter]) -> None:
        super().follow(parameters)
        self.squares = None

    def add(self, value: Tensor) -> None:
        super().add(value)
        self.squares = None

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Squares of short rows in float64, added in the order of the ranks.

        Sends 8 bytes to each other rank, as `control`; five numbers for one that is exact.
        """
        counted = self.counted()
        if clips and self.exact:
            return exact_norm(counted, self._everywhere)
        if self.squares is not None and math.isfinite(norm := math.sqrt(self.squares)):
            return norm
        norm = float(self.norm_unread(clips=clips, left_out=left_out))
        return norm if math.isfinite(norm) else self._norm_of_doubles(counted)

    def _norm_of_doubles(self, counted: Sequence[Tensor]) -> float:
        """The same where squares may be too large for the type of the gradient."""
        wide = [part.to(torch.promote_types(part.dtype, torch.float64)) for part in counted]
        return math.sqrt(self._everywhere(squares_of(wide, self.comm.device)).sum())

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        own = squares_of(self.counted(), self.comm.device)
        return self._everywhere(own).sum().sqrt()

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        total = as_tensor(norm, self.parameters[0])
        factor = (limit / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        multiply_(self.held(), factor)

    def _everywhere(self, row: Tensor) -> Tensor:
        """The rows of all ranks, (ranks, row)."""
        if self.comm.size == 1:
            return row[None]
        rows = row.new_empty(self.comm.size * row.numel())
        self.comm.all_gather(rows, row, "control").wait()
        return rows.view(self.comm.size, -1)


class SomeCut(PartsOfRanks):
    """Those in `.grad`, which may be DTensors: parts of some parameters, and all of the others.

    The parts that this rank counts are those of the parameters in `cut` (their ids). What is whole
    is the same on every rank of `comm`: the first one counts it.
    """

    def __init__(
        self, parameters: list[nn.Parameter], comm: Comm, cut: Container[int], *, exact: bool
    ) -> None:
        super().__init__(parameters, comm, exact=exact)
        self.cut = cut

    def held(self) -> list[Tensor]:
        return [local(gradient) for gradient in gradients_of(self.parameters)]

    def counted(self) -> list[Tensor]:
        own = [p for p in self.parameters if id(p) in self.cut or self.comm.rank == 0]
        return [local(gradient) for gradient in gradients_of(own)]


class GradientParts(PartsOfRanks):
    """`parts` are what this rank holds of the gradients; the `.grad` of the parameters are empty.

    `cut` gives this rank's part of a whole gradient: its own rows.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        parts: Sequence[Tensor | None],
        cut: Callable[[Tensor], Tensor],
        comm: Comm,
        *,
        exact: bool,
    ) -> None:
        super().__init__(parameters, comm, exact=exact)
        self.parts, self.cut = list(parts), cut

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

    def held(self) -> list[Tensor]:
        return [part for part in self.parts if part is not None]


def squares_of(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares, (1,) in float64.

    Norms of short rows in the type of the parts, which lose nothing that it can tell; a copy of all
    of it in float64 takes four times as long.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for part in parts:
        flat = reals(part.to_dense() if part.is_sparse else part).flatten()
        kind = torch.promote_types(flat.dtype, torch.float32)
        whole = flat.numel() // ROW * ROW
        if whole:
            rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=kind)
            norms.append(rows.to(device, torch.float64))
        if whole < flat.numel():
            rest = torch.linalg.vector_norm(flat[whole:], dtype=kind)
            norms.append(rest[None].to(device, torch.float64))
    return torch.cat(norms).square_().sum(0, keepdim=True)
