"""What a training is made of, taken up again by name: nothing rounded, nothing forgotten."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from allranks.checkpoint.format import unflatten
from allranks.errors import RequestError
from allranks.torch.checkpoint.state import (
    TrainedSet,
    flatten,
    hyper_parameters,
    kept_random_streams,
    load_model_state,
    load_optimizer_state,
    load_trained_set,
    model_state,
    optimizer_state,
    random_streams,
    set_random_streams,
)
from resume_tasks import Odd

CPU = torch.device("cpu")
Make = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Buffers of all kinds, tied and frozen weights."""

    def __init__(self, fill: float = 0.0, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.tied = nn.Linear(2, width)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("kept", torch.full((2,), fill))
        self.register_buffer("lost", torch.full((2,), fill, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.tensor(int(fill)), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.frozen(self.first(inputs) + self.tied(inputs)))


def through_a_file(state: Any) -> Any:
    """As a checkpoint carries it: plain values and tensors, nothing else."""
    skeleton, tensors = flatten(state, "common")
    return unflatten(skeleton, {path: tensor.clone() for path, tensor in tensors.items()})


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def steps(model: nn.Module, optimizer: Optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(5, 2, generator=generator)).square().sum().backward()
        optimizer.step()


class Counted(str):
    """A name that counts how often it is compared with another one."""

    compared = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


def test_what_was_trained_is_found_by_name_in_time_linear_in_the_names() -> None:
    """Each name against each other one is 10^8 comparisons for 10,000 parameters."""
    counts = []
    for count in (20, 160):
        model = nn.ParameterDict({f"w{n}": nn.Parameter(torch.zeros(1)) for n in range(count)})
        optimizer = SGD(model.parameters(), lr=0.1)
        made = TrainedSet.of(model, optimizer)
        names = [Counted(name) for name in made.free]
        then = {"groups": made.groups, "free": names}
        Counted.compared = 0
        load_trained_set(model, optimizer, {"made": then, "now": {**then, "free": names[1:]}}, made)
        counts.append(Counted.compared)
        assert [p.requires_grad for p in model.parameters()] == [False] + [True] * (count - 1)
    assert counts[1] < 16 * counts[0]


# --- models ---------------------------------------------------------------------------------------


def test_every_parameter_and_every_buffer_comes_back() -> None:
    torch.manual_seed(1)
    model, other = Net(7.0), Net(0.0)
    model(torch.randn(5, 2))
    load_model_state(other, through_a_file(model_state(model)))
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        assert torch.equal(
            tensor,
            other.get_buffer(name)
            if name in dict(other.named_buffers())
            else other.get_parameter(name),
        ), name
    assert other.lost.tolist() == [7.0, 7.0] and int(other.count) == 7
    assert other.norm.num_batches_tracked == 1
    assert other.tied.weight is other.first.weight
    assert not other.frozen.weight.requires_grad
    assert other.nothing is None


def test_a_buffer_that_is_not_persistent_is_filled_in_place() -> None:
    """Others hold it too: a bucket, or the model's own parts."""
    model, other = Net(7.0), Net(0.0)
    held = other.lost
    load_model_state(other, model_state(model))
    assert held.tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda s: s.pop("lost"), "other tensors: lost is (2,), was missing"),
        (lambda s: s.update(more=torch.zeros(2)), "other tensors: more is missing, was (2,)"),
        (lambda s: s.update(kept=torch.zeros(3)), "other tensors: kept is (2,), was (3,)"),
        (lambda s: s.update(count=torch.zeros(1)), "other tensors: count is (), was (1,)"),
    ],
)
def test_another_model_is_refused_and_nothing_is_taken_up(
    change: Callable[[dict[str, Any]], Any], found: str
) -> None:
    model = Net(0.0)
    before = copy.deepcopy(model.state_dict())
    state = dict(model_state(Net(7.0)))
    change(state)
    with pytest.raises(RequestError) as refused:
        load_model_state(model, state)
    assert refused.value.found == found
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.lost.tolist() == [0.0, 0.0]


# --- optimizers -----------------------------------------------------------------------------------

MAKERS: dict[str, Make] = {
    "momentum": lambda m: SGD(trainable(m), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda m: AdamW(trainable(m), lr=0.1, amsgrad=True),
    "adagrad": lambda m: Adagrad(trainable(m), lr=0.1, lr_decay=0.1),
    "a rate that is a tensor": lambda m: AdamW(
        trainable(m), lr=torch.tensor(0.1), foreach=False, capturable=False
    ),
    "groups": lambda m: SGD(
        [
            {"params": [m.first.weight], "lr": 0.1, "momentum": 0.5},
            {"params": [p for p in trainable(m) if p is not m.first.weight], "lr": 0.2},
        ],
        lr=1.0,
        momentum=0.9,
    ),
    "odd": lambda m: Odd(trainable(m), 0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_goes_on_to_the_bit(name: str) -> None:
    torch.manual_seed(1)
    model, other = Net(), Net()
    optimizer, again = MAKERS[name](model), MAKERS[name](other)
    made, made_again = hyper_parameters(optimizer), hyper_parameters(again)
    steps(model, optimizer, 3, seed=1)
    state = through_a_file(optimizer_state(model, optimizer, made))
    load_model_state(other, through_a_file(model_state(model)))
    load_optimizer_state(other, again, state, made_again)
    for mine, its in zip(trainable(model), trainable(other), strict=True):
        ours, theirs = optimizer.state[mine], again.state[its]
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert type(value) is type(theirs[key]), key
            if isinstance(value, Tensor):
                assert value.dtype == theirs[key].dtype, key
                assert torch.equal(value, theirs[key]), key
            elif key != "lately":
                assert value == theirs[key], key
            else:
                assert torch.equal(value[0], theirs[key][0])
    steps(model, optimizer, 3, seed=2)
    steps(other, again, 3, seed=2)
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_order_of_parameters_is_not_relied_on() -> None:
    torch.manual_seed(1)
    model, other = Net(), Net()
    optimizer = AdamW(trainable(model), lr=0.1)
    again = AdamW(list(reversed(trainable(other))), lr=0.1)
    made = hyper_parameters(optimizer)
    steps(model, optimizer, 3, seed=1)
    load_model_state(other, model_state(model))
    load_optimizer_state(other, again, optimizer_state(model, optimizer, made), made)
    for mine, its in zip(trainable(model), trainable(other), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], again.state[its]["exp_avg"])


def loaded_groups(was: Make, now: Make, between: Callable[[Optimizer], None]) -> dict[str, Any]:
    """The first group of an optimizer made by `now`, gone on from one made by `was`."""
    model, other = Net(), Net()
    optimizer, again = was(model), now(other)
    made, made_now = hyper_parameters(optimizer), hyper_parameters(again)
    between(optimizer)
    load_optimizer_state(other, again, optimizer_state(model, optimizer, made), made_now)
    return again.param_groups[0]


def test_what_is_set_anew_is_as_it_is_now_and_the_rest_goes_on() -> None:
    def decay(optimizer: Optimizer) -> None:
        optimizer.param_groups[0].update(lr=0.001, momentum=0.99, seen=5)

    def made(lr: float) -> Make:
        return lambda model: SGD(trainable(model), lr=lr, momentum=0.9)

    group = loaded_groups(made(0.1), made(0.1), decay)
    assert (group["lr"], group["momentum"], group["seen"]) == (0.001, 0.99, 5)
    group = loaded_groups(made(0.1), made(0.5), decay)
    assert (group["lr"], group["momentum"], group["seen"]) == (0.5, 0.99, 5)


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        loaded_groups(MAKERS["momentum"], MAKERS["adamw"], lambda optimizer: None)
    assert refused.value.found == "other optimizer: its class is AdamW, was SGD"
    with pytest.raises(RequestError) as refused:
        loaded_groups(MAKERS["groups"], MAKERS["momentum"], lambda optimizer: None)
    assert refused.value.found.startswith("other groups of parameters: ")


def test_the_hyper_parameters_as_made_do_not_follow_the_optimizer() -> None:
    optimizer = MAKERS["a rate that is a tensor"](Net())
    made = hyper_parameters(optimizer)
    optimizer.param_groups[0]["lr"].mul_(2)
    assert float(made[0]["lr"]) == pytest.approx(0.1)


# --- random numbers -------------------------------------------------------------------------------


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.random(3).tolist(),
        np.random.standard_normal(),
        np.random.permutation(9).tolist(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(9).tolist(),
    ]


@pytest.mark.parametrize("before", [0, 1, 2])  # every other normal number is kept for the next call
def test_random_streams_go_on_where_they_were(before: int) -> None:
    with kept_random_streams(CPU):
        for _ in range(before):
            random.gauss(0, 1), np.random.standard_normal(), torch.randn(())
        streams = through_a_file(random_streams(CPU))
        wanted = draws()
        assert draws() != wanted
        set_random_streams(streams, CPU)
        assert draws() == wanted


def test_what_is_drawn_within_is_not_missed_afterwards() -> None:
    with kept_random_streams(CPU):
        streams = random_streams(CPU)
        wanted = draws()
        set_random_streams(streams, CPU)
        with pytest.raises(ValueError, match="within"), kept_random_streams(CPU):
            _seeds_draws_and_fails()
        assert draws() == wanted


def _seeds_draws_and_fails() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    draws()
    raise ValueError("within")
