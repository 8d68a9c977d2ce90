"""A backward pass of a step: torch's own, without what torch looks at anew each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allranks.torch.step.gradients import length_of_each, norm_of, run_backward


def test_a_backward_pass_is_that_of_torch_to_the_bit() -> None:
    inputs = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scale = torch.tensor(1 / 3)
    inputs.exp().sum().backward(scale)
    expected, inputs.grad = inputs.grad, None
    run_backward(inputs.exp().sum(), scale)
    assert inputs.grad is not None and expected is not None
    assert torch.equal(inputs.grad, expected)


def test_a_loss_with_a_backward_of_its_own_keeps_it() -> None:
    called = []

    class Loss(Tensor):
        @classmethod
        def __torch_function__(
            cls, of: Callable[..., Any], kinds: Any, given: Any = (), named: Any = None
        ) -> Any:
            if of is Tensor.backward:
                called.append(named["gradient"])
                return None
            return super().__torch_function__(of, kinds, given, named or {})

    scale = torch.tensor(0.5)
    run_backward(torch.zeros((), requires_grad=True).as_subclass(Loss), scale)
    assert called == [scale]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("in_flats", [True, False])
@pytest.mark.parametrize("laid_out", ["in rows", "in columns", "with gaps"])
def test_the_norm_of_a_long_gradient_is_that_of_doubles(in_flats: bool, laid_out: str) -> None:
    whole = torch.rand(2050, 4099, generator=torch.Generator().manual_seed(0))
    gradient = {"in rows": whole, "in columns": whole.t(), "with gaps": whole[:, ::2]}[laid_out]
    parameter = nn.Parameter(torch.zeros(gradient.shape))
    parameter.grad = gradient
    norm = norm_of([parameter], [gradient] if in_flats else [], clips=False)
    assert norm == pytest.approx(float(gradient.double().square().sum()) ** 0.5, rel=1e-6)


def test_the_norms_of_many_short_gradients_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, norm = [], torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda of: calls.append(len(of)) or norm(of))
    rows = torch.sparse_coo_tensor([[0, 0]], [[3.0], [1.0]], (2, 1), check_invariants=True)
    short = [torch.full((4,), float(n), dtype=torch.float64) for n in range(50)]
    long = torch.ones(2**20)
    assert length_of_each([None, *short, rows, long]) == [
        0.0,
        *(2.0 * n for n in range(50)),
        4,
        1024,
    ]
    assert sorted(calls) == [1, 50]
    assert length_of_each([]) == []
