"""The exchanges between ranks with parts of a sequence, in forward and backward.

    forward                                  backward
    this rank's rows (`own_rows`)            zeros in the rows of other ranks
    all-gather of the rows (`whole_rows`)    this rank's rows of the sum of the gradients
    all-to-all: rows to heads (`to_heads`)   all-to-all: heads to rows
    all-to-all: heads to rows (`to_rows`)    all-to-all: rows to heads

Every rank computes the same loss of the whole sequence and contributes its share of the gradient,
1/P. Each backward is the transpose of its forward. After the last block gradients are the same on
all ranks, so their sum takes no message; before other blocks it does. So the gradient of every
weight is the sum over the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.parallel.tensor.exchange import TensorExchange, by_pair
from allranks.torch.strategies.layout import part_sizes

HEADS, ROWS = 1, 2  # dimensions of the inputs of attention: (sample, head, position, feature)
POSITIONS = 1  # dimension of the input of a block: (sample, position, feature)


class Stretch(NamedTuple):
    """Consecutive positions: from `start` on in the sequence, from `at` on in the rank's
    tensor."""

    start: int
    length: int
    at: int


@dataclass(frozen=True)
class Span:
    """The parts of a sequence on the ranks, as stretches; `rank` is this one."""

    stretches: tuple[tuple[Stretch, ...], ...]
    rank: int

    @classmethod
    def of(cls, length: int, comm: Comm, *, folded: bool = False) -> Span:
        """The span of a sequence of this length: longer parts first, like `torch.chunk`.

        With `folded`, rank r of P has the parts r and 2P - 1 - r of 2P. Under a causal mask early
        positions attend to few keys and late ones to many, so all ranks compute equally much.
        """
        ranks, parts = comm.size, (2 if folded else 1) * comm.size
        sizes = part_sizes(length, parts)
        stretches = []
        for rank in range(ranks):
            first = Stretch(sum(sizes[:rank]), sizes[rank], 0)
            last = parts - 1 - rank
            second = Stretch(sum(sizes[:last]), sizes[last], first.length)
            stretches.append((first, second) if folded else (first,))
        return cls(tuple(stretches), comm.rank)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of positions of each rank."""
        return tuple(sum(stretch.length for stretch in of_rank) for of_rank in self.stretches)

    @property
    def whole(self) -> int:
        return sum(self.sizes)

    @property
    def local(self) -> int:
        return self.sizes[self.rank]

    def part_of(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """The positions of a rank; a view if they are one stretch."""
        parts = [tensor.narrow(dim, piece.start, piece.length) for piece in self.stretches[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def own_part(self, tensor: Tensor, dim: int) -> Tensor:
        """The positions of this rank; a view if they are one stretch."""
        return self.part_of(tensor, dim, self.rank)

    def put_own(self, whole: Tensor, dim: int, local: Tensor) -> None:
        """Copy the positions of this rank into their place in the whole."""
        for start, length, at in self.stretches[self.rank]:
            whole.narrow(dim, start, length).copy_(local.narrow(dim, at, length))

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole from the parts of all ranks, which may have padding at the end."""
        pieces = [
            (start, part.narrow(dim, at, length))
            for part, stretches in zip(parts, self.stretches, strict=True)
            for start, length, at in stretches
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=itemgetter(0))], dim)


@dataclass(frozen=True)
class RingMessage:
    """A message to the next rank, and one from the rank before."""

    outgoing: Tensor
    received: Tensor
    pending: tuple[Pending, ...]

    def wait(self) -> Tensor:
        """Wait; returns the received tensor. Afterwards `outgoing` may change."""
        for message in self.pending:
            message.wait()
        return self.received


class SequenceExchange(TensorExchange, ABC):
    """The ranks which have parts of a sequence in the blocks of a model.

    `asked`, `why` and `do` are parts of refusals of blocks which differ on a part.
    """

    asked: str
    why: ClassVar[str]
    do: ClassVar[str]
    cuts_arguments: ClassVar[bool] = True
    """Whether other arguments of a block are cut along positions, too; else they and their
    gradients are whole."""

    def span_of(self, length: int) -> Span:
        """The parts of a sequence of this length on the ranks."""
        return Span.of(length, self.comm)

    def all_rows(self, local: Tensor, span: Span) -> Tensor:
        """The positions of all ranks, (sample, position, …). No gradient; one all-gather."""
        return self.all(local, POSITIONS, span.whole)

    @abstractmethod
    def own_rows(self, whole: Tensor, span: Span, dim: int = POSITIONS) -> Tensor:
        """This rank's positions of a tensor that all ranks have."""

    @abstractmethod
    def whole_rows(self, local: Tensor, span: Span, *, is_last: bool) -> Tensor:
        """The positions of all ranks, (sample, position, feature); `is_last`: no block follows."""

    def refusal(self, found: str) -> RequestError:
        """The error for a block which differs on a part of the sequence."""
        return RequestError(asked=self.asked, found=found, why=self.why, do=self.do)

    def proved(self) -> AbstractContextManager[None]:
        """Within, a pass is compared with a whole one; later passes must do the same."""
        return nullcontext()

    def is_summed(self, weight: nn.Parameter) -> bool:
        """Whether the gradient of a block's weight is the sum over the ranks."""
        return True


class ContextExchange(SequenceExchange):
    """The ranks of the axis. `swapped` and `passed_on` are the bytes which this rank has sent in
    all-to-alls and round the ring, in steps."""

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

    def all_rows(self, local: Tensor, span: Span) -> Tensor:
        if not self.folds:
            return super().all_rows(local, span)
        most = max(span.sizes)
        padded = local.new_zeros(local.shape[0], most, *local.shape[2:])
        padded[:, : span.local] = local
        whole = self.all(padded, POSITIONS, self.comm.size * most)
        return span.joined(whole.split(most, POSITIONS), POSITIONS)

    def own_rows(self, whole: Tensor, span: Span, dim: int = POSITIONS) -> Tensor:
        """This rank's positions of a tensor that all ranks have. No communication."""

        def back(gradient: Tensor) -> Tensor:
            shape = list(gradient.shape)
            shape[dim] = span.whole
            total = gradient.new_zeros(shape)
            span.put_own(total, dim, gradient)
            return total

        return by_pair(lambda whole: span.own_part(whole, dim).contiguous(), back, whole)

    def whole_rows(self, local: Tensor, span: Span, *, is_last: bool) -> Tensor:
        """The positions of all ranks, (sample, position, feature); `is_last`: no block follows."""

        def back(gradient: Tensor) -> Tensor:
            if is_last:
                total = gradient * self.comm.size
            else:
                total = self.sum_(gradient.clone(memory_format=torch.contiguous_format))
            return span.own_part(total, POSITIONS).contiguous()

        return by_pair(partial(self.all_rows, span=span), back, local)

    def to_heads(self, local: Tensor, span: Span) -> Tensor:
        """Some heads of all positions, from all heads of this rank's positions."""
        to_heads = partial(self.heads_of_all_rows, span=span)
        return by_pair(to_heads, partial(self.rows_of_all_heads, span=span), local)

    def to_rows(self, whole: Tensor, span: Span) -> Tensor:
        """All heads of this rank's positions, from some heads of all positions."""
        to_rows = partial(self.rows_of_all_heads, span=span)
        return by_pair(to_rows, partial(self.heads_of_all_rows, span=span), whole)

    def heads_of_all_rows(self, local: Tensor, span: Span) -> Tensor:
        """(n, heads, t/P, d) -> (n, heads/P, t, d); one all-to-all."""
        parts = local.chunk(self.comm.size, HEADS)
        n, heads, _, features = parts[0].shape
        shapes = [(n, heads, rows, features) for rows in span.sizes]
        return torch.cat(self._swap(parts, shapes), ROWS)

    def rows_of_all_heads(self, whole: Tensor, span: Span) -> Tensor:
        """(n, heads/P, t, d) -> (n, heads, t/P, d); one all-to-all."""
        n, heads, _, features = whole.shape
        shapes = [(n, heads, span.local, features)] * self.comm.size
        return torch.cat(self._swap(whole.split(span.sizes, ROWS), shapes), HEADS)

    def _swap(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """All-to-all: send each rank a part; `shapes` are those of the received parts."""
        outgoing = torch.cat([part.reshape(-1) for part in parts])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = outgoing.new_empty(sum(sizes))
        if self.kind == "gradients":
            self.swapped += outgoing.nbytes
        give_sizes = [part.numel() for part in parts]
        self.comm.all_to_all(received, outgoing, sizes, give_sizes, self.kind).wait()
        pairs = zip(received.split(sizes), shapes, strict=True)
        return [piece.view(shape) for piece, shape in pairs]

    def pass_on(self, outgoing: Tensor, size: int, tag: int) -> RingMessage:
        """Send a flat tensor to the next rank of the ring; receive `size` numbers from the last.

        Odd ranks receive first: on NCCL sends of all ranks at once would deadlock.
        """
        comm, received = self.comm, outgoing.new_empty(size)
        if self.kind == "gradients":
            self.passed_on += outgoing.nbytes
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        if comm.rank % 2:
            coming = comm.receive(received, before, tag)
            going = comm.send(outgoing, after, tag, self.kind)
            return RingMessage(outgoing, received, (going, coming))
        going = comm.send(outgoing, after, tag, self.kind)
        return RingMessage(outgoing, received, (going, comm.receive(received, before, tag)))
