"""The gradients of a model of which ranks hold stages, with one norm for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from allranks.torch.accelerator import is_accelerator
from allranks.torch.comm.comm import Comm
from allranks.torch.model.reals import real_type
from allranks.torch.parallel.data.reducer import exact_norm
from allranks.torch.step.gradients import Gradients, make_dense


class StagedGradients(Gradients):
    """The gradients of this rank's parameters, of all those of a model, with one norm for all.

    Every rank tells the norm of each gradient that it holds; all then have the norms of one
    process, in the order of the model, and put them together as one process does. `counted` are the
    positions of those that this rank tells, as a parameter may be held by several of the `line`. Of
    those at the positions `cut` the ranks of `parts` hold a part each. `told` is what all have told
    already, until something changes it.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        counted: Sequence[tuple[int, nn.Parameter]],
        everywhere: list[nn.Parameter],
        line: Comm,
        *,
        exact: bool = False,
        parts: Comm | None = None,
        cut: Sequence[int] = (),
    ) -> None:
        super().__init__(parameters, exact=exact)
        self.parts, self.cut = parts, tuple(cut)
        self.counted, self.everywhere, self.line = list(counted), everywhere, line
        self.told: Tensor | None = None

    def scale_(self, factor: float | Tensor) -> None:
        super().scale_(factor)
        self.told = None

    def follow(self, parameters: list[nn.Parameter]) -> None:
        super().follow(parameters)
        self.told = None

    def add(self, value: Tensor) -> None:
        super().add(value)
        self.told = None

    def settle(self, unused: Sequence[int]) -> None:
        if self.told is not None and unused:
            self.told[:, list(unused)] = 0
        gone = {id(self.everywhere[position]) for position in unused}
        without = [p for p in self.parameters if id(p) in gone]
        for parameter in without:
            parameter.grad = None
        make_dense(self.parameters, len(without))

    def tensors(self) -> list[Tensor | None]:
        """Those of this rank, with meta tensors for those of others.

        Sends two numbers for each parameter of the model (`control`).
        """
        _, there = self._told(None)
        pairs = zip(self.everywhere, there, strict=True)
        return [
            p.grad if p.grad is not None else p.detach() if is_there else None
            for p, is_there in pairs
        ]

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Sends two numbers for each parameter of the model (`control`)."""
        if clips and self.exact:
            return exact_norm([p.grad for _, p in self.counted if p.grad is not None], self._rows)
        if is_accelerator(self.line.device):  # by the device, as where nobody waits for it
            norm = float(self.norm_unread(clips=clips, left_out=left_out))
            return norm if math.isfinite(norm) else math.hypot(*self._norms(torch.float64))
        norms = self._norms(None)
        if clips:
            kind = real_type(self.everywhere[0].dtype)
            norm = float(torch.linalg.vector_norm(torch.tensor(norms, dtype=kind)))
        else:
            norm = math.hypot(*norms)
        return norm if math.isfinite(norm) else math.hypot(*self._norms(torch.float64))

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        """The same of rows of zeros where there is no gradient."""
        norms = self._rows_of_all(None)[0]
        if clips:
            norms = norms.to(real_type(self.everywhere[0].dtype))
        found: Tensor = torch.linalg.vector_norm(norms).double()
        return found

    def _norms(self, kind: torch.dtype | None) -> list[float]:
        """The norm of every gradient of the model, each computed as `kind` if given."""
        norms, there = self._told(kind)
        return [norm for norm, is_there in zip(norms, there, strict=True) if is_there]

    def _told(self, kind: torch.dtype | None) -> tuple[list[float], list[float]]:
        """For each parameter of the model the norm of its gradient, and whether there is one."""
        norms, there = self._rows_of_all(kind).tolist()
        return norms, there

    def _rows_of_all(self, kind: torch.dtype | None) -> Tensor:
        """The same, as two rows that are summed over the line."""
        found = self.told
        if found is None or kind is not None:
            found = self.own(kind)
            if self.parts is not None and self.cut:
                where = _positions(self.cut, found.device)
                squares = found[0].index_select(0, where).square()
                self.parts.all_reduce(squares, "control").wait()
                found[0].index_copy_(0, where, squares.sqrt())
            self.line.all_reduce(found, "control").wait()
        return found

    def own(self, kind: torch.dtype | None = None) -> Tensor:
        """What this rank tells: a row of norms, and a row of ones where it holds a gradient."""
        held = [(at, _dense(p.grad)) for at, p in self.counted if p.grad is not None]
        found = torch.zeros(2, len(self.everywhere), dtype=torch.float64, device=self.line.device)
        if held:
            gradients = [g if kind is None else g.to(_wider(g, kind)) for _, g in held]
            where = _positions(tuple([at for at, _ in held]), found.device)
            found[0].index_copy_(0, where, torch.stack(torch._foreach_norm(gradients)).double())
            found[1].index_fill_(0, where, 1)
        return found

    def _rows(self, row: Tensor) -> Tensor:
        """What each rank gives, (ranks, row)."""
        row = row.to(self.line.device)
        if self.line.size == 1:
            return row[None]
        whole = row.new_empty(self.line.size * row.numel())
        self.line.all_gather(whole, row, "control").wait()
        return whole.view(self.line.size, -1)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        if self.parameters:
            super().clip_(limit, norm)


@lru_cache(maxsize=64)
def _positions(places: tuple[int, ...], device: torch.device) -> Tensor:
    """They are the same in each step: the host waits for a device to take them once."""
    return torch.tensor(places, device=device)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _wider(gradient: Tensor, kind: torch.dtype) -> torch.dtype:
    return torch.promote_types(gradient.dtype, kind)
