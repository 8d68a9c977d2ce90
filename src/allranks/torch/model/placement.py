"""The tensors of a rank, and their devices: weights, buffers, gradients, optimizer state.

The state of an optimizer is only known after an update, when torch creates it. Before a training,
`update_by_nothing` makes the optimizer create it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.job.place import AVERAGE, BUFFER, OPTIMIZER, PARAMETER, Placed, write_placement
from allranks.strategies.shards import largest_shard
from allranks.torch.checkpoint.state import local
from allranks.torch.data.collate import tensors_of_arguments
from allranks.torch.model.layers import normalising_layers, own_kind
from allranks.torch.step.ema import MovingAverage
from allranks.torch.task import Task
from allranks.training.callback import Callback


def placed_tensors(
    model: nn.Module,
    trained: list[str],
    optimizer: Optimizer | None,
    average: MovingAverage | None,
    *,
    replica: int = 0,
    updated: bool,
) -> Iterator[Placed]:
    """The tensors of a model, those in `trained` with a gradient.

    `optimizer` is `None` for a replica without one; its state is unknown until it has `updated`.
    """
    for name, parameter in model.named_parameters():
        gradient = local(parameter).nbytes if name in trained else 0
        optimizer_bytes: int | None = 0
        if optimizer is not None and name in trained:
            optimizer_bytes = _bytes(optimizer.state.get(parameter)) if updated else None
        yield row(PARAMETER, name, parameter, gradient, optimizer_bytes, replica)
    for name, buffer in model.named_buffers():
        yield row(BUFFER, name, buffer, replica=replica)
    if average is not None:
        for name, tensor in average.state().items():
            yield row(AVERAGE, name, tensor, replica=replica)
    if optimizer is not None:
        for key, values in optimizer.state.items():
            if not isinstance(key, Tensor):
                for tensor in tensors_of_arguments(values):
                    yield row(OPTIMIZER, str(key), tensor, replica=replica)


def row(
    kind: str,
    name: str,
    tensor: Tensor,
    gradient_bytes: int = 0,
    optimizer_bytes: int | None = 0,
    replica: int = 0,
) -> Placed:
    """One tensor as it is, of which the rank may hold a part."""
    whole, tensor = tuple(tensor.shape), local(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return Placed(
        kind,
        name,
        str(tensor.device),
        dtype,
        shape,
        nbytes(tensor),
        gradient_bytes,
        optimizer_bytes,
        replica,
        whole=None if whole == shape else whole,
    )


def nbytes(tensor: Tensor) -> int:
    """The bytes that this rank holds of a tensor; of a sparse one, of what it stores."""
    tensor = local(tensor)
    if not tensor.is_sparse:
        return tensor.nbytes
    return tensor._indices().nbytes + tensor._values().nbytes


def _bytes(state: Any) -> int:
    """The bytes of the tensors that an optimizer keeps for one weight."""
    return sum(nbytes(tensor) for tensor in tensors_of_arguments(state))


def update_by_nothing(
    parameters: list[nn.Parameter], optimizer: Optimizer, by_rows: Container[int] = ()
) -> None:
    """One update with gradients of zero, one weight at a time: no more memory than in training.

    The weights may change (weight decay): for a model that is not going to be trained. `by_rows`
    are the positions of the parameters that the optimizer updates by sparse gradients.
    """
    for position, parameter in enumerate(parameters):
        if parameter.is_meta:  # another rank holds it
            continue
        nothing = torch.zeros_like(parameter, requires_grad=False)
        parameter.grad = nothing.to_sparse(1) if position in by_rows else nothing
        optimizer.step()
        parameter.grad = None


class RecordPlacement(Callback):
    """After the first update of a rank: what it holds, into the run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._is_recorded = False

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if result.updated and not self._is_recorded:
            self._is_recorded = True
            rows = trainer.strategy.placement(updated=True)
            with suppress(OSError):  # a full disk ends no training
                write_placement(self.run_dir, trainer.world.rank, rows)


# --- model notes ---------------------------------------------------------------------------------
# Notes for the user on a model before it is trained: legal settings that are often not intended.


FEW_SAMPLES = 16  # in a shard: fewer make noisy statistics. A rule of thumb, not measured here


def notes_on(model: nn.Module, task: Task) -> list[str]:
    """Sentences about the model as it is before the first step; the same on every rank."""
    return [*_modes(model), *_statistics(model, task)]


def _modes(model: nn.Module) -> list[str]:
    named = [(name, module) for name, module in model.named_modules()]
    still = [(name, module) for name, module in named if not module.training]
    if not still:
        return []
    name, module = next(((n, m) for n, m in still if n), still[0])
    modules = f"{len(still)} of {len(named)} modules of the model"
    first = f"{name or 'the model'} ({own_kind(module).__name__}) first"
    return [
        f"{modules} are trained in eval mode, {first}: dropout off, BatchNorm frozen; "
        "call model.train() in model() if that is not meant"
    ]


def _statistics(model: nn.Module, task: Task) -> list[str]:
    samples = largest_shard(task.batch_size, task.shards)
    norms = [norm for norm in normalising_layers(model) if norm.training]
    if not norms or samples >= FEW_SAMPLES or task.batchnorm == "whole":
        return []
    return [
        f"BatchNorm normalises every shard by itself, of {samples} samples "
        f"(batch_size {task.batch_size} in {task.shards} shards); --set shards=… for fewer and "
        "larger ones, --set batchnorm=whole for the statistics of the whole batch"
    ]
