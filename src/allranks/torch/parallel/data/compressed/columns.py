"""1-bit SGD: columns of each matrix in a few bits a number, quantised twice, with two residuals.

    1. every rank quantises its gradients with its residual, and sends stripe r of the columns to
       rank r
    2. rank r adds these, its own quantised one too, in rank order
    3. it quantises the sum with a second residual, for its stripe, and sends it to all ranks

A column belongs to one output: a row of a linear layer's weight, the weights of one output channel
of a convolution (OIHW). Vectors and scalars are summed uncompressed. Stripes have one size, the
last ones padded; they do not change the result. A single rank quantises twice too. Seide et al.
2014, 1-Bit Stochastic Gradient Descent; CNTK's `AllReduceDistGradAggregator.h`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from allranks.strategies.compressed import is_matrix
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.compression.codecs import ColumnQuantizer
from allranks.torch.parallel.data.compressed.gathered import BucketExchange, Compressed, real_view
from allranks.torch.parallel.data.reducer import Bucket


def n_bit(comm: Comm, shards: int, *, bits: str, after: int) -> Compressed:
    """An all-to-all, an all-gather and an all-reduce (of all but matrices) per bucket.

    Sends 2(N-1)/N of `bits` a number and 8 bytes a column, of vectors and the tally.
    """
    quantizer = ColumnQuantizer(int(bits))
    return Compressed(comm, shards, lambda bucket: _Striped(comm, bucket, quantizer), after)


one_bit = partial(n_bit, bits="1")


@dataclass
class _Matrix:
    """Columns of one gradient, a row each here: residuals of all, and of a stripe's sum."""

    view: Tensor
    ranks: int
    quantizer: ColumnQuantizer
    residual: Tensor = field(init=False)
    of_sum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.count, self.length = self.view.shape[0], self.view[0].numel()
        self.stripe = -(-self.count // self.ranks)
        self.residual = self.view.new_zeros((self.ranks * self.stripe, self.length))
        self.of_sum = self.view.new_zeros((self.stripe, self.length))

    def outgoing(self) -> Tensor:
        """This rank's messages, (rank, bytes)."""
        local = self.residual[: self.count]
        local.add_(self.view.reshape(local.shape))
        return self._encoded(self.residual).view(self.ranks, -1)

    def summed(self, received: Tensor) -> Tensor:
        """The encoded sum of this rank's stripe, (bytes,), from messages (rank, bytes)."""
        for message in received:
            self.quantizer.add_decoded(message.reshape(self.stripe, -1), self.of_sum)
        return self._encoded(self.of_sum).flatten()

    def decode_sums(self, every: Tensor) -> None:
        """Decode the sums of all stripes, (rank, bytes), into the bucket."""
        columns = every.reshape(self.ranks * self.stripe, -1)[: self.count]
        total = self.quantizer.decode(columns, self.length, self.view.dtype)
        self.view.copy_(total.view(self.view.shape))

    def _encoded(self, residual: Tensor) -> Tensor:
        message = self.quantizer.encode(residual)
        self.quantizer.add_decoded(message, residual, alpha=-1)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return message


class _Striped(BucketExchange):
    """One bucket, whose matrices are sent by columns."""

    def __init__(self, comm: Comm, bucket: Bucket, quantizer: ColumnQuantizer) -> None:
        self.comm = comm
        self.plain: list[Tensor] = []
        self.matrices: dict[str, _Matrix] = {}
        for name, view in bucket.views.items():
            if view.is_complex() or not is_matrix(tuple(view.shape)):
                self.plain.append(real_view(view))
            else:
                self.matrices[name] = _Matrix(view, comm.size, quantizer)
        self.plain.append(bucket.flat[bucket.gradients.numel() :])

    def messages(self) -> Iterator[Pending]:
        plain = torch.cat([tensor.flatten() for tensor in self.plain])
        plain_sum = self.comm.all_reduce(plain)
        matrices = list(self.matrices.values())
        if matrices:
            rows = [matrix.outgoing() for matrix in matrices]
            sizes = [row.shape[1] for row in rows]
            received = outgoing = torch.cat(rows, 1)
            if self.comm.size > 1:
                received = torch.empty_like(outgoing)
                parts = [outgoing.shape[1]] * self.comm.size
                yield self.comm.all_to_all(received.view(-1), outgoing.view(-1), parts, parts)
            stripes = received.split(sizes, 1)
            sums = [matrix.summed(stripe) for matrix, stripe in zip(matrices, stripes, strict=True)]
            stripe = every = torch.cat(sums)
            if self.comm.size > 1:
                every = torch.empty_like(outgoing).view(-1)
                yield self.comm.all_gather(every, stripe)
            totals = every.view(self.comm.size, -1).split(sizes, 1)
            for matrix, total in zip(matrices, totals, strict=True):
                matrix.decode_sums(total)
        yield plain_sum
        plain_parts = plain.split([tensor.numel() for tensor in self.plain])
        for tensor, part in zip(self.plain, plain_parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def residuals(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {"residual": matrix.residual, "residual_of_sum": matrix.of_sum}
            for name, matrix in self.matrices.items()
        }
