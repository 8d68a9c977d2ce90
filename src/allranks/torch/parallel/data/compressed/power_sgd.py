"""PowerSGD: each matrix of gradients as a product of two thin factors, by one power iteration.

    M = gradient + e                  of each rank, n x m; a tensor of more axes is (first, others)
    P = sum of M Q over the ranks     then orthonormal columns
    Q = sum of M' P over the ranks    with which the next step begins
    e = M - P (M' P)'                 the residual of this rank
    P Q' is the sum of all gradients

Vogels et al. 2019, arXiv 1905.13727. e is that of the paper; PyTorch's hook subtracts the product
of the sums, which gives the same sequence of sums. Tensors that are no matrices, or shrink less
than `min_rate` times, are summed uncompressed. The Q at the start of a step is made orthonormal
too, which changes P Q' only by rounding; a lost column is replaced by a random one. Matrices of one
shape are processed as a batch. A single rank does the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allranks.strategies.compressed import factor_rank
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.compression.cosines import orthonormal
from allranks.torch.parallel.data.compressed.gathered import BucketExchange, Compressed, real_view
from allranks.torch.parallel.data.reducer import Bucket

LARGE = 1 << 14
"""Matrices of so many numbers are multiplied one by one."""


def power_sgd(comm: Comm, shards: int, *, rank: int, min_rate: float, after: int) -> Compressed:
    """Two all-reduces per bucket. Sends 2(N-1)/N of the factors, other tensors and tally."""
    return Compressed(comm, shards, lambda bucket: _Factored(comm, bucket, rank, min_rate), after)


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
        """This rank's P, (b, n, r). From here on `residual` is M."""
        for residual, view in zip(self.residual, self.views, strict=True):
            residual.add_(view.reshape(residual.shape))
        right = orthonormal(self.right)
        lost = (right == 0).all(1, keepdim=True)
        return _product(self.residual, torch.where(lost, self.spare, right))

    def right_factors(self, left_factor: Tensor) -> Tensor:
        """This rank's Q, (b, m, r). From here on `residual` is e."""
        right = _product(self.residual.mT, left_factor)
        for residual, rows, columns in zip(self.residual, left_factor, right, strict=True):
            residual.addmm_(rows, columns.mT, alpha=-1)
        if right.device.type != "cpu" or not right.isfinite().all():  # on a CPU it saves a pass
            self.residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return right

    def write_sums(self, left_factor: Tensor, right: Tensor) -> None:
        """Write P Q' into the bucket; the next step begins with `right`."""
        for view, rows, columns in zip(self.views, left_factor, right, strict=True):
            if view.is_contiguous():  # a product in new memory takes eight times as long
                torch.mm(rows, columns.mT, out=view.view(len(rows), len(columns)))
            else:
                view.copy_((rows @ columns.mT).view(view.shape))
        self.right.copy_(right.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


class _Factored(BucketExchange):
    """One bucket, with its matrices in groups of one shape."""

    def __init__(self, comm: Comm, bucket: Bucket, rank: int, min_rate: float) -> None:
        self.comm = comm
        self.tally = bucket.flat[bucket.gradients.numel() :]
        self.plain: list[Tensor] = []
        shapes: dict[tuple[int, int], tuple[list[str], list[Tensor]]] = {}
        self.groups: list[_Group] = []
        ranks = {}
        for name, view in bucket.views.items():
            factor = 0 if view.is_complex() else factor_rank(tuple(view.shape), rank, min_rate)
            if not factor:
                self.plain.append(real_view(view))
                continue
            shape = (view.shape[0], view[0].numel())
            ranks[shape] = factor
            names, views = shapes.setdefault(shape, ([], []))
            names.append(name)
            views.append(view)
        self.groups = [_Group(n, v, ranks[shape]) for shape, (n, v) in shapes.items()]

    def messages(self) -> Iterator[Pending]:
        lefts = [group.left_factors() for group in self.groups]
        if lefts:
            flat = torch.cat([p.flatten() for p in lefts])
            yield self.comm.all_reduce(flat)
            lefts = [orthonormal(p) for p in _split(flat, lefts)]
        rights = [group.right_factors(p) for group, p in zip(self.groups, lefts, strict=True)]
        summed = [*rights, *self.plain, self.tally]
        flat = torch.cat([tensor.flatten() for tensor in summed])
        yield self.comm.all_reduce(flat)
        sums = _split(flat, summed)
        for target, total in zip([*self.plain, self.tally], sums[len(rights) :], strict=True):
            target.copy_(total)
        for group, p, q in zip(self.groups, lefts, sums, strict=False):
            group.write_sums(p, q)

    def residuals(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {"residual": group.residual[i], "right": group.right[i]}
            for group in self.groups
            for i, name in enumerate(group.names)
        }


def _product(whole: Tensor, thin: Tensor) -> Tensor:
    """(b, n, m) by (b, m, r). Small ones as a batch: on a CPU a loop takes 30 times as long."""
    if whole[0].numel() < LARGE:
        return whole @ thin
    return torch.stack([torch.mm(*pair) for pair in zip(whole, thin, strict=True)])


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Split `flat` into tensors of the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _drawn(name: str, rows: int, columns: int) -> Tensor:
    """Normal numbers seeded by the name of a parameter: the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn((rows, columns), generator=generator, dtype=torch.float64)
