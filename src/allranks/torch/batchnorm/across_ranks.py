"""BatchNorm over the whole global batch (`batchnorm = "whole"`), whatever the number of ranks.

    forward    every rank sends (count, mean, squares around it) of its rows; all combine them
               in rank order                          all-gather of 1 + 2C numbers for each layer
    backward   dx = w / s * (dy - mean(dy) - xhat * mean(dy * xhat)), with the means over all ranks
                                                      all-reduce of 2C numbers for each layer

Each layer waits for the slowest rank twice in a step, which is what the shards are there to avoid.
All ranks call the layers in one order; a rank without a sample sends zeros in the order that the
step before had, and waits for none of them: others may wait for its part of a gradient in between.
What is sent is counted under `batchnorm`. Chan, Golub and LeVeque 1983, Algorithms
for Computing the Sample Variance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.torch.batchnorm.shard import no_variance
from allranks.torch.comm.comm import Comm, Pending
from allranks.torch.model.layers import Normalising, Scope, full_type
from allranks.torch.task import Task

KIND = "batchnorm"


class WholeBatchNorm:
    """The statistics of one step over all ranks of `comm`, a group of its own."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.collectives: list[tuple[str, int, torch.dtype]] = []
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._alone = False
        self._zeros: list[Pending] = []

    def leave(self, *, failed: bool = False) -> None:
        """Leave the group; every rank calls this."""
        if not failed:
            self._settle()
        self.comm.leave(failed=failed)

    def begin(self, own_samples: int) -> None:
        """A step begins. A rank without a sample takes part in it here."""
        self._settle()
        self._known.clear()
        if own_samples:
            self.collectives.clear()
            return
        if not self.collectives and self.comm.size > 1:
            raise RequestError(
                asked='batchnorm = "whole"',
                found="a first batch of which a rank has no sample",
                why="what the layers send is only known from a forward pass",
                do="use at least as many samples as shards, or fewer ranks",
            )
        for collective, size, kind in self.collectives:
            zeros = torch.zeros(size, dtype=kind, device=self.comm.device)
            if collective == "gather":
                whole = zeros.new_empty(self.comm.size * size)
                self._zeros.append(self.comm.all_gather(whole, zeros, KIND))
            else:
                self._zeros.append(self.comm.all_reduce(zeros, KIND))

    def _settle(self) -> None:
        """What was sent for the others in the step before has arrived."""
        for pending in self._zeros:
            pending.wait()
        self._zeros.clear()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, a rank recomputes its part alone, with the statistics of the first time."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def normalised(self, scope: Scope, index: int, input: Tensor, by: Normalising) -> Tensor:
        """`input`, (rows, channels, …), normalised; leaves this rank's part of the moments."""
        call = scope.calls.get(index, 0)
        scope.calls[index] = call + 1
        full = input.to(full_type(input.dtype))
        if self._alone:
            mean, var = self._known[index, call]
            return _by(full, mean, var, by).to(input.dtype)
        count, mean, squares = self._statistics(full.detach())
        if count <= 1:
            if by.running is None:
                raise no_variance("the whole batch")
            self._known[index, call] = by.running
            if self.comm.size > 1:
                full = _Met.apply(full, self)  # type: ignore[no-untyped-call]
            return _by(full, *by.running, by).to(input.dtype)
        var = squares / count
        self._known[index, call] = mean, var
        if by.running is not None:
            variance = squares / (count if by.biased else count - 1)
            moments = torch.cat((mean.new_ones(1), mean, variance))
            scope.add_moments(index, moments.mul_(scope.samples))
        if self.comm.size == 1:
            plain = F.batch_norm(full, None, None, by.weight, by.bias, True, 0.0, by.eps)
            return plain.to(input.dtype)
        apply: Any = _Whole.apply
        output: Tensor = apply(full, mean, (var + by.eps).rsqrt(), count, self)
        if by.weight is not None:
            output = output * _along(by.weight, full)
        if by.bias is not None:
            output = output + _along(by.bias, full)
        return output.to(input.dtype)

    def _statistics(self, input: Tensor) -> tuple[float, Tensor, Tensor]:
        """Values for each channel, their mean, and the sum of squares around it, of all ranks."""
        dims = _dims(input)
        values = float(input.numel() // input.shape[1])
        mean = input.mean(dims)
        squares = (input - _along(mean, input)).square().sum(dims)
        if self.comm.size == 1:
            return values, mean, squares
        part = torch.cat((mean.new_tensor([values]), mean, squares))
        self.collectives.append(("gather", part.numel(), part.dtype))
        whole = part.new_empty(self.comm.size * part.numel())
        self.comm.all_gather(whole, part, KIND).wait()
        parts = whole.view(self.comm.size, -1)
        counts, means = parts[:, :1], parts[:, 1 : 1 + len(mean)]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        squares = (parts[:, 1 + len(mean) :] + counts * (means - mean).square()).sum(0)
        return float(count), mean, squares

    def summed(self, part: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        self.collectives.append(("sum", part.numel(), part.dtype))
        self.comm.all_reduce(part, KIND).wait()
        return part


def whole_norm(
    task: Task, comm: Comm, scope: Scope, swapped: dict[str, list[str]]
) -> WholeBatchNorm | None:
    """Let `scope` normalise over the whole batch where the task asks for it; every rank calls this.

    Returns what is to be left at the end; `None` for nothing.
    """
    if task.batchnorm != "whole" or not swapped["batchnorm"]:
        return None
    scope.whole = whole = WholeBatchNorm(comm.duplicate())
    return whole


class _Whole(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps), where mean and var depend on the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, mean: Tensor, inverse: Tensor, count: float, of: WholeBatchNorm
    ) -> Tensor:
        xhat = (input - _along(mean, input)) * _along(inverse, input)
        ctx.save_for_backward(xhat, inverse)
        ctx.count, ctx.of = count, of
        return xhat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        xhat, inverse = ctx.saved_tensors
        dims = _dims(gradient)
        sums = torch.cat((gradient.sum(dims), (gradient * xhat).sum(dims)))
        plain, product = (ctx.of.summed(sums) / ctx.count).chunk(2)
        derivative = gradient - _along(plain, gradient) - xhat * _along(product, gradient)
        return derivative * _along(inverse, gradient), None, None, None, None


class _Met(torch.autograd.Function):
    """The same; backward meets ranks without a sample, which send what they did a step before."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, of: WholeBatchNorm) -> Tensor:
        ctx.of = of
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        ctx.of.summed(gradient.new_zeros(2 * gradient.shape[1]))
        return gradient, None


def _by(input: Tensor, mean: Tensor, var: Tensor, by: Normalising) -> Tensor:
    return F.batch_norm(input, mean, var, by.weight, by.bias, False, 0.0, by.eps)


def _dims(tensor: Tensor) -> tuple[int, ...]:
    return (0, *range(2, tensor.ndim))


def _along(channels: Tensor, like: Tensor) -> Tensor:
    """(channels,) -> (1, channels, 1, …)."""
    return channels.view(1, -1, *[1] * (like.ndim - 2))
