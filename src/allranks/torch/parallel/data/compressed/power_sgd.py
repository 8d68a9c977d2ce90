"""PowerSGD: of each matrix of gradients a product of two thin factors, by one power iteration.

    M = gradient + e                  of each rank, n x m; a tensor of more axes is (first, others)
    P = sum of M Q over the ranks     then orthonormal columns
    Q = sum of M' P over the ranks    of which the next step begins
    e = M - P (M' P)'                 what this rank did not send
    P Q' is the sum of all gradients

Vogels et al. 2019, arXiv 1905.13727. e is the paper's, of each rank; PyTorch's hook takes off the
product of the sums, which gives the same sequence of sums. What is no matrix, or shrinks less than
`min_rate` times, is summed as it is. A Q that a step begins with is made orthonormal too, which
leaves P Q' as it is but for rounding; where it has lost a column, a drawn one takes its place.
Matrices of one shape go through together. One rank alone does the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allranks.strategies.reductions.compressed import factor_rank
from allranks.torch.comm.comm import Comm
from allranks.torch.comm.subgroups import Pending
from allranks.torch.compression.cosines import orthonormal
from allranks.torch.parallel.data.compressed.gathered import BucketExchange, Compressed, real_view
from allranks.torch.parallel.data.reducer import Bucket

LARGE = 1 << 14
"""Matrices of so many numbers are multiplied one by one."""


class PowerSGD(Compressed):
    """Two all-reduces per bucket. Sends 2(N-1)/N of both factors, of the rest and the tally."""

    def __init__(self, comm: Comm, shards: int, *, rank: int, min_rate: float, after: int) -> None:
        super().__init__(comm, shards, after)
        self.rank, self.min_rate = rank, min_rate

    def exchange_of(self, bucket: Bucket) -> BucketExchange:
        return _Factored(self.comm, bucket, self.rank, self.min_rate)


@dataclass
class _Group:
    """Matrices of one shape: residuals (b, n, m), right factors and spare ones (b, m, r)."""

    names: list[str]
    views: list[Tensor]
    rank: int
    residual: Tensor = field(init=False)
    right: Tensor = field(init=False)
    spare: Tensor = field(init=False)

    def __post_init__(self) -> None:
        first = self.views[0]
        rows, columns = first.shape[0], first[0].numel()
        self.residual = first.new_zeros((len(self.views), rows, columns))
        drawn = [_drawn(name, columns, self.rank) for name in self.names]
        self.spare = torch.stack(drawn).to(first)
        self.right = self.spare.clone()

    def left_factors(self) -> Tensor:
        """(b, n, r), of this rank. The residual is the whole matrix from here on."""
        for residual, view in zip(self.residual, self.views, strict=True):
            residual.add_(view.reshape(residual.shape))
        right = orthonormal(self.right)
        lost = (right == 0).all(1, keepdim=True)
        return _product(self.residual, torch.where(lost, self.spare, right))

    def right_factors(self, left: Tensor) -> Tensor:
        """(b, m, r), of this rank, and the residual what they do not say."""
        right = _product(self.residual.mT, left)
        for residual, rows, columns in zip(self.residual, left, right, strict=True):
            residual.addmm_(rows, columns.mT, alpha=-1)
        if right.device.type != "cpu" or not right.isfinite().all():  # a pass less, without a wait
            self.residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return right

    def take(self, left: Tensor, right: Tensor) -> None:
        """Lay the product of the sums into the bucket; the next step begins with `right`."""
        for view, rows, columns in zip(self.views, left, right, strict=True):
            if view.is_contiguous():  # a product in new memory takes eight times as long
                torch.mm(rows, columns.mT, out=view.view(len(rows), len(columns)))
            else:
                view.copy_((rows @ columns.mT).view(view.shape))
        self.right.copy_(right.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


class _Factored(BucketExchange):
    """One bucket, its matrices in groups of one shape."""

    def __init__(self, comm: Comm, bucket: Bucket, rank: int, min_rate: float) -> None:
        self.comm = comm
        self.tally = bucket.flat[bucket.gradients.numel() :]
        self.plain: list[Tensor] = []
        shapes: dict[tuple[int, int], tuple[list[str], list[Tensor]]] = {}
        self.groups: list[_Group] = []
        ranks = {}
        for name, view in bucket.views.items():
            own = 0 if view.is_complex() else factor_rank(tuple(view.shape), rank, min_rate)
            if not own:
                self.plain.append(real_view(view))
                continue
            shape = (view.shape[0], view[0].numel())
            ranks[shape] = own
            names, views = shapes.setdefault(shape, ([], []))
            names.append(name)
            views.append(view)
        self.groups = [_Group(n, v, ranks[shape]) for shape, (n, v) in shapes.items()]

    def messages(self) -> Iterator[Pending]:
        lefts = [group.left_factors() for group in self.groups]
        if lefts:
            flat = torch.cat([left.flatten() for left in lefts])
            yield self.comm.all_reduce(flat)
            lefts = [orthonormal(left) for left in _split(flat, lefts)]
        rights = [group.right_factors(left) for group, left in zip(self.groups, lefts, strict=True)]
        sent = [*rights, *self.plain, self.tally]
        flat = torch.cat([tensor.flatten() for tensor in sent])
        yield self.comm.all_reduce(flat)
        sums = _split(flat, sent)
        for own, total in zip([*self.plain, self.tally], sums[len(rights) :], strict=True):
            own.copy_(total)
        for group, left, right in zip(self.groups, lefts, sums, strict=False):
            group.take(left, right)

    def kept(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {"residual": group.residual[i], "right": group.right[i]}
            for group in self.groups
            for i, name in enumerate(group.names)
        }


def _product(whole: Tensor, thin: Tensor) -> Tensor:
    """(b, n, m) by (b, m, r). Small ones as a batch, which on a CPU takes 30 times as long else."""
    if whole[0].numel() < LARGE:
        return whole @ thin
    return torch.stack([torch.mm(*pair) for pair in zip(whole, thin, strict=True)])


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The parts of `flat`, one after another, in the shapes of others."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _drawn(name: str, rows: int, columns: int) -> Tensor:
    """Normal numbers that follow a parameter's name alone: the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn((rows, columns), generator=generator, dtype=torch.float64)
