"""Gradients that leave in keys: where they are cut, and that they leave before backward is over."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from threading import Event
from typing import Any, cast

import pytest
import torch
from test_ps import batch_of, loss_of, served, worker_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from allranks.job.job import Job
from allranks.launcher.nodes.channel import Disconnected
from allranks.torch.parameter_server.flat import FlatLayout
from allranks.torch.parameter_server.placement import Piece
from allranks.torch.parameter_server.working.exchange import Exchange
from allranks.torch.parameter_server.working.keys import Key, Leaving, keys_of
from allranks.torch.parameter_server.working.laid_out import LaidOut
from allranks.torch.step.gradients import clip_factor
from allranks.torch.trainer import Trainer
from decoupled_tasks import Plain

COMES_S = 60.0


def test_a_layout_is_cut_from_its_end_on_at_pieces() -> None:
    """By hand: doubles of 3, 2 and 4 at 0, 24 and 40; then floats of 1 and 5 at 128 and 132."""
    sizes = [(3, torch.float64), (1, torch.float32), (2, torch.float64), (5, torch.float32)]
    made = [nn.Parameter(torch.zeros(n, dtype=kind)) for n, kind in [*sizes, (4, torch.float64)]]
    layout = FlatLayout(
        [Piece(n, 0, p.numel(), 0, is_whole=True) for n, p in enumerate(made)], made
    )
    assert (layout.starts, layout.nbytes) == ([0, 128, 24, 132, 40], 152)
    assert keys_of(layout, 7, 1) == [
        *(Key(7, 132, 152, (3,)), Key(7, 128, 132, (1,))),
        *(Key(7, 40, 128, (4,)), Key(7, 24, 40, (2,)), Key(7, 0, 24, (0,))),
    ]
    assert keys_of(layout, 0, 24) == [
        *(Key(0, 128, 152, (3, 1)), Key(0, 40, 128, (4,)), Key(0, 0, 40, (2, 0)))
    ]
    assert keys_of(layout, 0, 1000) == [Key(0, 0, 152, (3, 1, 4, 2, 0))]
    assert keys_of(FlatLayout([], made), 0, 1) == []
    with_empty = [nn.Parameter(torch.zeros(n)) for n in (3, 0, 5)]
    pieces = [Piece(n, 0, p.numel(), 0, is_whole=True) for n, p in enumerate(with_empty)]
    found = keys_of(FlatLayout(pieces, with_empty), 0, 1)
    assert found[0] == Key(0, 12, 32, (2,)), "an empty tensor takes none of its neighbour's bytes"


def worker_on_sockets(stack: ExitStack, strategy: str) -> tuple[Exchange, Leaving, list[Any]]:
    """A worker that has pulled; its keys; and the servers."""
    job = Job(strategy=strategy, ranks=1, precision="fp64")
    own, keeper = (
        stack.enter_context(Trainer(Plain(), job, world=worker_world(n))).strategy for n in (0, 3)
    )
    links, servers = served(stack, keeper)
    side = Exchange(own, 0)  # type: ignore[arg-type]
    side.link(*links(0), shares=False)
    stack.callback(side.unlink)
    side.pull(-1)
    assert side.leaving is not None
    return side, side.leaving, servers


def push(side: Exchange, number: int) -> None:
    """A step of plain SGD at 1 on the servers, and their weights here."""
    said = {"groups": [{"lr": 1.0, "momentum": 0.0}], "factor": 0.5, "number": number}
    side.push(said, unused=True, pulls=True)
    side.take()


def test_keys_leave_while_backward_makes_the_rest() -> None:
    """Backward waits in the first layer until the servers have the gradient of the last one."""
    with ExitStack() as stack:
        side, leaving, servers = worker_on_sockets(
            stack, "ps:mode=async,servers=2,bound=8,key_mb=1e-5,transport=sockets"
        )
        model: Any = side.strategy.model
        assert len(leaving.keys) > 2
        came = []

        def wait_for_the_last_layer(_: Tensor) -> None:
            until = time.monotonic() + COMES_S
            while not (found := has_come(servers, 2)) and time.monotonic() < until:
                time.sleep(0.001)
            came.append((found, has_come(servers, 0)))

        inputs, wanted = batch_of(0)
        hidden = model[0](inputs)
        hidden.register_hook(wait_for_the_last_layer)
        leaving.begin()
        (model[2](model[1](hidden)).squeeze(1) - wanted).square().mean().backward()
        assert came == [(True, False)]
        push(side, 0)
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, 1).backward()  # nobody has begun: all of it is pushed at once
        expected = [p - 0.5 * p.grad for p in model.parameters()]
        push(side, 1)
        for now, wanted_now, then in zip(model.parameters(), expected, before, strict=True):
            torch.testing.assert_close(now.detach(), wanted_now.detach(), rtol=0, atol=1e-15)
            assert not torch.equal(now, then)


def test_a_forward_pass_that_a_lost_link_cuts_off_leaves_no_moments() -> None:
    """Those of the layers that it had passed would count again in the next step."""
    with ExitStack() as stack:
        side, _, _ = worker_on_sockets(stack, "ps:mode=async,key_mb=1e-5,transport=sockets")
        scope = side.strategy.step.scope
        scope.add_moments(0, torch.ones(3))
        side.unlink()
        assert not scope.moments


def has_come(servers: list[Any], position: int) -> bool:
    """Whether the servers have all pieces of the gradient of a parameter."""
    found = [
        bool(view.any())
        for server in servers
        for piece, view in zip(server.layout.pieces, server._gradient_of(0).views, strict=True)
        if piece.position == position
    ]
    return bool(found) and all(found)


def test_what_backward_finishes_twice_is_sent_once_more() -> None:
    """A checkpoint that is reentrant, twice through one layer: the sum of both is applied."""
    with ExitStack() as stack:
        side, leaving, _ = worker_on_sockets(stack, "ps:mode=async,key_mb=1e-5,transport=sockets")
        model: Any = side.strategy.model
        inputs, wanted = batch_of(0)
        weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
        a, b, c, d = weights
        hidden = torch.tanh(inputs @ a.T + b)
        ((hidden @ c.T + d + (2 * hidden) @ c.T + d).squeeze(1) - wanted).square().mean().backward()
        leaving.begin()
        hidden = model[1](model[0](inputs))
        both = [checkpoint(model[2], n * hidden, use_reentrant=True) for n in (1, 2)]
        (sum(both).squeeze(1) - wanted).square().mean().backward()
        assert any(pending < 0 for pending in leaving._pending.values())
        push(side, 0)
        for now, then in zip(model.parameters(), weights, strict=True):
            expected = then - 0.5 * then.grad
            torch.testing.assert_close(now.detach(), expected.detach(), rtol=0, atol=1e-14)


def test_gradients_of_several_passes_add_up_where_they_are_sent_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One tensor is small, one large, one of no pass; a step before has left its numbers there."""
    monkeypatch.setattr("allranks.torch.parameter_server.working.laid_out.MOVED_BYTES", 32)
    weights = [nn.Parameter(torch.arange(1.0, n + 1, dtype=torch.float64)) for n in (3, 5, 6)]
    pieces = [Piece(n, 0, w.numel(), 0, is_whole=True) for n, w in enumerate(weights)]
    flat = FlatLayout(pieces, weights).new()
    flat.raw.fill_(77)
    laid_out = LaidOut([flat], weights)
    for n, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, n=n: laid_out.finished(n))
    laid_out.begin()
    for _ in range(2):
        (weights[0].square().sum() + weights[1].square().sum()).backward()
    laid_out.settle()
    for weight, view in zip(weights, flat.views, strict=True):
        assert weight.grad is not None and weight.grad.data_ptr() == view.data_ptr()
    assert torch.equal(flat.views[0], 4 * weights[0]) and torch.equal(flat.views[1], 4 * weights[1])
    assert not flat.views[2].any()


def test_a_norm_that_is_no_number_clips_to_that() -> None:
    """As torch does it, whether a gradient is clipped here or on the servers."""
    weight = nn.Parameter(torch.zeros(2))
    for norm in (math.nan, 0.5, 4.0, math.inf):
        weight.grad = torch.tensor([1.0, 2.0])
        nn.utils.clip_grads_with_norm_([weight], 1.0, torch.tensor(norm))
        wanted = weight.grad / torch.tensor([1.0, 2.0])
        torch.testing.assert_close(torch.full((2,), clip_factor(1.0, norm)), wanted, equal_nan=True)


class Cut:
    """Links of which the first send fails, and others wait until the links are cut."""

    def __init__(self) -> None:
        self.cut = Event()

    def send(self, server: int, message: Any, *body: Any) -> None:
        if server == 0:
            raise Disconnected("it is gone")
        assert self.cut.wait(COMES_S), "nobody cuts the links"

    def shut(self) -> None:
        self.cut.set()


def test_keys_that_nobody_takes_are_let_go_at_once() -> None:
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    flats = [
        FlatLayout([Piece(n, 0, 4, n, is_whole=True)], weights).new() for n in range(len(weights))
    ]
    keys = [key for n, flat in enumerate(flats) for key in keys_of(flat.layout, n, 1)]
    leaving = Leaving(keys, flats, weights, cast(Any, Cut()))
    leaving.begin()
    with pytest.raises(Disconnected):
        leaving.finish()
    begun = time.monotonic()
    leaving.close()
    assert time.monotonic() - begun < COMES_S / 2
