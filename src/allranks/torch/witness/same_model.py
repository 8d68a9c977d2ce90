"""Checks once that every rank built the same model and the same optimizer, by names and shapes.

Weights are broadcast, and gradients summed, by position. If a program builds its layers in the
order of a set, or reads files that differ between machines, position k is another weight on each
rank: their values would be mixed, and no loss shows it. Every strategy calls this while it is set
up, before any other communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm

DIGEST_BYTES = 16
WHY = "weights and gradients are exchanged by their position, so they would be mixed"
DO = (
    "build it alike in every process: sort what comes out of a set or a folder, and read the same "
    "files everywhere"
)
WHY_GROUPS = (
    "gradients are exchanged by their position, and each rank updates with the values of its groups"
)
DO_GROUPS = (
    f"{DO}; take no rate from the numbers of a weight, of which a rank may have a part, or "
    "--strategy ddp"
)
DRAWN = (
    "draw from torch's, NumPy's and Python's own generators, which the job seeds; or --strategy ddp"
)


def named_shapes(model: nn.Module) -> list[str]:
    """The names and shapes that `check_same_model` compares."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors]


def check_same_model(shapes: list[str], comm: Comm) -> None:
    """Raise `RequestError` on all unless they built the same tensors, in one order.

    Every rank calls this. Sends 32 bytes to each other rank, and all names where they differ.
    """
    _compare("model(self) of the task", "layer", shapes, comm)


def check_same_weights(digests: Mapping[str, str], comm: Comm) -> None:
    """Raise `RequestError` on all ranks unless all computed the same first weights.

    Every rank calls this. Sends 32 bytes to each other rank, and all digests where they differ.
    """
    rows = [f"{name}: {digest}" for name, digest in sorted(digests.items())]
    why = "each rank keeps its part of every weight, and no broadcast makes them equal"
    _compare("model(self) of the task", "weight", rows, comm, why, DRAWN)


def check_same_groups(model: nn.Module, optimizer: Optimizer, comm: Comm) -> None:
    """The same for the parameters of an optimizer, group by group, and for its values."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = [f"{type(optimizer).__name__} of {len(optimizer.param_groups)} groups"]
    for number, group in enumerate(optimizer.param_groups):
        rows += [f"group {number}: {names.get(id(p), 'another tensor')}" for p in group["params"]]
        rows += [f"group {number}: {text}" for text in sorted(map(_setting, group.items()))]
    _compare("optimizer(self, model) of the task", "parameter", rows, comm, WHY_GROUPS, DO_GROUPS)


def _setting(item: tuple[str, Any]) -> str:
    """The name of a setting of a group, and its value if that is a number or a text."""
    name, value = item
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    plain = (bool, int, float, str)
    several = value if isinstance(value, (tuple, list)) else [value]
    is_plain = name != "params" and all(isinstance(each, plain) for each in several)
    return f"{name}={value!r}" if is_plain else name


def _compare(
    asked: str, kind: str, rows: list[str], comm: Comm, why: str = WHY, do: str = DO
) -> None:
    if comm.size == 1:
        return
    digest = hashlib.blake2b("\n".join(rows).encode(), digest_size=DIGEST_BYTES).hexdigest()
    if len(set(comm.gather_texts(digest))) == 1:
        return
    difference = _first_difference(kind, comm.gather_values(rows))
    raise RequestError(asked=asked, found=difference, why=why, do=do)


def _first_difference(kind: str, rows_of_ranks: list[list[str]]) -> str:
    """`the ranks differ, first in layer 3: 'x (3,)' on rank 0, 'y (3,)' on rank 1`."""
    for position in range(max(map(len, rows_of_ranks))):
        rows = [r[position] if position < len(r) else "nothing" for r in rows_of_ranks]
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
        if other is not None:
            return (
                f"the ranks differ, first in {kind} {position}: {rows[0]!r} on rank 0, "
                f"{rows[other]!r} on rank {other}"
            )
    return "the ranks differ"
