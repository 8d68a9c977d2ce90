"""What can be done otherwise on ranks than the code says, to see whether a difference vanishes.

    SEEDS       every generator starts each step from the same seed, and seeds are not changed
    MEAN, SUM   floating-point reductions are divided, or multiplied, by the number of ranks
    WEIGHTED    a rank's part of a reduction counts as its mean did: by the elements of that mean
    ROUNDING    16 bits become 64
    DROPOUT     dropout keeps everything
    BATCHNORM   BatchNorm takes the statistics of all ranks
    AS_SUM      reductions by maximum, minimum or product add up
    INPUTS      nothing; what this rank gives to reductions is recorded

Reductions are changed where torch calls its process group, so those of DDP, FSDP2 and DTensor are,
too. `on_rank` calls this.
"""

from __future__ import annotations

import random
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.nn import functional

from allranks.torch.comm.counting_group import CountingGroup

SEEDS, MEAN, SUM, WEIGHTED = "seeds", "mean", "sum", "weighted"
ROUNDING, DROPOUT, BATCHNORM, AS_SUM = "rounding", "dropout", "batchnorm", "as-sum"
INPUTS = "inputs"
OF_REDUCTIONS = (MEAN, SUM, WEIGHTED, AS_SUM, INPUTS)
BACKEND = "allranks-altered"
SEED = 20240229
MEANS = ("mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits")
BY_CLASS = ("cross_entropy", "nll_loss")
DIVISIONS = ("div", "true_divide", "__truediv__", "div_", "__itruediv__")
IGNORED = -100  # torch's default `ignore_index`


@dataclass
class Counts:
    """The elements of the last mean that this rank took, 0 before the first; its inputs."""

    last: float = 0.0
    inputs: list[Tensor] = field(default_factory=list)


def enter(change: str, backend: str, stack: ExitStack, counts: Counts) -> str:
    """Set up what is undone for a whole run; returns the backend to use."""
    if change == SEEDS:
        seed_all(0)
        _keep_seeds(stack)
    if change not in OF_REDUCTIONS:
        return backend
    AlteredGroup.change, AlteredGroup.counts = change, counts
    dist.Backend.register_backend(BACKEND, _make, devices=["cpu"])
    return BACKEND


_seed, _python_seed, _numpy_rng = torch.manual_seed, random.seed, np.random.default_rng


def seed_all(step: int) -> None:
    """All generators at the start of a step."""
    _seed(SEED + step)
    _python_seed(SEED + step)
    np.random.seed(SEED + step)


def _keep_seeds(stack: ExitStack) -> None:
    """Seeds that the code sets are the same on all ranks from now on."""

    class Fixed(torch.Generator):
        def manual_seed(self, seed: int) -> Any:
            return super().manual_seed(SEED)

    for place, name, value in (
        (torch, "Generator", Fixed),
        (torch, "manual_seed", lambda seed: _seed(SEED)),
        (random, "seed", lambda seed=None: _python_seed(SEED)),
        (np.random, "default_rng", lambda seed=None: _numpy_rng(SEED)),
    ):
        stack.enter_context(mock.patch.object(place, name, value))


class AlteredGroup(CountingGroup):
    """A group whose reductions are changed before they are handed on to `inner`."""

    change = ""
    counts = Counts()

    def getBackendName(self) -> str:  # torch calls it so
        return BACKEND

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        options = options or dist.AllreduceOptions()
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        self._alter(tensors, options)
        return super().allreduce(tensors, options)

    def _reduce_scatter_base(self, output: Any, tensor: Any, options: Any = None) -> Any:
        options = options or dist.ReduceScatterOptions()
        tensor = tensor.clone()
        self._alter([tensor], options)
        return super()._reduce_scatter_base(output, tensor, options)

    def allgather(self, outputs: Any, tensors: Any, options: Any = None) -> Any:
        if self.change == INPUTS:
            self._alter(tensors, options)
        more = () if options is None else (options,)
        return super().allgather(outputs, tensors, *more)

    def _alter(self, tensors: list[Tensor], options: Any) -> None:
        scale, size = 1.0, self.inner.size()
        if self.change == INPUTS:
            self.counts.inputs += [t.clone() for t in tensors if t.is_floating_point()]
            return
        if self.change == AS_SUM:
            if options.reduceOp != dist.ReduceOp.AVG:
                options.reduceOp = dist.ReduceOp.SUM
            return
        if self.change == WEIGHTED and self.counts.last:
            total = torch.tensor([self.counts.last], dtype=torch.float64)
            self.inner.allreduce([total], dist.AllreduceOptions()).wait()
            scale = self.counts.last * size / float(total)
        scale = {MEAN: 1 / size, SUM: float(size)}.get(self.change, scale)
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.mul_(scale)


class _Silent:
    """Counts nothing: what a `CountingGroup` reports to."""

    def begin(self, sent_bytes: float, *, meets: bool) -> None:
        pass

    def wait(self, work: Any, *, meets: bool) -> None:
        work.wait()

    def translated(self, error: RuntimeError) -> Exception:
        return error


def _make(store: Any, rank: int, size: int, timeout: Any) -> AlteredGroup:
    """Torch calls this for a new group of this backend."""
    return AlteredGroup(ProcessGroupGloo(store, rank, size, timeout), _Silent())


def call(change: str, counts: Counts, function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch, or another in its place."""
    name = getattr(function, "__name__", "")
    if change == DROPOUT and "dropout" in name and args:
        return args[0]
    if change == BATCHNORM and function is functional.batch_norm:
        return _batch_norm(*args, **kwargs)
    result = function(*args, **kwargs)
    if change == WEIGHTED and isinstance(result, Tensor) and result.dim() == 0:
        counts.last = _count(name, args, kwargs) or counts.last
    return result


def _count(name: str, args: Any, kwargs: Any) -> float:
    """Over how many elements a function takes the mean; 0 if it takes none."""
    if name == "mean":
        return float(args[0].numel())
    if name in (*MEANS, *BY_CLASS):
        if kwargs.get("reduction", "mean") != "mean":
            return 0.0
        target = args[1] if len(args) > 1 else kwargs["target"]
        if name in BY_CLASS and not target.is_floating_point():
            return float((target != kwargs.get("ignore_index", IGNORED)).sum())
        return float(target.numel())
    if name in DIVISIONS and args[0].requires_grad:
        by = float(args[1])
        return by if by > 1 and by != dist.get_world_size() else 0.0
    return 0.0


def _batch_norm(
    values: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`functional.batch_norm` by the moments of all ranks' samples; it updates no statistics."""
    if not training:
        return functional.batch_norm(values, running_mean, running_var, weight, bias, eps=eps)
    axes = [dim for dim in range(values.dim()) if dim != 1]
    parts = (values, values.square(), torch.ones_like(values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and the one that has a backward
        sums = differentiable.all_reduce(torch.stack([part.sum(axes) for part in parts]))
    mean, square, _ = sums / sums[2]
    result: Tensor = (values.transpose(1, -1) - mean) * (square - mean.square() + eps).rsqrt()
    result = result if weight is None else result * weight
    result = result if bias is None else result + bias
    return result.transpose(1, -1)
