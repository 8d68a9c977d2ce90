"""Exact evaluation: every sample once, nothing padded, the same numbers on any number of ranks.

The data is cut into chunks of a fixed size; rank r evaluates chunks r, r + N, …. Sums and counts of
each chunk fill a row of one table, which has zeros there on every other rank. The table is summed
over the ranks once, then its rows are added in order. So not even the rounding depends on N.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError, printable
from allranks.torch.comm.comm import Comm
from allranks.torch.data.collate import copied
from allranks.torch.data.copying import Copying
from allranks.torch.data.sources import Source
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.step.losses import forward, weighted_losses
from allranks.torch.step.user_buffers import UserBuffers, put_back
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task
from allranks.torch.witness.observed import plain_state_copy, roots_of_model
from allranks.training.order import random_key
from allranks.training.task_fields import metric_pairs, other_metrics

Number = float | Tensor
Pair = tuple[Number, Number]
EVALUATION = -1  # a key of the generators, in addition to chunks


@torch.no_grad()
def evaluate(
    task: Task, strategy: Strategy, source: Source, chunk: int, most: int | None = None
) -> dict[str, float]:
    """The metrics of the task, and its mean `loss`, over `source`; every rank calls this.

    Sends one table of 16 bytes per chunk and metric. `chunk` is in samples; `most` bounds how many
    samples are read.
    """
    comm = strategy.data
    if not strategy.agreement.is_one_training:
        comm = Comm(device=comm.device, heartbeat=comm.heartbeat)
    samples = len(source) if most is None else min(len(source), most)
    chunks = [range(start, min(start + chunk, samples)) for start in range(0, samples, chunk)]
    chunks_here = range(comm.rank, len(chunks), comm.size)
    visited = list(chunks_here) or [0]  # a rank without a chunk must know the metrics' names
    if strategy.equal_passes:
        visited += [0] * (-(-len(chunks) // comm.size) - len(visited))
    wanted = ((0, np.arange(chunks[n].start, chunks[n].stop)) for n in visited)
    names, rows = list[str](), dict[int, list[Pair]]()
    copying = Copying(strategy.context.precision)
    reading = source.batches(wanted, place=copying.begin)
    with evaluating(task, strategy.model), closing(reading) as batches:
        for number, begun in zip(visited, batches, strict=True):
            if comm.heartbeat is not None:
                comm.heartbeat.enter("evaluate")  # a sign of life for every chunk
            if comm.glance is not None:
                comm.glance()
            seed_generators(random_key(strategy.context.scope.seed, EVALUATION, number))
            pairs = _pairs(task, strategy, copying.finish(begun), len(chunks[number]))
            names = names or list(pairs)
            if list(pairs) != names:
                found = f"{list(pairs)} for one part of the data, {names} for another"
                raise other_metrics(found)
            if number in chunks_here:
                rows[number] = list(pairs.values())
    _same_names_everywhere(comm, names)
    with strategy.comm.reading() if not strategy.computes_alone else nullcontext():
        table = _table(rows, len(chunks), len(names)).to(comm.device)
    comm.all_reduce(table, "control").wait()
    with comm.reading():
        table = table.cpu()
    _check_counts(table, names)
    sums = table.cumsum(0)[-1].tolist() if names else []
    means = {n: total / count for n, (total, count) in zip(names, sums, strict=True) if count}
    return task.finalize(means)


@torch.no_grad()
def try_evaluation(
    task: Task, strategy: Strategy, source: Source, chunk: int, notes: list[str]
) -> dict[str, float]:
    """Evaluate the first samples, to raise errors and learn all names before the first update.

    The state of the training is restored, whatever a forward pass writes. Adds a line to `notes`
    for metrics that look like means already.
    """
    samples = min(chunk, len(source))
    (data,) = source.batches([(0, np.arange(samples))])
    try:
        data = copied(data)  # collate may hand on samples that are evaluated again
    except RequestError as error:
        notes.append(
            f"the first samples of an evaluation go through the model once before it: {error.found}"
        )
    with _leaving_no_trace(task, strategy), evaluating(task, strategy.model):
        pairs = _pairs(task, strategy, data, samples)
    means = [name for name, (total, count) in pairs.items() if count == 1 and total != 0]
    means = [name for name in means if name != "loss"]  # 0 of 1 may be a count of something rare
    if means and samples > 1:
        notes.append(
            f"metrics() counts 1 for {samples} samples in {printable(', '.join(means))}: that is "
            "the mean of "
            f"the means of {samples} samples each, in which the last few count as much; return "
            "(sum, number of samples) where it is a mean over samples"
        )
    table = _table({0: list(pairs.values())}, 1, len(pairs))
    _check_counts(table, list(pairs))
    numbers = zip(pairs, table[0].tolist(), strict=True)
    known = {name: total / count for name, (total, count) in numbers if count}
    return {**dict.fromkeys(pairs, math.nan), **task.finalize(known)}


@contextmanager
def _leaving_no_trace(task: Task, strategy: Strategy) -> Iterator[None]:
    """Afterwards, model and task are restored to their state before.

    Holds one copy of this rank's trainable parameters, and of all buffers, until then. Frozen
    parameters may be mapped from a file, and are not copied.
    """
    model = strategy.model
    with ExitStack() as stack:  # each is put back, whatever another one raises
        stack.callback(plain_state_copy(roots_of_model(model, task), task))
        stack.callback(put_back, UserBuffers(model).copies())
        stack.callback(_put_back_weights, _copies_of_weights(model))
        yield


def _copies_of_weights(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    copies: list[tuple[Tensor, Tensor]] = []
    for weight in model.parameters():
        if weight.requires_grad and not weight.is_meta:  # another rank has it
            with suppress(RequestError):  # a strategy may forbid to read it, or to write it
                copies.append((weight, weight.detach().clone()))
    return copies


def _put_back_weights(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Restore only the weights that were written: others may share the memory of the remaining."""
    for weight, before in copies:
        if not torch.equal(weight, before):
            weight.copy_(before)


@contextmanager
def evaluating(task: Task, model: nn.Module) -> Iterator[None]:
    """Within, model and task are in evaluation mode; afterwards every layer has its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    names_it_itself = "training" in vars(task) or type(task).training is not Task.training
    model.eval()
    if not names_it_itself:
        vars(task)["training"] = False
    try:
        yield
    finally:
        if not names_it_itself:
            del vars(task)["training"]
        for module, was_training in modes:
            module.training = was_training


def _same_names_everywhere(comm: Comm, names: list[str]) -> None:
    """Raise on every rank if the metrics' names differ between ranks: sums would be mixed."""
    if comm.size == 1:
        return
    checks = torch.zeros(comm.size, dtype=torch.float64, device=comm.device)
    checks[comm.rank] = zlib.crc32("\0".join(names).encode())
    comm.all_reduce(checks, "control").wait()
    with comm.reading():
        differ = len(set(checks.tolist())) > 1
    if differ:
        raise other_metrics(f"{names} on rank {comm.rank}, others on another rank")


def _check_counts(table: Tensor, names: list[str]) -> None:
    """Raise if a metric has a negative count; those of the `loss` are weights, and may be."""
    for name, least in zip(names, table[:, :, 1].amin(0).tolist(), strict=True):
        if least < 0 and name != "loss":
            raise RequestError(
                asked="metrics(output, batch) of the task",
                found=f"{name} with a count of {least:g}",
                why="a mean over fewer samples than none is none",
                do="return for example {'accuracy': (hits.sum(), len(hits))}",
            )


def _table(rows: dict[int, list[Pair]], chunks: int, metrics: int) -> Tensor:
    """(chunk, metric, sum and count) on the host, zeros for chunks of others.

    Values on a device are read together: the host waits once here, not in every chunk.
    """
    table = torch.zeros(chunks, metrics, 2, dtype=torch.float64)
    waiting: dict[Any, list[tuple[tuple[int, int, int], Tensor]]] = {}
    for number, pairs in rows.items():
        for metric, pair in enumerate(pairs):
            for place, value in enumerate(pair):
                where = number, metric, place
                if isinstance(value, Tensor):
                    waiting.setdefault((value.device, value.dtype), []).append((where, value))
                else:
                    table[where] = value
    for ahead in waiting.values():
        values = torch.stack([value for _, value in ahead]).tolist()
        for (where, _), value in zip(ahead, values, strict=True):
            table[where] = value
    return table


def _pairs(task: Task, strategy: Strategy, data: Any, samples: int) -> dict[str, Pair]:
    """(sum, count) of every metric over one chunk."""
    precision = strategy.context.precision
    data = precision.to_device(data)
    pairs: dict[str, tuple[Any, Any]] = {}
    passed = partial(strategy.eval_step, forward=partial(forward, task))
    with precision.autocast(), strategy.evaluation_pass():
        output = passed(data)
        if task.loss_over == "sample":
            losses, weights = weighted_losses(task, output, data, samples)
            count = losses.numel() if weights is None else weights.sum()
            pairs["loss"] = (losses.sum(), count)
        metrics = task.metrics(task.eval_output(output, data, passed), data)
    pairs |= metric_pairs(metrics, "hits.sum()")
    return {name: (_number(total), _number(count)) for name, (total, count) in pairs.items()}


def _number(value: Any) -> Number:
    """A number on the host, or a copy of one on the device."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1 or not accelerator.holds(value):
        return float(value.item())  # torch says what is wrong with several
    return value.detach().reshape(()).clone()
