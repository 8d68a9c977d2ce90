"""The gradients of a step of which each rank holds parts, or those of its stages."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.strategies.reduction_tree import Span
from allranks.torch.accelerator import is_accelerator
from allranks.torch.checkpoint.state import local
from allranks.torch.comm.comm import Comm
from allranks.torch.model.reals import real_type, reals
from allranks.torch.parallel.data.reducer import Bucket, Reducer, exact_norm
from allranks.torch.parallel.sharded.call_order import NUMBERS, CallOrder
from allranks.torch.step.gradients import (
    ROW,
    Gradients,
    as_tensor,
    gradients_of,
    make_dense,
    multiply_,
)
from allranks.torch.step.tally import Tally, TallyLayout

TOGETHER_BYTES = 2**26  # assumed, not measured


class PartsOfRanks(Gradients):
    """Gradients that the ranks of `comm` hold in parts; each element counts once in the norm.

    Parts without dimensions are the same on all ranks. `known_norms` is the sum of all squares, if
    it is known already.
    """

    def __init__(self, parameters: list[nn.Parameter], comm: Comm, *, exact: bool) -> None:
        super().__init__(parameters, exact=exact)
        self.comm = comm

    def counted(self) -> list[Tensor]:
        """Those of them that this rank counts in the norm."""
        return [part for part in self.local_parts() if part.ndim or self.comm.rank == 0]

    def counted_for_norm(self, *, clips: bool, left_out: bool) -> list[Tensor]:
        """The same; in fewer tensors if nothing is clipped by the norm."""
        return self.counted()

    def scale_(self, factor: float | Tensor) -> None:
        squares = self.known_norms
        super().scale_(factor)
        self.known_norms = None if squares is None else squares * factor**2

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Squares of short rows in float64, added in rank order.

        Sends 8 bytes to each other rank, as `control`; five numbers for an exact norm.
        """
        if clips and self.exact:
            return exact_norm(self.counted(), partial(rows_of_ranks, self.comm))
        norm = float(self.norm_unread(clips=clips, left_out=left_out))
        return norm if math.isfinite(norm) else self._norm_of_doubles(self.counted())

    def _norm_of_doubles(self, counted: Sequence[Tensor]) -> float:
        """The same if squares may be too large for the dtype of the gradient."""
        wide = [part.to(torch.promote_types(part.dtype, torch.float64)) for part in counted]
        return math.sqrt(rows_of_ranks(self.comm, squares_of(wide, self.comm.device)).sum())

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        if self.known_norms is not None:
            return self.known_norms.sum().sqrt()
        counted = self.counted_for_norm(clips=clips, left_out=left_out)
        squares = squares_of(counted, self.comm.device)
        return rows_of_ranks(self.comm, squares).sum().sqrt()

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        total = as_tensor(norm, self.parameters[0])
        factor = (limit / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        multiply_(self.flats or self.local_parts(), factor)


class SomeCut(PartsOfRanks):
    """Gradients in `.grad`, perhaps DTensors: parts of some parameters, and all of the others.

    This rank counts the parts of the parameters in `cut` (ids). Full gradients are the same on
    every rank of `comm`, and the first rank counts them.
    """

    def __init__(
        self, parameters: list[nn.Parameter], comm: Comm, cut: Container[int], *, exact: bool
    ) -> None:
        super().__init__(parameters, comm, exact=exact)
        self.cut = cut

    def local_parts(self) -> list[Tensor]:
        return [local(gradient) for gradient in gradients_of(self.parameters)]

    def counted(self) -> list[Tensor]:
        params = [p for p in self.parameters if id(p) in self.cut or self.comm.rank == 0]
        return [local(gradient) for gradient in gradients_of(params)]


class GradientParts(PartsOfRanks):
    """`parts` are this rank's parts of the gradients; the `.grad` of the parameters are empty.

    `cut` returns this rank's rows of a full gradient. The parts are views of `flats`, which hold
    nothing else but padding.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        parts: Sequence[Tensor | None],
        cut: Callable[[Tensor], Tensor],
        flats: Sequence[Tensor],
        comm: Comm,
        *,
        exact: bool,
    ) -> None:
        super().__init__(parameters, comm, exact=exact)
        self.parts, self.cut, self.flats = list(parts), cut, list(flats)

    def settle(self, unused: Sequence[int]) -> None:
        for position in unused:
            self.parts[position] = None

    def follow(self, parameters: list[nn.Parameter]) -> None:
        known = {id(p): part for p, part in zip(self.parameters, self.parts, strict=True)}
        self.parameters = parameters
        self.parts, self.flats = [known.get(id(parameter)) for parameter in parameters], []
        self._add_grads()

    def add(self, value: Tensor) -> None:
        value.backward()
        self._add_grads()

    def _add_grads(self) -> None:
        """Add this rank's rows of each `.grad`, and empty it."""
        for position, parameter in enumerate(self.parameters):
            if (gradient := parameter.grad) is not None:
                rows, part = self.cut(gradient), self.parts[position]
                if part is None:
                    self.parts[position], self.flats = rows.clone(), []
                else:
                    part.add_(rows)
                parameter.grad = None

    def tensors(self) -> list[Tensor | None]:
        return self.parts

    def local_parts(self) -> list[Tensor]:
        return [part for part in self.parts if part is not None]

    def counted_for_norm(self, *, clips: bool, left_out: bool) -> list[Tensor]:
        if clips or left_out or not self.flats:
            return self.counted()
        return [flat for flat in self.flats if flat.ndim or self.comm.rank == 0]


def rows_of_ranks(comm: Comm, row: Tensor) -> Tensor:
    """The rows of all ranks, (ranks, row); every rank of `comm` calls this."""
    row = row.to(comm.device)
    if comm.size == 1:
        return row[None]
    rows = row.new_empty(comm.size * row.numel())
    comm.all_gather(rows, row, "control").wait()
    return rows.view(comm.size, -1)


class StagedGradients(Gradients):
    """The gradients of this rank's parameters, with one norm for the whole model.

    Every rank contributes the norm of each of its gradients. Then all have the norms of one
    process, in the order of the model, and combine them as one process does. `counted` are the
    positions that this rank contributes, as several ranks of the `line` may hold a parameter. Of
    those at the positions `cut`, the ranks of `parts` hold a part each. `known_norms` are the rows
    that were summed, if they are known already.
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

    def settle(self, unused: Sequence[int]) -> None:
        if self.known_norms is not None and unused:
            self.known_norms[:, list(unused)] = 0
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
            return exact_norm(
                [p.grad for _, p in self.counted if p.grad is not None],
                partial(rows_of_ranks, self.line),
            )
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
        rows = self.known_norms
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
        present = [(at, p.grad) for at, p in self.counted if p.grad is not None]
        rows = torch.zeros(2, len(self.everywhere), dtype=torch.float64, device=self.line.device)
        if present:
            gradients = [g.to_dense() if g.is_sparse else g for _, g in present]
            if kind is not None:
                gradients = [g.to(torch.promote_types(g.dtype, kind)) for g in gradients]
            where = _positions(tuple([at for at, _ in present]), rows.device)
            rows[0].index_copy_(0, where, torch.stack(torch._foreach_norm(gradients)).double())
            rows[1].index_fill_(0, where, 1)
        return rows

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        if self.parameters:
            super().clip_(limit, norm)


@lru_cache(maxsize=64)
def _positions(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Positions as a tensor; cached, because the copy to a device makes the host wait."""
    return torch.tensor(places, device=device)


def squares_of(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares, (1,) in float64.

    It adds norms of short rows in the dtype of the parts, which is as precise as that dtype; a copy
    in float64 takes four times as long.
    """
    start = torch.zeros(1, dtype=torch.float64, device=device)
    if (norms_of_short := _norms_of_short(parts)) is not None:
        each = norms_of_short.to(device, torch.float64)
        return torch.cat([start, each]).square_().sum(0, keepdim=True)
    flats = [reals(part.to_dense() if part.is_sparse else part).flatten() for part in parts]
    norms: dict[tuple[int, bool], Tensor] = {}  # by part, and whether it is of the tail of the part
    for alike in _of_one_kind(flats).values():
        kind = torch.promote_types(flats[alike[0]].dtype, torch.float32)
        ends = {at: flats[at].numel() // ROW * ROW for at in alike}
        rests = {at: flats[at][end:] for at, end in ends.items() if end < flats[at].numel()}
        if rests:
            stacked = torch.stack(torch._foreach_norm(list(rests.values()), 2, kind))
            each = stacked.to(device, torch.float64).split(1)
            norms |= {(at, True): norm for at, norm in zip(rests, each, strict=True)}
        wholes = {at: flats[at][:end].view(-1, ROW) for at, end in ends.items() if end}
        if wholes:
            rows = [
                torch.linalg.vector_norm(some, dim=1, dtype=kind)
                for some in _in_few(list(wholes.values()))
            ]
            sizes = [len(whole) for whole in wholes.values()]
            split = torch.cat(rows).to(device, torch.float64).split(sizes)
            norms |= {(at, False): norm for at, norm in zip(wholes, split, strict=True)}
    return torch.cat([start, *(norms[at] for at in sorted(norms))]).square_().sum(0, keepdim=True)


def _norms_of_short(parts: Sequence[Tensor]) -> Tensor | None:
    """The norm of each that is not empty, if all are short, contiguous and of one dtype."""
    some = [part for part in parts if part.numel()]
    if not some:
        return None
    kind, device = some[0].dtype, some[0].device
    for part in some:
        is_alike = part.dtype is kind and part.layout is torch.strided and part.device == device
        if not is_alike or kind.is_complex or part.numel() >= ROW or not part.is_contiguous():
            return None
    return torch.stack(torch._foreach_norm(some, 2, torch.promote_types(kind, torch.float32)))


def _of_one_kind(flats: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    """Positions, grouped by dtype and device for one kernel launch each."""
    positions: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for at, flat in enumerate(flats):
        positions.setdefault((flat.dtype, flat.device), []).append(at)
    return positions


def _in_few(wholes: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same rows in fewer tensors on an accelerator, where each costs a kernel launch.

    Copies at most `TOGETHER_BYTES` at a time.
    """
    if not is_accelerator(wholes[0].device):
        yield from wholes
        return
    groups: list[list[Tensor]] = [[]]
    size = 0
    for rows in wholes:
        size += rows.nbytes
        if groups[-1] and size > TOGETHER_BYTES:
            groups.append([])
            size = rows.nbytes
        groups[-1].append(rows)
    for group in groups:
        yield group[0] if len(group) == 1 else torch.cat(group)


# --- with tally ----------------------------------------------------------------------------------
# Numbers of each rank that are summed in one message with the tally.
#
# The norm of a gradient needs a sum over the ranks that hold parts of it. If these numbers are
# known when the passes end, they are sent with the tally, and the step waits once.


def summed_with_tally(local: Tally, row: Tensor, comm: Comm) -> tuple[Tally, Tensor]:
    """The sums of a tally and of a `row` in float64; every rank of `comm` calls this."""
    tally = local.tensor
    message = torch.cat([tally.to(torch.float64), row.flatten().to(tally.device)])
    comm.all_reduce(message).wait()
    return local.layout.tally(message[: tally.numel()].to(tally.dtype)), (
        message[tally.numel() :].view(row.shape)
    )


# --- parameters ----------------------------------------------------------------------------------
# Operations and hooks that are refused for a sharded model.


HOLDS_A_PART = "a rank holds a part of a parameter, and the hook expects the whole gradient"


def check_no_hooks(
    model: nn.Module,
    asked: str,
    why: str = HOLDS_A_PART,
    engine: Iterable[RemovableHandle] = (),
) -> None:
    """Raise `RequestError` for a parameter with a user's hook; no communication.

    A hook would get the gradient of a part, and a parameter that is cut is a new one. Hooks of the
    `engine` are allowed.
    """
    known = {handle.id for handle in engine}
    for name, parameter in model.named_parameters():
        hooks = *(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())
        if not known.issuperset(hooks):
            raise RequestError(
                asked=asked,
                found=f"a hook on the parameter {name!r}",
                why=why,
                do="change gradients in the optimizer, or --strategy single",
            )


def refuse_copies(model: nn.Module, strategy: str) -> None:
    """Make `copy.deepcopy` of the model, or of a module of it, raise `RequestError`.

    `torch.optim.swa_utils.AveragedModel` makes such a copy. A copy of an optimizer names parameters
    in the memo that stay as they are; there modules are copied as usual.
    """

    def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if not any(id(parameter) in memo for parameter in model.parameters()):
            raise RequestError(
                asked=f"copy.deepcopy of a {type(module).__name__} of the model, under {strategy}",
                found="a model of which each rank holds a part",
                why="the copy would be a part as well, and its average, or output, that of a part",
                do="the field ema of the task keeps an average (--set ema=0.99), trainer.weights() "
                "gives whole weights; or --strategy zero1",
            )
        hook = vars(module).pop("__deepcopy__")
        try:
            return copy.deepcopy(module, memo)
        finally:
            vars(module)["__deepcopy__"] = hook

    for module in model.modules():
        vars(module)["__deepcopy__"] = partial(copied, module)


# --- side message --------------------------------------------------------------------------------
# One small message per step that is summed over all ranks, in addition to the sharded gradients.
#
# [ tally | gradients of weights without dimensions, which are not cut | the order of calls ]


class SideMessage:
    """The message of one rank. `copies` are the ids of weights that another rank counts."""

    def __init__(
        self,
        reducer: Reducer,
        layout: TallyLayout,
        parameters: Sequence[nn.Parameter],
        copies: Collection[int],
    ) -> None:
        self.reducer, self.copies = reducer, copies
        self.uncut = [p for p in parameters if not p.ndim]
        size = layout.size + len(self.uncut) + NUMBERS
        self.flat = reducer.room(size, layout.like)
        self.tally = layout.tally(self.flat[: layout.size])
        self._gradients = self.flat[layout.size : size - NUMBERS]
        self._calls = self.flat[size - NUMBERS : size]
        self._orders: dict[int, Tensor] = {}
        reducer.prepare([Bucket(self.flat, self.flat)])

    def begin(self) -> None:
        """Begin a step."""
        self.flat.zero_()

    def move_gradients(self) -> None:
        """Move the gradients of a leaf into the message."""
        for parameter, number in zip(self.uncut, self._gradients, strict=True):
            if parameter.grad is not None and id(parameter) not in self.copies:
                number.copy_(parameter.grad)
            parameter.grad = None

    def leaf_done(self, leaf: Span) -> None:
        """Add a leaf that is not the last."""
        self.reducer.launch(0, leaf, last=False)

    def sum_up(self, leaf: Span, order: CallOrder, ranks: int, *, unread: bool) -> None:
        """Sum over so many ranks, with the last leaf; every rank calls this.

        Raises `RequestError` unless all ranks called units in the same `order`. If sums must stay
        `unread`, it sets `tally.is_right` instead.
        """
        if order.digest not in self._orders:
            self._orders = {order.digest: self._calls.new_tensor(order.numbers())}
        self._calls.copy_(self._orders[order.digest])
        self.reducer.launch(0, leaf, last=True)
        self.reducer.finish()
        if unread:
            self.tally.is_right = order.sums_agree(self._calls, ranks)
        else:
            with self.reducer.comm.reading():
                calls = self._calls.tolist()
            order.check_sums(calls, ranks)
        for parameter, number in zip(self.uncut, self._gradients, strict=True):
            parameter.grad = number.to(parameter.dtype, copy=True)
