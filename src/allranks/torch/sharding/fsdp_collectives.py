"""The collectives that torch's `fully_shard` is given.

They are those of `Comm`, so that they are counted, are signs of life, and say who is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm
from allranks.torch.data.collate import tensors_in
from allranks.torch.sharding.unit_sums import UnitSum
from allranks.torch.step.gradients import one_number_a_row

At = Callable[[], AbstractContextManager[None]]


class Gather:
    """Gathers the weights of a unit; `kind` says what for, and within `at` it waits."""

    def __init__(self, shards: Comm, kind: Callable[[], str], at: At) -> None:
        self.shards, self.kind, self.at = shards, kind, at

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        """Memory for what is sent or received."""
        return torch.empty(*size, **options)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Send this rank's parts to all; torch calls it with these names, and waits for `work`."""
        with self.at():
            pending = self.shards.all_gather(output_tensor, input_tensor, self.kind())
            return pending.work if async_op else pending.wait()


class Scatter(Gather):
    """Sums the gradients of a unit, for each rank its part, as `sums` does.

    `held` are the weights of the unit; `is_apart` says whether code of the task is running.
    """

    def __init__(
        self,
        shards: Comm,
        kind: Callable[[], str],
        at: At,
        held: list[nn.Parameter],
        sums: UnitSum,
        is_apart: Callable[[], bool],
    ) -> None:
        super().__init__(shards, kind, at)
        self.held, self.sums, self.is_apart = held, sums, is_apart

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *_: Any, **__: Any
    ) -> Any:
        """Sum (rank, part) over the ranks into this rank's part; torch calls it so."""
        if self.is_apart():
            raise _backward_in_forward()
        trained = [parameter for parameter in self.held if parameter.requires_grad]
        if input_tensor.nbytes != sum(padded(p, self.shards.size) for p in trained):
            raise _unused()
        with self.at():
            self.sums.add(output_tensor, input_tensor)


class Filling:
    """Zeros for the gathered `weights` of a unit that a pass does not use.

    Torch has this since 2.13 (`set_reduce_scatter_unused_params`). Before, each rank sums what it
    has, and ranks that use different weights would add one to another.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.weights: list[Tensor] = []
        self.hook = unit.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._fill)

    def _fill(self, gradient: Tensor) -> None:
        for weight in self.weights:
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)


def padded(parameter: Tensor, parts: int) -> int:
    """The bytes of a weight whose first axis is made a multiple of `parts`."""
    rows = -(-parameter.shape[0] // parts) * parts
    return rows * math.prod(parameter.shape[1:]) * parameter.element_size()


def sizes_of(held: Sequence[Sequence[Tensor]], parts: int) -> tuple[int, int, int]:
    """The padded bytes of the root (the last of `held`), of all other units, of what is trained."""
    *units, root = ([(padded(p, parts), p.requires_grad) for p in unit] for unit in held)
    rest = [row for rows in units for row in rows]
    trained = sum(size for size, is_trained in (*rest, *root) if is_trained)
    return sum(size for size, _ in root), sum(size for size, _ in rest), trained


def watch(
    gathered: Sequence[nn.Parameter], mark: Callable[[int], None], tables: Container[int]
) -> list[RemovableHandle]:
    """Call `mark` when a pass of this rank has finished the gradient of a gathered weight.

    It is dense then; of `tables` (their ids) each pass adds one number to a row.
    """

    def seen(position: int, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        mark(position)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(seen, position))
        for position, parameter in enumerate(gathered)
    ]
    rows = [p.register_hook(one_number_a_row) for p in gathered if id(p) in tables]
    return [*hooks, *rows]


def _backward_in_forward() -> RequestError:
    return RequestError(
        asked="weights that are cut over the ranks",
        found="a backward pass in forward or loss of the task",
        why="it would sum its gradients over the ranks, and let go of weights that are in use",
        do="--strategy ddp",
    )


def _unused() -> RequestError:
    return RequestError(
        asked="weights that are cut over the ranks",
        found=f"a weight that a pass of this rank did not use, with torch {torch.__version__}",
        why="its fully_shard sums what is there, so ranks would sum different weights",
        do="torch 2.13 or newer, or --strategy ddp",
    )
