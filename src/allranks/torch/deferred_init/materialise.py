"""The first weights of a model that was cut while it lay on meta: one whole tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.comm.comm import Comm
from allranks.torch.deferred_init.program import NotRecordable
from allranks.torch.deferred_init.recorded import Recorded, on_device
from allranks.torch.model.weights import digest_of
from allranks.torch.witness.same_model import check_same_model, check_same_weights


class Taker(Protocol):
    """A strategy, as far as it takes up a model."""

    comm: Comm

    def parallelize(self, model: nn.Module) -> nn.Module: ...

    def place(self, name: str, held: Tensor, whole: Tensor) -> None: ...


def take_up(strategy: Taker, model: nn.Module, recorded: Recorded | None) -> nn.Module:
    """What a rank holds of the model, with equal weights on all; every rank calls this.

    Compares names and shapes, then broadcasts parameters and buffers once, from the leader, unless
    the model was `recorded`.
    """
    check_same_model(model, strategy.comm, "whole" if recorded is None else "one by one")
    if recorded is None:
        with torch.no_grad():
            strategy.comm.broadcast(*model.parameters(), *model.buffers())
        return strategy.parallelize(model)
    model = strategy.parallelize(model)
    materialise(model, recorded, strategy.comm, strategy.place)
    return model


def materialise(
    model: nn.Module,
    recorded: Recorded,
    comm: Comm,
    place: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Give the model memory, and fill it: `place(name, held, whole)`; every rank calls this.

    Every rank computes each tensor whole, once, whether or not it holds a part of it, and frees it
    before the next. Sends the digest of all of them (32 bytes to each other rank): nobody's weights
    are broadcast. Raises `RequestError` where ranks computed others, or where an operator does not
    do what it said it would.
    """
    on_device(model, comm.device)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    digests: dict[str, str] = {}

    def take(name: str, whole: Tensor) -> None:
        digests[name] = digest_of(whole)
        if name in held:
            place(name, held[name], whole)

    try:
        with torch.no_grad():
            recorded.replay(take)
    except NotRecordable as error:
        raise RequestError(
            asked="a model whose weights are computed one by one",
            found=str(error),
            why="the strides of what it would be written into are other ones",
            do="--strategy ddp, and report the operator",
        ) from error
    assert held.keys() <= digests.keys(), "a strategy cuts tensors, and renames none"
    check_same_weights(digests, comm)
