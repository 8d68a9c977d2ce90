"""What a worker pushes: gradients, and what a lost link leaves."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from test_ps import batch_of, served, worker_world
from torch import nn
from torch.utils.checkpoint import checkpoint

from allranks.job.job import Job
from allranks.torch.parameter_server.exchange import Exchange
from allranks.torch.step.gradients import clip_factor
from allranks.torch.trainer import Trainer
from decoupled_tasks import Plain


def worker_on_sockets(stack: ExitStack) -> Exchange:
    """A worker that has pulled."""
    job = Job(strategy="ps:mode=async,transport=sockets", ranks=1, precision="fp64")
    own, keeper = (
        stack.enter_context(Trainer(Plain(), job, world=worker_world(n))).strategy for n in (0, 3)
    )
    links, _ = served(stack, keeper)
    side = Exchange(own)  # type: ignore[arg-type]
    side.link(*links(0), shares=False)
    stack.callback(side.unlink)
    side.pull(-1)
    return side


def test_a_forward_pass_that_a_lost_link_cuts_off_leaves_no_moments() -> None:
    """Those of the layers that it had passed would count again in the next step."""
    with ExitStack() as stack:
        side = worker_on_sockets(stack)
        scope = side.strategy.step.scope
        scope.add_moments(0, torch.ones(3))
        side.unlink()
        assert not scope.moments


def test_what_backward_finishes_twice_is_pushed_as_a_sum() -> None:
    """A checkpoint that is reentrant, twice through one layer: the sum of both is applied."""
    with ExitStack() as stack:
        side = worker_on_sockets(stack)
        model: Any = side.strategy.model
        inputs, wanted = batch_of(0)
        weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
        a, b, c, d = weights
        hidden = torch.tanh(inputs @ a.T + b)
        ((hidden @ c.T + d + (2 * hidden) @ c.T + d).squeeze(1) - wanted).square().mean().backward()
        hidden = model[1](model[0](inputs))
        both = [checkpoint(model[2], n * hidden, use_reentrant=True) for n in (1, 2)]
        (sum(both).squeeze(1) - wanted).square().mean().backward()
        said = {"groups": [{"lr": 0.5, "momentum": 0.0}], "number": 0}
        side.push(said, pulls=True)
        side.receive_weights()
        for now, then in zip(model.parameters(), weights, strict=True):
            expected = then - 0.5 * then.grad
            torch.testing.assert_close(now.detach(), expected.detach(), rtol=0, atol=1e-14)


def test_a_norm_that_is_no_number_clips_to_that() -> None:
    """As torch does it, whether a gradient is clipped here or on the servers."""
    weight = nn.Parameter(torch.zeros(2))
    for norm in (math.nan, 0.5, 4.0, math.inf):
        weight.grad = torch.tensor([1.0, 2.0])
        nn.utils.clip_grads_with_norm_([weight], 1.0, torch.tensor(norm))
        wanted = weight.grad / torch.tensor([1.0, 2.0])
        torch.testing.assert_close(torch.full((2,), clip_factor(1.0, norm)), wanted, equal_nan=True)
