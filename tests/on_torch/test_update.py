"""The update of an optimizer: torch's own, and whoever listens to it hears of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from allranks.torch.step.trainable import update


class Own(SGD):
    """An optimizer of a class that nobody else changes."""


def one_of(kind: Callable[..., Optimizer]) -> tuple[nn.Parameter, Optimizer]:
    weight = nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(0)))
    weight.grad = torch.linspace(-1, 1, 5)
    return weight, kind([weight], lr=0.1)


@pytest.mark.parametrize("kind", [SGD, AdamW, Own])
def test_an_update_is_that_of_torch_to_the_bit(kind: Callable[..., Optimizer]) -> None:
    (expected, theirs), (found, ours) = one_of(kind), one_of(kind)
    before = found.clone()
    for _ in range(3):
        theirs.step()
        update(ours)
    assert torch.equal(expected, found)
    assert not torch.equal(before, found)


def in_class(optimizer: Optimizer, hear: Callable[..., None]) -> Callable[[], None]:
    was: Any = Own.step

    @wraps(was)
    def step(self: Own) -> None:
        hear()
        was(self)

    Own.step = step  # type: ignore[method-assign, assignment]
    return lambda: setattr(Own, "step", was)


def in_object(optimizer: Optimizer, hear: Callable[..., None]) -> Callable[[], None]:
    was = optimizer.step
    optimizer.step = lambda: (hear(), was())  # type: ignore[method-assign, assignment, func-returns-value]
    return lambda: None


LISTENERS: dict[str, Callable[..., Callable[[], None]]] = {
    "before": lambda optimizer, hear: optimizer.register_step_pre_hook(hear).remove,
    "after": lambda optimizer, hear: optimizer.register_step_post_hook(hear).remove,
    "before all": lambda optimizer, hear: register_optimizer_step_pre_hook(hear).remove,
    "after all": lambda optimizer, hear: register_optimizer_step_post_hook(hear).remove,
    "class": in_class,
    "object": in_object,
}


@pytest.mark.parametrize("listener", LISTENERS)
def test_who_listens_to_an_update_hears_it(listener: str) -> None:
    heard = []
    weight, optimizer = one_of(Own)
    before = weight.clone()
    leave = LISTENERS[listener](optimizer, lambda *_: heard.append(listener))
    try:
        update(optimizer)
    finally:
        leave()
    assert heard == [listener]
    assert torch.allclose(before - weight, 0.1 * torch.linspace(-1, 1, 5))


def test_a_profiler_sees_an_update_by_its_label() -> None:
    _, optimizer = one_of(SGD)
    with torch.profiler.profile() as profile:
        update(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}
