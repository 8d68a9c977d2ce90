"""A pass without weight leaves gradients of exactly zero, where a pass with weight leaves any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from allranks.strategies.shards import Piece
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.model.layers import Scope
from allranks.torch.step.passes import PassesForOthers, UserBackwardGuard


class Step:
    """Goes through a model of two layers, of which the second one is beside the loss."""

    def __init__(self) -> None:
        self.scope, self.user_backward = Scope(0, torch.device("cpu")), UserBackwardGuard()
        self.model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 1)])
        self.user_backward.parameters = list(self.model.parameters())

    def output(self, batch: Batch, micro: MicroBatch) -> Any:
        first = self.model[0](micro.data)
        return {"first": first, "beside": [self.model[1](first)]}

    def losses_of(self, output: Any, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        return output["first"].sum(1) / torch.linspace(
            1.0, 0.0, len(output["first"])
        ), None  # that of the last: infinite


def batch(passes: int, *, has_samples: bool) -> Batch:
    micro = MicroBatch((Piece(0, 0, 2, 2),), 2, torch.ones(2, 3))
    spare = None if has_samples else micro
    leaves: Any = (type("Leaf", (), {"micros": (micro,)}),) if has_samples else ()
    return Batch(0, 0, 0, 2, (2,), leaves, np.empty(0, np.int64), passes, spare)


@pytest.mark.parametrize("has_samples", [True, False])
def test_an_infinite_loss_brings_in_nothing(has_samples: bool) -> None:
    step = Step()
    passes = PassesForOthers(step)
    given = batch(2, has_samples=has_samples)
    passes.begin(given)
    passes.finish(given, None)
    first, second = step.model
    assert [p.grad.abs().max().item() for p in first.parameters()] == [0.0, 0.0]  # type: ignore[union-attr]
    assert [p.grad for p in second.parameters()] == [None, None], "as in a pass with weight"


def test_backward_goes_only_where_a_loss_over_the_batch_went() -> None:
    step = Step()
    passes = PassesForOthers(step)
    given = batch(1, has_samples=False)
    passes.begin(given)
    output = passes.forward(given)
    assert output["first"].shape == (2, 2) and not passes.is_on
    passes.finish(given, [True, False])
    first, second = step.model
    assert [p.grad.abs().max().item() for p in first.parameters()] == [0.0, 0.0]  # type: ignore[union-attr]
    assert [p.grad for p in second.parameters()] == [None, None]


def test_it_is_on_in_forward_and_in_backward_of_such_a_pass() -> None:
    step, seen = Step(), []
    passes = PassesForOthers(step)
    given = batch(1, has_samples=False)
    passes.begin(given)
    step.model[0].register_forward_hook(lambda *_: seen.append(passes.is_on))
    weight: nn.Parameter = step.model[0].weight  # type: ignore[assignment]
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(passes.is_on))
    passes.finish(given, None)
    assert seen == [True, True] and not passes.is_on


def test_a_model_that_writes_on_its_batch_writes_on_copies_in_these_passes() -> None:
    step, given = Step(), batch(3, has_samples=True)
    passes, seen = PassesForOthers(step), []

    def write(module: nn.Module, args: Any) -> None:
        seen.append(args[0].sum().item())
        args[0].mul_(2)

    step.model[0].register_forward_pre_hook(write)
    passes.begin(given)
    step.output(given, given.micros[0])
    passes.finish(given, None)
    assert seen == [6.0, 6.0, 6.0]


def test_with_unequal_shares_these_passes_are_short() -> None:
    """A slow rank with few shards has no more of the work than its own."""
    step = Step()
    passes, seen = PassesForOthers(step), []
    micro = MicroBatch((Piece(3, 0, 5, 5),), 5, {"x": torch.ones(5, 3), "names": ["a"] * 5})
    leaves: Any = (type("Leaf", (), {"micros": (micro,)}),)
    given = Batch(0, 0, 0, 5, (5,), leaves, np.empty(0, np.int64), 3, None)

    def output(batch: Batch, micro: MicroBatch) -> Any:
        seen.append((micro.samples, len(micro.data["x"]), len(micro.data["names"])))
        return {"first": step.model[0](micro.data["x"])}

    step.output = output  # type: ignore[method-assign]
    for is_short in (False, True):
        passes.are_short = is_short
        passes.begin(given)
        passes.finish(given, None)
    assert seen == [(5, 5, 5)] * 2 + [(2, 2, 2)] * 2
