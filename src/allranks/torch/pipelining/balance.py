"""What the layers of a chain cost, by which it is cut into stages: bytes of weights, or seconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from allranks.torch.comm.comm import Comm
from allranks.torch.model.layers import Scope
from allranks.torch.model.partition import seconds_of
from allranks.torch.model.precision import Precision
from allranks.torch.task import Task

Groups = Sequence[Sequence[nn.Module]]
Costs = Callable[[Groups], list[float]]
"""The cost of each group of layers."""


def bytes_of(groups: Groups) -> list[float]:
    """The bytes of the weights of each group."""
    return [float(sum(p.nbytes for layer in group for p in layer.parameters())) for group in groups]


def measured(
    model: nn.Module, task: Task, scope: Scope, precision: Precision, comm: Comm, strategy: str
) -> Costs:
    """Costs in seconds of forward and backward, summed over what each rank of `comm` measures.

    Every rank calls what is returned, on the same groups, and has the same numbers: it measures the
    layers of the whole model, and gathers what the others found (`control`).
    """

    def seconds(groups: Groups) -> list[float]:
        times = Counter(id(layer) for group in groups for layer in group)
        layers = {id(layer): layer for group in groups for layer in group}
        asked = f"--strategy {strategy}:by=cost"
        own = seconds_of(list(layers.values()), model, task, scope, precision, asked)
        found = [json.loads(text) for text in comm.gather_texts(json.dumps(own))]
        each = {
            key: sum(of_ranks) / times[key]  # of one of its calls
            for key, of_ranks in zip(layers, zip(*found, strict=True), strict=True)
        }
        return [sum(each[id(layer)] for layer in group) for group in groups]

    return seconds
