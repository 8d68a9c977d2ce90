"""Initial weights that depend on the first batch: a task's `initialise(model, inputs)`.

ActNorm, data-dependent initialisation (Salimans and Kingma 2016, arXiv 1602.07868) and codebooks
that start from samples treat the first input as typical. In forward, that would be a different part
of the batch on each rank. Here every rank gets the whole first global batch, in shard order, and
computes the same; then the leader's weights and buffers are broadcast.
"""

from __future__ import annotations

import torch

from allranks.errors import RequestError
from allranks.torch.checkpoint.state import kept_random_streams
from allranks.torch.data.batch import Batch
from allranks.torch.data.collate import gathered, own_rows, rows_of_ranks
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.strategies.base import Strategy
from allranks.training.order import random_key

INITIALISE = -4  # what the generators are keyed for, beside shards


def initialise(strategy: Strategy, batch: Batch) -> None:
    """Let the task set weights from the whole of `batch`, the first; every rank calls this.

    Sends the batch (kind `outputs`), and the weights and buffers of the leader.
    """
    task, model, step = strategy.task, strategy.model, strategy.step
    if batch.sizes is None:
        raise _refused(
            "a stream",
            "no rank knows how many samples the others have",
            "read the data as a map-style data set, or set the weights in model()",
        )
    rows = own_rows([({"batch": micro.data}, micro.samples) for micro in batch.micros])
    if rows is None:
        rows = _refused(
            f"{batch.nominal} samples in the first batch, so a rank has none",
            "what a batch looks like is only known from one",
            "use at least as many samples as shards, or fewer ranks",
        )
    rows_of_all = rows_of_ranks(batch.sizes, step.comm.size, strategy.dealt)
    whole = gathered(step.comm, rows, rows_of_all)
    data = whole.rebuilt(whole.tensors, whole.lists)["batch"]
    before = [id(parameter) for parameter in model.parameters()]
    with (
        kept_random_streams(strategy.comm.device),
        torch.no_grad(),
        step.precision.autocast(),
    ):
        key = random_key(step.scope.seed, -1, -1, -1, INITIALISE)
        seed_generators(key)
        torch.manual_seed(key)
        task.initialise(model, task.inputs(data))
        if [id(parameter) for parameter in model.parameters()] != before:
            raise _refused(
                "other parameters in the model than before",
                "the optimizer holds those that were there",
                "write into them: parameter.copy_(…)",
            )
        step.comm.broadcast(*model.parameters(), *model.buffers())
    if step.average is not None:
        step.average.load_state(model, None)


def _refused(found: str, why: str, do: str) -> RequestError:
    return RequestError(asked="initialise(model, inputs) of the task", found=found, why=why, do=do)
