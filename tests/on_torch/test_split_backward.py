"""Backward in two passes: the bits of one pass, no product computed twice, nothing kept after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from allranks.errors import RequestError
from allranks.torch.parallel.pipeline.links import Received
from allranks.torch.parallel.pipeline.split_backward import backward_to_inputs
from allranks.torch.step.gradients import Backward


class Attention(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.norm(inputs)
        return inputs + self.attention(rows, rows, rows, need_weights=False)[0]


class Tied(nn.Module):
    """One weight used again and again, one after the other, and through others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        inner: Tensor = self.one(self.other(self.one(inputs).relu()) + self.one.weight.sum(0))
        return inner * self.one.weight.mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)[0].clone()


class Aside(nn.Module):
    """Outputs that come from weights alone, and weights behind others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.alone = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.normed(self.inner(inputs).tanh()), self.alone.exp() * self.inner.weight.sum()


class Hooked(nn.Linear):
    """A hook on an activation, which doubles its gradient."""

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        output.register_hook(lambda gradient: 2 * gradient)
        return output.relu()


class Again(nn.Module):
    """A block that computes its activations again."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.inner, inputs, use_reentrant=self.reentrant)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8), nn.LayerNorm(8)),
    "images": lambda: nn.Sequential(
        *(nn.Unflatten(1, (5, 1)), nn.Conv2d(5, 4, (1, 3)), nn.BatchNorm2d(4), nn.PReLU(4))
    ),
    "attention": lambda: nn.Sequential(Attention(), Attention()),
    "tied": Tied,
    "recurrent": Recurrent,
    "aside": Aside,
    "hooked": lambda: nn.Sequential(nn.Linear(8, 8), Hooked(8, 8), nn.Linear(8, 2)),
    "computed again": lambda: Again(reentrant=False),
    "frozen": lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)),
}
Found = tuple[Tensor | None, list[Tensor | None]]


def passed(model: nn.Module, *, split: bool) -> Found:
    """The gradients of the input and of the weights."""
    torch.manual_seed(1)
    received = Received(torch.randn(4, 5, 8))
    output = model(received.entering())
    ends = output if isinstance(output, tuple) else (output,)
    backward = Backward(ends, [torch.randn_like(end) for end in ends])
    model.zero_grad()
    if split:
        rest = backward_to_inputs(backward)
        assert received.gradient is not None
        assert all(parameter.grad is None for parameter in model.parameters())
        rest()
    else:
        backward()
    return received.gradient, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_two_passes_give_the_bits_of_one(name: str, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(kind)
    try:
        model = MODELS[name]()
        (wanted, of_weights), (found, weights) = (passed(model, split=s) for s in (False, True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert wanted is not None and found is not None and torch.equal(wanted, found)
    for one, two in zip(of_weights, weights, strict=True):
        assert one is two is None or (two is not None and torch.equal(one, two))
    assert any(gradient is not None for gradient in weights)


def test_no_product_is_computed_twice() -> None:
    counted = []
    for split in (False, True):
        with FlopCounterMode(display=False) as counter:
            passed(MODELS["layers"](), split=split)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_hooks_on_weights_run_once() -> None:
    model = MODELS["tied"]()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))
    passed(model, split=True)
    assert sorted(seen) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.slow
def test_nothing_is_kept_after_the_second_pass() -> None:
    """Nor what no weight needs after the first: here the activations behind the last one."""
    received = Received(torch.randn(4, 8))
    first = nn.Linear(8, 8)(received.entering())
    last = F.softmax(first, 1)
    kept = [weakref.ref(tensor.untyped_storage()) for tensor in (received.tensor, last)]
    rest = backward_to_inputs(Backward((last,), (torch.randn_like(last),)))
    del last, first, received
    gc.collect()
    assert [ref() is None for ref in kept] == [False, True]
    rest()
    del rest
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True]


def test_a_first_stage_has_received_nothing_and_leaves_all_to_the_second_pass() -> None:
    layer = nn.Linear(8, 8)
    output = layer(torch.randn(4, 8))
    backward = Backward((output,), (torch.ones_like(output),))
    assert backward_to_inputs(backward) is backward


def test_reentrant_checkpoints_are_refused() -> None:
    with pytest.raises(RequestError, match="use_reentrant=True"):
        passed(Again(reentrant=True), split=True)


def test_a_group_norm_by_channels_is_refused() -> None:
    """torch would end the process in the second pass: see docs/found.md."""
    images = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    inputs = Received(images).entering()
    with pytest.raises(RequestError, match="ends the process"):
        backward_to_inputs(Backward([nn.GroupNorm(2, 8)(inputs)], [images]))
