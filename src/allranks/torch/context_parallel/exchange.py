"""What ranks with parts of a sequence exchange: those of the context axis, and in backward.

    forward                                  backward
    this rank's rows (`own_rows`)            zeros where the rows of others are
    all-gather of the rows (`whole_rows`)    this rank's rows of the sum of the gradients
    all-to-all: rows to heads (`to_heads`)   all-to-all: heads to rows
    all-to-all: heads to rows (`to_rows`)    all-to-all: rows to heads

Every rank computes the same loss of the whole sequence and brings in its share of the gradient,
1/P. Each backward is the transpose of its forward. Behind the last block gradients are the same on
all ranks, so their sum takes no message; it does where blocks follow. So the gradient of every
weight, wherever it is used, is the sum over the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.parallel.tensor.exchange import TensorExchange, part_sizes

HEADS, ROWS = 1, 2  # dimensions of what attention is given: (sample, head, position, feature)
POSITIONS = 1  # the dimension of what a block is given: (sample, position, feature)


class Stretch(NamedTuple):
    """Positions that follow each other: from `start` on in the sequence, from `at` on where the
    rank has them."""

    start: int
    length: int
    at: int


@dataclass(frozen=True)
class Span:
    """How a sequence lies on the ranks: the stretches of each; those of `rank` are here."""

    stretches: tuple[tuple[Stretch, ...], ...]
    rank: int

    @classmethod
    def of(cls, length: int, comm: Comm, *, folded: bool = False) -> Span:
        """That of a sequence: longer parts first, as `torch.chunk` cuts.

        Where it is `folded`, rank r of P has the parts r and 2P - 1 - r of 2P: under a causal mask
        what an early position does not see a late one does, and each rank has as much to compute.
        """
        ranks, parts = comm.size, (2 if folded else 1) * comm.size
        sizes = part_sizes(length, parts)
        found = []
        for rank in range(ranks):
            first = Stretch(sum(sizes[:rank]), sizes[rank], 0)
            last = parts - 1 - rank
            second = Stretch(sum(sizes[:last]), sizes[last], first.length)
            found.append((first, second) if folded else (first,))
        return cls(tuple(found), comm.rank)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many positions each rank has."""
        return tuple(sum(one.length for one in held) for held in self.stretches)

    @property
    def whole(self) -> int:
        return sum(self.sizes)

    @property
    def own(self) -> int:
        return self.sizes[self.rank]

    def part_of(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """The positions of a rank; a view where they are one stretch."""
        parts = [tensor.narrow(dim, one.start, one.length) for one in self.stretches[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def own_part(self, tensor: Tensor, dim: int) -> Tensor:
        """The positions of this rank; a view where they are one stretch."""
        return self.part_of(tensor, dim, self.rank)

    def put_own(self, whole: Tensor, dim: int, own: Tensor) -> None:
        """Write the positions of this rank where they are in the whole."""
        for start, length, at in self.stretches[self.rank]:
            whole.narrow(dim, start, length).copy_(own.narrow(dim, at, length))

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole, of what each rank has of it; they may have more behind that."""
        pieces = [
            (start, part.narrow(dim, at, length))
            for part, held in zip(parts, self.stretches, strict=True)
            for start, length, at in held
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=itemgetter(0))], dim)


@dataclass(frozen=True)
class OnItsWay:
    """A message to the next rank, and one from the rank before."""

    sent: Tensor
    received: Tensor
    pending: tuple[Pending, ...]

    def wait(self) -> Tensor:
        """What was received; what was sent may change again."""
        for one in self.pending:
            one.wait()
        return self.received


class SequenceExchange(TensorExchange, ABC):
    """The ranks that hold parts of a sequence while it goes through the blocks of a model.

    `asked` is what cuts it, for refusals; `why` a block is another one on a part, and what to `do`.
    """

    asked: str
    why: ClassVar[str]
    do: ClassVar[str]
    cuts_arguments: ClassVar[bool] = True
    """Whether other arguments of a block are cut along positions, too. Where not they are whole,
    and their gradients as well."""

    def span_of(self, length: int) -> Span:
        """How a sequence of this length lies on the ranks."""
        return Span.of(length, self.comm)

    def all_rows(self, own: Tensor, span: Span) -> Tensor:
        """The positions of all ranks, (sample, position, …). No gradient; one all-gather."""
        return self.all(own, POSITIONS, span.whole)

    @abstractmethod
    def own_rows(self, whole: Tensor, span: Span, dim: int = POSITIONS) -> Tensor:
        """This rank's positions of what all ranks hold."""

    @abstractmethod
    def whole_rows(self, own: Tensor, span: Span, *, is_last: bool) -> Tensor:
        """The positions of all ranks, (sample, position, feature); `is_last`: no block follows."""

    def refusal(self, found: str) -> RequestError:
        """A block that is another one on a part of the sequence."""
        return RequestError(asked=self.asked, found=found, why=self.why, do=self.do)

    def proved(self) -> AbstractContextManager[None]:
        """Within, a pass is compared with a whole one; what later ones do must be the same."""
        return nullcontext()

    def is_summed(self, weight: nn.Parameter) -> bool:
        """Whether the gradient of a block's weight is the sum of what the ranks have of it."""
        return True


class ContextExchange(SequenceExchange):
    """The ranks of the axis. `swapped` and `passed_on` are the bytes that this rank has given to
    all-to-alls, and sent round the ring, in steps."""

    asked = "--strategy context"
    why = (
        "a rank has some positions of the sequence there, so a block may look along it in "
        "scaled_dot_product_attention alone: not by positions that it counts itself, a "
        "convolution, a mean, an RNN or attention written out, nor draw by "
        "torch.nn.functional.dropout"
    )
    do = "hand positions to each block as an argument, use nn.Dropout, or --strategy fsdp"

    def __init__(self, comm: Comm, *, folds: bool = False) -> None:
        super().__init__(comm)
        self.folds = folds
        self.swapped = self.passed_on = 0

    def span_of(self, length: int) -> Span:
        return Span.of(length, self.comm, folded=self.folds)

    def all_rows(self, own: Tensor, span: Span) -> Tensor:
        if not self.folds:
            return super().all_rows(own, span)
        most, ranks = max(span.sizes), self.comm.size
        rows = own.movedim(POSITIONS, 0)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: span.own] = rows
        all_of_them = padded.new_empty(ranks * most, *rows.shape[1:])
        if self.kind == "gradients":
            self.gathered += all_of_them.nbytes
        self.comm.all_gather(all_of_them, padded, self.kind).wait()
        return span.joined(all_of_them.split(most), 0).movedim(0, POSITIONS).contiguous()

    def own_rows(self, whole: Tensor, span: Span, dim: int = POSITIONS) -> Tensor:
        """This rank's positions of what all ranks hold. Sends nothing."""
        found: Tensor = _OwnRows.apply(whole, span, dim)  # type: ignore[no-untyped-call]
        return found

    def whole_rows(self, own: Tensor, span: Span, *, is_last: bool) -> Tensor:
        """The positions of all ranks, (sample, position, feature); `is_last`: no block follows."""
        found: Tensor = _WholeRows.apply(self, own, span, is_last)  # type: ignore[no-untyped-call]
        return found

    def to_heads(self, own: Tensor, span: Span) -> Tensor:
        """Some heads of all positions, from all heads of this rank's positions."""
        found: Tensor = _ToHeads.apply(self, own, span)  # type: ignore[no-untyped-call]
        return found

    def to_rows(self, whole: Tensor, span: Span) -> Tensor:
        """All heads of this rank's positions, from some heads of all positions."""
        found: Tensor = _ToRows.apply(self, whole, span)  # type: ignore[no-untyped-call]
        return found

    def heads_of_all_rows(self, own: Tensor, span: Span) -> Tensor:
        """(n, heads, t/P, d) -> (n, heads/P, t, d); one all-to-all."""
        parts = own.chunk(self.comm.size, HEADS)
        n, heads, _, features = parts[0].shape
        shapes = [(n, heads, rows, features) for rows in span.sizes]
        return torch.cat(self._swap(parts, shapes), ROWS)

    def rows_of_all_heads(self, whole: Tensor, span: Span) -> Tensor:
        """(n, heads/P, t, d) -> (n, heads, t/P, d); one all-to-all."""
        n, heads, _, features = whole.shape
        shapes = [(n, heads, span.own, features)] * self.comm.size
        return torch.cat(self._swap(whole.split(span.sizes, ROWS), shapes), HEADS)

    def _swap(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Give each rank a part; `shapes` are those of the parts that they give to this one."""
        given = torch.cat([part.reshape(-1) for part in parts])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = given.new_empty(sum(sizes))
        if self.kind == "gradients":
            self.swapped += given.nbytes
        give_sizes = [part.numel() for part in parts]
        self.comm.all_to_all(received, given, sizes, give_sizes, self.kind).wait()
        pairs = zip(received.split(sizes), shapes, strict=True)
        return [piece.view(shape) for piece, shape in pairs]

    def pass_on(self, sent: Tensor, size: int, tag: int) -> OnItsWay:
        """Send a flat tensor to the next rank of the ring; from the one before come `size` numbers.

        Ranks of odd number receive first: on NCCL none may wait for one that waits.
        """
        comm, received = self.comm, sent.new_empty(size)
        if self.kind == "gradients":
            self.passed_on += sent.nbytes
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        if comm.rank % 2:
            coming = comm.receive(received, before, tag)
            return OnItsWay(sent, received, (comm.send(sent, after, tag, self.kind), coming))
        going = comm.send(sent, after, tag, self.kind)
        return OnItsWay(sent, received, (going, comm.receive(received, before, tag)))


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, span: Span, dim: int) -> Tensor:
        ctx.span, ctx.dim = span, dim
        return span.own_part(whole, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        shape = list(gradient.shape)
        shape[ctx.dim] = ctx.span.whole
        whole = gradient.new_zeros(shape)
        ctx.span.put_own(whole, ctx.dim, gradient)
        return whole, None, None


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: ContextExchange, own: Tensor, span: Span, is_last: bool
    ) -> Tensor:
        ctx.exchange, ctx.span, ctx.is_last = exchange, span, is_last
        return exchange.all_rows(own, span)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        exchange, span = ctx.exchange, ctx.span
        if ctx.is_last:
            total = gradient * exchange.comm.size
        else:
            total = exchange.sum_(gradient.clone(memory_format=torch.contiguous_format))
        return None, span.own_part(total, POSITIONS).contiguous(), None, None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: ContextExchange, own: Tensor, span: Span) -> Tensor:
        ctx.exchange, ctx.span = exchange, span
        return exchange.heads_of_all_rows(own, span)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.rows_of_all_heads(gradient, ctx.span), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: ContextExchange, whole: Tensor, span: Span) -> Tensor:
        ctx.exchange, ctx.span = exchange, span
        return exchange.rows_of_all_heads(whole, span)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.heads_of_all_rows(gradient, ctx.span), None
