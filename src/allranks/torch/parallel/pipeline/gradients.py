"""The gradients of a model in stages, with one norm over all ranks."""

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
    """The gradients of this rank's parameters, with one norm for the whole model.

    Every rank contributes the norm of each of its gradients. Then all have the norms of one
    process, in the order of the model, and combine them as one process does. `counted` are the
    positions that this rank contributes, as several ranks of the `line` may hold a parameter. Of
    those at the positions `cut`, the ranks of `parts` hold a part each. `norm_rows` caches the rows
    that were summed, until gradients change.
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
        self.norm_rows: Tensor | None = None

    def scale_(self, factor: float | Tensor) -> None:
        super().scale_(factor)
        self.norm_rows = None

    def follow(self, parameters: list[nn.Parameter]) -> None:
        super().follow(parameters)
        self.norm_rows = None

    def add(self, value: Tensor) -> None:
        super().add(value)
        self.norm_rows = None

    def settle(self, unused: Sequence[int]) -> None:
        if self.norm_rows is not None and unused:
            self.norm_rows[:, list(unused)] = 0
        gone = {id(self.everywhere[position]) for position in unused}
        without = [p for p in self.parameters if id(p) in gone]
        for parameter in without:
            parameter.grad = None
        make_dense(self.parameters, len(without))

    def tensors(self) -> list[Tensor | None]:
        """The gradients of this rank, with meta tensors for those of others.

        Sends two numbers for each parameter of the model (`control`).
        """
        _, there = self._norms_and_flags(None)
        pairs = zip(self.everywhere, there, strict=True)
        return [
            p.grad if p.grad is not None else p.detach() if is_there else None
            for p, is_there in pairs
        ]

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Sends two numbers for each parameter of the model (`control`)."""
        if clips and self.exact:
            return exact_norm([p.grad for _, p in self.counted if p.grad is not None], self._rows)
        if is_accelerator(self.line.device):  # by the device, as without a wait
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
        """The same, with zeros for missing gradients."""
        norms = self._rows_of_all(None)[0]
        if clips:
            norms = norms.to(real_type(self.everywhere[0].dtype))
        norm: Tensor = torch.linalg.vector_norm(norms).double()
        return norm

    def _norms(self, kind: torch.dtype | None) -> list[float]:
        """The norm of every gradient of the model, each computed in dtype `kind` if set."""
        norms, there = self._norms_and_flags(kind)
        return [norm for norm, is_there in zip(norms, there, strict=True) if is_there]

    def _norms_and_flags(self, kind: torch.dtype | None) -> tuple[list[float], list[float]]:
        """For each parameter of the model, the norm of its gradient and whether it has one."""
        norms, there = self._rows_of_all(kind).tolist()
        return norms, there

    def _rows_of_all(self, kind: torch.dtype | None) -> Tensor:
        """The same as two rows, summed over the line."""
        rows = self.norm_rows
        if rows is None or kind is not None:
            rows = self.local_norms(kind)
            if self.parts is not None and self.cut:
                where = _positions(self.cut, rows.device)
                squares = rows[0].index_select(0, where).square()
                self.parts.all_reduce(squares, "control").wait()
                rows[0].index_copy_(0, where, squares.sqrt())
            self.line.all_reduce(rows, "control").wait()
        return rows

    def local_norms(self, kind: torch.dtype | None = None) -> Tensor:
        """This rank's contribution: a row of norms, and a row with 1 for each gradient."""
        present = [(at, _dense(p.grad)) for at, p in self.counted if p.grad is not None]
        rows = torch.zeros(2, len(self.everywhere), dtype=torch.float64, device=self.line.device)
        if present:
            gradients = [g for _, g in present]
            if kind is not None:
                gradients = [g.to(torch.promote_types(g.dtype, kind)) for g in gradients]
            where = _positions(tuple([at for at, _ in present]), rows.device)
            rows[0].index_copy_(0, where, torch.stack(torch._foreach_norm(gradients)).double())
            rows[1].index_fill_(0, where, 1)
        return rows

    def _rows(self, row: Tensor) -> Tensor:
        """The rows of all ranks, (ranks, row)."""
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
    """Positions as a tensor; cached, because the copy to a device makes the host wait."""
    return torch.tensor(places, device=device)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
