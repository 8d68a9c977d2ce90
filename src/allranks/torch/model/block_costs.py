"""What the blocks of a model cost: the time of forward and backward of each, measured.

One pass over a few samples of the task's own data shows what goes into each block; then each block
goes through forward and backward by itself, some times, and the quickest counts. Afterwards nothing
is left of it: no gradient, no statistics, no drawn number.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.torch.data.batch import MicroBatch
from allranks.torch.data.batches import GlobalBatches
from allranks.torch.data.nested import copied, map_arguments, tensors_of_arguments
from allranks.torch.data.open_data import open_data
from allranks.torch.data.sources import seed_generators
from allranks.torch.model.layers import Moment, Scope
from allranks.torch.model.precision import Precision
from allranks.torch.state import kept_random_streams
from allranks.torch.step.losses import forward
from allranks.torch.step.user_buffers import UserBuffers, put_back
from allranks.torch.task import Task
from allranks.training.progress import Progress

REPEATS = 3
Calls = dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]]
"""For each block, by its number, what it was called with."""


def seconds_of(
    blocks: Sequence[nn.Module],
    model: nn.Module,
    task: Task,
    scope: Scope,
    precision: Precision,
    asked: str,
) -> list[float]:
    """The seconds of forward and backward of each block, for the first shard of the first batch.

    Opens the training data of the task. A block that is not called costs nothing.
    """
    with kept_random_streams(scope.device):
        micro = _first_shard(task, scope.seed, precision, asked)
        moment = Moment(0, micro.pieces, micro.samples, {})
        buffers = UserBuffers(model).copies()
        with scope.again(moment), _not_shortening(scope), precision.autocast():
            try:
                calls = _calls(blocks, model, task, copied(micro.data))
                return [
                    sum(_seconds(block, *call) for call in calls[number])
                    for number, block in enumerate(blocks)
                ]
            finally:
                put_back(buffers)


def _first_shard(task: Task, seed: int, precision: Precision, asked: str) -> MicroBatch:
    """The first samples of the training, as a step would have them."""
    seed_generators(seed)
    opened = open_data(task.train_data(), task, seed, 0, "train_data")
    batches = GlobalBatches(
        source=opened.source,
        batch_size=task.batch_size,
        shards=task.shards,
        last_batch="keep",
        seed=seed,
        rank=0,
        ranks=1,
        micro_batch=None,
        shard_alone=True,
        precision=precision,
        prefetch=1,
        order=opened.order,
        shuffles=opened.shuffles,
    )
    try:
        first = next(batches.after(Progress(), 1, 1), None)
    finally:
        batches.close()
    if first is None or not first.micros:
        raise RequestError(
            asked=asked,
            found="no sample in the first batch",
            why="what a part of the model costs is measured on samples",
            do="by=size",
        )
    return first.micros[0]


@contextmanager
def _not_shortening(scope: Scope) -> Iterator[None]:
    before, scope.shortens = scope.shortens, False
    try:
        yield
    finally:
        scope.shortens = before


@torch.no_grad()
def _calls(blocks: Sequence[nn.Module], model: nn.Module, task: Task, data: Any) -> Calls:
    """What goes into each block in one forward pass."""
    found: Calls = {number: [] for number in range(len(blocks))}

    def noting(number: int) -> Any:
        def note(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            found[number].append((args, keywords))

        return note

    hooks = [
        block.register_forward_pre_hook(noting(number), with_kwargs=True)
        for number, block in enumerate(blocks)
    ]
    try:
        forward(task, model, data)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _seconds(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> float:
    """The quickest of some passes of one block through forward and backward."""
    return min(_once(block, args, keywords) for _ in range(REPEATS))


@torch.enable_grad()
def _once(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> float:
    leaves: list[Tensor] = [p for p in block.parameters() if p.requires_grad]

    def fresh(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaf = tensor.detach().requires_grad_()
        leaves.append(leaf)
        return leaf.clone()  # no leaf: a block may write into what it is given

    given, named = map_arguments(fresh, args), map_arguments(fresh, keywords)
    _wait(given)
    start = time.perf_counter()
    output = block(*given, **named)
    outputs = [tensor for tensor in tensors_of_arguments(output) if tensor.requires_grad]
    if outputs and leaves:
        ones = [torch.ones_like(tensor) for tensor in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
    _wait(output)
    return time.perf_counter() - start


def _wait(value: Any) -> None:
    """Until the devices of these tensors have done all that was asked of them."""
    accelerator.synchronize({tensor.device for tensor in tensors_of_arguments(value)})
