"""LARS and LAMB: golden steps, many steps against the formulae written out, states, equal bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from allranks.checkpoint.format import unflatten
from allranks.errors import RequestError
from allranks.torch.checkpoint.state import (
    flatten,
    hyper_parameters,
    load_optimizer_state,
    optimizer_state,
)
from allranks.torch.optimizers.layerwise import LAMB, LARS
from conftest import Train

Make = Callable[[list[nn.Parameter]], Optimizer]
SHAPES = [(4, 3), (4,), (2, 4, 1, 1), (), (2,), (3, 2)]
ZERO, UNUSED = 5, 0  # a layer whose weights start as zeros; one that has no gradient in step 2


def parameter(values: Any, gradient: Any) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    made.grad = torch.tensor(gradient, dtype=torch.float64)
    return made


# --- golden ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        # λ = 0.001 · 5 / 1
        (lambda p: LARS(p, 1.0, 0.0, trust=0.001), [2.997, 3.996]),
        # λ = 0.001 · 5 / (1 + 0.1 · 5) = 1/300, of g + 0.1·w = [0.9, 1.2]
        (lambda p: LARS(p, 1.0, 0.0, 0.1), [2.997, 3.996]),
        # r = ĝ/√ĝ² = [1, 1], of length √2, scaled to 5
        (lambda p: LAMB(p, 0.01, eps=0.0, weight_decay=0.0), [2.96464466, 3.96464466]),
        # r = [1.3, 1.4], of length √3.65
        (lambda p: LAMB(p, 0.01, eps=0.0, weight_decay=0.1), [2.96597744, 3.96336032]),
        # not corrected: r = 0.1/√0.001 + [0.3, 0.4] = [3.46227766, 3.56227766]
        (
            lambda p: LAMB(p, 0.01, eps=0.0, weight_decay=0.1, bias_correction=False),
            [2.96515150, 3.96414498],
        ),
        # φ(5) = 2
        (
            lambda p: LAMB(p, 0.01, eps=0.0, weight_decay=0.0, weight_limits=(0.1, 2.0)),
            [2.98585786, 3.98585786],
        ),
    ],
)
def test_golden_step_of_a_layer(make: Make, wanted: list[float]) -> None:
    layer = parameter([[3.0, 4.0]], [[0.6, 0.8]])
    make([layer]).step()
    assert layer[0].tolist() == pytest.approx(wanted, abs=1e-8)


def test_vectors_are_left_without_ratio_and_decay() -> None:
    vector = parameter([3.0, 4.0], [0.6, 0.8])
    LARS([vector], 0.5, 0.9, weight_decay=0.1).step()
    assert vector.tolist() == pytest.approx([2.7, 3.6])
    vector = parameter([3.0, 4.0], [0.6, 0.8])
    LAMB([vector], 0.5, eps=0.0, weight_decay=0.1).step()
    assert vector.tolist() == pytest.approx([2.5, 3.5])
    layer, vector = parameter([[3.0, 4.0]], [[0.6, 0.8]]), parameter([3.0, 4.0], [0.6, 0.8])
    LAMB([layer, vector], 0.01, weight_decay=0.1, adapt_vectors=True).step()
    assert torch.equal(layer[0], vector)


def test_the_velocity_of_the_paper_remembers_rates_and_the_other_one_does_not() -> None:
    """m = 0.5, gradient 1, rates 1 and 0.1: v = 1, 0.5 + 0.1; the corrected one v = 1,
    0.05 + 0.1."""
    moved = {}
    for inside in (True, False):
        weight = parameter([0.0], [1.0])
        optimizer = LARS([weight], 1.0, 0.5, rate_in_velocity=inside)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        moved[inside] = -weight.item()
    assert moved == pytest.approx({True: 1.6, False: 1.15})


# --- against the formulae, and against torch ------------------------------------------------------


def made_parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    values[ZERO].zero_()
    return [nn.Parameter(value.to(dtype)) for value in values]


def gradients_of(step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    found: list[Tensor | None] = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES
    ]
    if step == 2:
        found[UNUSED] = None
    if step == 3:
        found[UNUSED] = torch.zeros(SHAPES[UNUSED], dtype=torch.float64)
    return found


def run(optimizer: Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, gradient in zip(parameters, gradients_of(step), strict=True):
            p.grad = None if gradient is None else gradient.to(p.dtype)
        optimizer.param_groups[0]["lr"] = rate_of(step)
        optimizer.step()


def rate_of(step: int) -> float:
    return 0.1 / (1 + step)


def by_hand(one: Callable[..., tuple[list[float], Any]], steps: int) -> list[list[float]]:
    """Plain Python floats, one parameter at a time: `one(w, g, rate, is_layer, state)`."""
    weights = [p.flatten().tolist() for p in made_parameters()]
    states: list[Any] = [None] * len(weights)
    for step in range(steps):
        for number, gradient in enumerate(gradients_of(step)):
            if gradient is not None:
                g, is_layer = gradient.flatten().tolist(), gradient.ndim > 1
                weights[number], states[number] = one(
                    weights[number], g, rate_of(step), is_layer, states[number]
                )
    return weights


def length(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values))


def lars(w: list[float], g: list[float], rate: float, is_layer: bool, v: Any) -> Any:
    v, local, decay = v or [0.0] * len(w), 1.0, 0.0
    if is_layer:
        decay = 0.05
        if length(w) and length(g):
            local = 0.3 * length(w) / (length(g) + decay * length(w))
    v = [0.8 * b + rate * local * (d + decay * a) for a, b, d in zip(w, v, g, strict=True)]
    return [a - b for a, b in zip(w, v, strict=True)], v


def lamb(w: list[float], g: list[float], rate: float, is_layer: bool, state: Any) -> Any:
    step, m, v = state or (0, [0.0] * len(w), [0.0] * len(w))
    step += 1
    m = [0.7 * a + 0.3 * b for a, b in zip(m, g, strict=True)]
    v = [0.9 * a + 0.1 * b**2 for a, b in zip(v, g, strict=True)]
    one, two = 1 - 0.7**step, 1 - 0.9**step
    r = [a / one / (math.sqrt(b / two) + 1e-3) for a, b in zip(m, v, strict=True)]
    ratio = 1.0
    if is_layer:
        r = [a + 0.05 * b for a, b in zip(r, w, strict=True)]
        if length(w) and length(r):
            ratio = length(w) / length(r)
    return [a - rate * ratio * b for a, b in zip(w, r, strict=True)], (step, m, v)


MAKERS: dict[str, tuple[Make, Callable[..., Any]]] = {
    "lars": (lambda p: LARS(p, 0.1, 0.8, 0.05, trust=0.3), lars),
    "lamb": (lambda p: LAMB(p, 0.1, (0.7, 0.9), 1e-3, 0.05), lamb),
}


@pytest.mark.parametrize("name", MAKERS)
def test_many_steps_are_the_formulae(name: str) -> None:
    make, one = MAKERS[name]
    parameters = made_parameters()
    run(make(parameters), parameters, range(6))
    wanted = by_hand(one, 6)
    for p, values in zip(parameters, wanted, strict=True):
        assert p.flatten().tolist() == pytest.approx(values, rel=1e-12)


def test_lars_on_vectors_is_the_momentum_of_torch() -> None:
    ours, theirs = made_parameters()[1::3], made_parameters()[1::3]
    optimizers = (
        LARS(ours, 0.1, 0.9, 0.1, rate_in_velocity=False),
        SGD(theirs, lr=0.1, momentum=0.9),
    )
    for step in range(4):
        for mine, its in zip(ours, theirs, strict=True):
            if mine.ndim <= 1:
                mine.grad = its.grad = torch.full_like(mine, 1.0 + step)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate_of(step)
            optimizer.step()
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its)


# --- what goes with it ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_goes_through_a_checkpoint_to_the_bit(name: str, dtype: torch.dtype) -> None:
    def model_of(parameters: list[nn.Parameter]) -> nn.Module:
        model = nn.Module()
        model.layers = nn.ParameterList(parameters)
        return model

    make, _ = MAKERS[name]
    straight, parameters = made_parameters(dtype), made_parameters(dtype)
    run(make(straight), straight, range(6))
    first = make(parameters)
    made = hyper_parameters(first)
    run(first, parameters, range(3))
    skeleton, tensors = flatten(optimizer_state(model_of(parameters), first, made), "common")
    state = unflatten(skeleton, {path: tensor.clone() for path, tensor in tensors.items()})
    second = make(parameters)
    load_optimizer_state(model_of(parameters), second, state, hyper_parameters(second))
    run(second, parameters, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight, parameters, strict=True))


@pytest.mark.parametrize("make", [lambda p: LARS(p, 0.1), LAMB])
def test_a_sparse_gradient_is_refused(make: Make) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RequestError) as refused:
        make(list(table.parameters())).step()
    assert refused.value.asked.endswith("for a parameter of shape (4, 2)")
    assert refused.value.found == "a sparse gradient"


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (lambda p: LARS(p, -1.0), "LARS(lr=-1.0)"),
        (lambda p: LARS(p, 1.0, momentum=math.nan), "LARS(momentum=nan)"),
        (lambda p: LAMB(p, eps=-1e-8), "LAMB(eps=-1e-08)"),
        (lambda p: LAMB(p, betas=(0.9, 1.5)), "LAMB(betas=(0.9, 1.5))"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Make, asked: str) -> None:
    with pytest.raises(RequestError) as refused:
        make(made_parameters())
    assert refused.value.asked == asked


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_equal_bits_on_any_ranks(name: str, train: Train) -> None:
    found = {
        ranks: train(
            "optimizer_tasks:LargeBatch", f"name={name}", ranks=ranks, bitwise=True, steps=8
        ).summary
        for ranks in (1, 2)
    }
    assert found[1]["weights_sha256"] == found[2]["weights_sha256"]
    assert found[1]["steps"] == 8
