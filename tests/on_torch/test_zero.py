"""ZeRO: what each rank keeps, what it refuses, and ranks that have less to do than others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from allranks.errors import RequestError
from allranks.torch.checkpoint.state import random_streams, set_random_streams
from allranks.torch.optimizers.elementwise import (
    check_by_parameter,
    check_fused,
    groups_of_whole,
)
from allranks.torch.optimizers.layerwise import LAMB, LARS
from allranks.torch.strategies.layout import Cut, with_parameters
from conftest import Train
from tensor_tasks import OfAll
from test_every_strategy import STEPS, difference, reference_for, references

__all__ = ["references"]


@pytest.mark.slow
def test_the_norm_is_that_of_one_process(train: Train) -> None:
    """With a parameter of no dimension, which all ranks hold; clipped, so weights show it too."""
    found = {
        strategy: train("zero_tasks:Scaled", strategy=strategy, ranks=n, precision="fp64", steps=5)
        for strategy, n in (("single", 1), ("zero1", 3), ("zero2", 2))
    }
    weights = {name: load_file(run.run_dir / "weights.safetensors") for name, run in found.items()}
    for name in ("zero1", "zero2"):
        assert difference(weights[name], weights["single"]) < 1e-10


def _norms(train: Train, **job: Any) -> list[float]:
    settings = "clip_norm=none", "ema=none"
    run = train("zero_tasks:Scaled", *settings, precision="fp64", steps=3, **job)
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["grad_norm"] for line in lines]


@pytest.mark.slow
def test_the_norm_counts_a_number_once_where_nothing_is_clipped(train: Train) -> None:
    """It is that of the messages, with their padding."""
    wanted = _norms(train)
    assert _norms(train, strategy="zero2", ranks=3) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
def test_a_large_weight_is_sent_from_where_it_lies(train: Train) -> None:
    """A megabyte that two ranks cut evenly, and three do not; with passes that add up."""
    task = "zero_tasks:Scaled", f"width={2**15}"
    job: dict[str, Any] = {"precision": "fp64", "steps": 3, "micro_batch": 3}
    whole = load_file(train(*task, **job).run_dir / "weights.safetensors")
    for strategy, ranks in (("zero1", 2), ("zero2", 2), ("zero2", 3)):
        run = train(*task, strategy=strategy, ranks=ranks, **job)
        assert difference(load_file(run.run_dir / "weights.safetensors"), whole) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_tensor_more_costs_a_step_few_calls(strategy: str, train: Train, tmp_path: Path) -> None:
    """A model may have tens of thousands."""
    calls = {}
    for tensors in (20, 120):
        settings = f"tensors={tensors}", f"out={tmp_path / str(tensors)}"
        job: dict[str, Any] = {"strategy": strategy, "ranks": 2, "steps": 4}
        train("zero_tasks:ManyTensors", *settings, first_check="off", **job)
        calls[tensors] = json.loads((tmp_path / str(tensors)).read_text())
    more = {event: (n - calls[20][event]) / 100 for event, n in calls[120].items()}
    assert more["call"] <= 17 and more["c_call"] <= 24, more


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("zero1", 2), ("zero2", 3)])
def test_weights_whose_memory_is_another_are_updated_there(
    strategy: str, ranks: int, train: Train
) -> None:
    job: dict[str, Any] = {"precision": "fp64", "steps": 3, "first_check": "off"}
    whole = load_file(train("zero_tasks:MovedWeights", **job).run_dir / "weights.safetensors")
    run = train("zero_tasks:MovedWeights", strategy=strategy, ranks=ranks, **job)
    assert difference(load_file(run.run_dir / "weights.safetensors"), whole) < 1e-10


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("strategy", ["zero2", "zero2:reduce=tree"])
def test_a_batch_without_any_pass_updates_nothing(
    strategy: str, on_ranks: Callable[..., Any]
) -> None:
    on_ranks(2, "zero_tasks:steps_without_a_pass", {"strategy": strategy})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_ranks_with_fewer_passes_exchange_with_the_others(
    strategy: str, train: Train, references: dict[str, Any]
) -> None:
    """101 samples by 24, 3 at once, on 4 ranks: the last batch leaves two ranks without any."""
    _, weights = reference_for("Words", train, references)
    result = train(
        "contract_tasks:Words",
        strategy=strategy,
        ranks=4,
        precision="fp64",
        steps=STEPS,
        micro_batch=3,
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow
def test_each_rank_keeps_its_own_part(on_ranks: Callable[..., Any]) -> None:
    on_ranks(3, "zero_tasks:keeps_its_part", {"strategy": "zero1"})
    on_ranks(3, "zero_tasks:keeps_its_part", {"strategy": "zero2"})


@pytest.mark.slow
def test_bits_are_those_of_one_process_through_a_chain_of_strategies(train: Train) -> None:
    """Clipped, with an average: weights and average, after checkpoints of other ranks."""
    job: dict[str, Any] = {"bitwise": True, "checkpoint_every": 3}
    whole = train("zero_tasks:Scaled", strategy="single", steps=12, **job)
    parts = ("ddp", 3, 3), ("zero1", 4, 6), ("zero2", 2, 9), ("zero1", 3, 12)
    for strategy, ranks, steps in parts:
        run = train("zero_tasks:Scaled", strategy=strategy, ranks=ranks, steps=steps, **job)
        job["resume"] = str(run.run_dir)
    assert run.summary["weights_sha256"] == whole.summary["weights_sha256"]
    name = "average.safetensors"
    assert (run.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes()


WHOLE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon(p),
    "lars": lambda p: LARS(p, lr=0.01),
    "lamb": lambda p: LAMB(p, lr=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_looks_at_whole_tensors_is_found(name: str) -> None:
    optimizer = WHOLE[name]([nn.Parameter(torch.randn(4, 4))])
    assert groups_of_whole(optimizer, "--strategy zero1") == {0}


class ByRow(torch.optim.SGD):
    """By the length of each row: right where rows are whole, and wrong where columns are cut."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                p -= group["lr"] * p.grad / p.grad.norm(dim=1, keepdim=True)


class Counting(torch.optim.SGD):
    """By the length of the gradient, at a rate that falls with the parameters that have had one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()
                    group["seen"] = group.get("seen", 0) + 1


class Remembering(LARS):
    """Knows its parameters by themselves."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, lr=lr)
        self.layers = {p: 1.0 for group in self.param_groups for p in group["params"]}


class Factored(torch.optim.Adafactor):
    """Adafactor that factors large matrices alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                squares = p.grad.square()
                if p.ndim == 2 and min(p.shape) >= 16:
                    squares = squares.mean(1, keepdim=True) * squares.mean(0) / squares.mean()
                p -= 0.01 * p.grad / squares.sqrt()


class Clipping(torch.optim.AdamW):
    """Shortens each gradient to the length of 1000, or all of them together."""

    together = False

    def step(self, closure: Any = None) -> None:
        given = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        for some in [given] if self.together else [[p] for p in given]:
            nn.utils.clip_grad_norm_(some, 1e3)
        super().step()


class Together(Clipping):
    together = True


class Late(torch.optim.SGD):
    """By the length of the gradient from the fifth step on."""

    after = 4

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                if count > self.after:
                    p.grad = p.grad / p.grad.norm()
        super().step()


class MuchLater(Late):
    after = 900


class LateByItsOwnCount(torch.optim.SGD):
    """The same from the twentieth step on, of all weights, until the hundredth; then it raises."""

    made = 0

    def step(self, closure: Any = None) -> None:
        self.made += 1
        if self.made > 100:
            raise ValueError("over")
        for p in [p for g in self.param_groups for p in g["params"] if p.grad is not None]:
            p.grad = p.grad / p.grad.norm() if self.made > 19 else p.grad
        super().step()


class Decaying(torch.optim.SGD):
    """Each number by itself, at a rate that is none after fifty steps."""

    made = 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1 * (1 - self.made / 50) ** 0.5
        self.made += 1
        super().step()


def test_a_rule_that_is_over_when_it_is_asked_late_is_taken_as_it_was() -> None:
    assert not groups_of_whole(Decaying([nn.Parameter(torch.randn(4, 4))]), "--strategy zero1")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", [Factored, Clipping, Late, MuchLater, LateByItsOwnCount])
def test_what_only_large_weights_large_gradients_or_later_steps_show(kind: Any) -> None:
    assert groups_of_whole(kind([nn.Parameter(torch.randn(4, 4))]), "--strategy zero1") == {0}


HOOKED: dict[str, Callable[[torch.optim.Optimizer, Callable[..., None]], Any]] = {
    "register_step_pre_hook": lambda one, hook: one.register_step_pre_hook(hook),
    "register_step_post_hook": lambda one, hook: one.register_step_post_hook(hook),
    "register_optimizer_step_pre_hook": lambda _, hook: register_optimizer_step_pre_hook(hook),
    "register_optimizer_step_post_hook": lambda _, hook: register_optimizer_step_post_hook(hook),
    "in the place of its step": lambda one, hook: setattr(one, "step", hook),
}


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.parametrize("ask", [groups_of_whole, check_by_parameter])
def test_an_optimizer_with_a_hook_is_refused_and_the_hook_not_called(ask: Any, name: str) -> None:
    called = []
    for kind in (torch.optim.SGD, Late):
        optimizer = kind([nn.Parameter(torch.randn(4, 4))], lr=0.1)
        handle = HOOKED[name](optimizer, lambda *_: called.append(name))
        try:
            with pytest.raises(RequestError) as refused:
                ask(optimizer, "--strategy zero1")
        finally:
            if handle is not None:
                handle.remove()
        assert name in refused.value.found and not called


class Holding(torch.optim.SGD):
    """After each update it does something to a layer, which it knows by a function."""

    def __init__(self, layer: nn.Linear, do: Callable[[nn.Linear], object]) -> None:
        super().__init__(layer.parameters(), lr=0.1)
        self.hold = lambda: do(layer)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        with suppress(RequestError):
            self.hold()


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "data": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "in place": lambda layer: layer.weight.div_(layer.weight.norm(dim=1, keepdim=True)),
    "foreach": lambda layer: torch._foreach_mul_(list(layer.parameters()), 0.5),
    "buffer": lambda layer: layer.running.add_(1),  # type: ignore[operator, union-attr]
    "other data": lambda layer: setattr(layer.weight, "data", layer.weight.data / 2),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", CHANGES)
def test_what_steps_of_a_copy_would_change_of_the_model_is_refused(name: str) -> None:
    layer = nn.Linear(4, 4)
    layer.register_buffer("running", torch.zeros(2))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for ask in (groups_of_whole, check_by_parameter):
        with pytest.raises(RequestError, match="these would change what is trained"):
            ask(Holding(layer, CHANGES[name]), "--strategy zero1")
    if name != "other data":  # that is seen when it is done
        assert all(torch.equal(layer.state_dict()[name], was) for name, was in before.items())


class Noisy(torch.optim.SGD):
    """Draws, and leaves what is drawn."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        draws()


def draws() -> tuple[float, ...]:
    return random.random(), np.random.rand(), float(torch.rand(()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_a_fused_update_that_torch_has_not_of_parts_is_refused(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.randn(4, 4))], lr=0.1, fused=True)
    if kind is torch.optim.AdamW:
        check_fused(optimizer, "--strategy fsdp")
        return
    with pytest.raises(RequestError, match="leave fused=True out"):
        check_fused(optimizer, "--strategy fsdp")


def test_an_optimizer_that_is_asked_leaves_the_generators_as_they_were() -> None:
    optimizer = Noisy([nn.Parameter(torch.randn(4, 4))], lr=0.1)
    state = random_streams(torch.device("cpu"))
    expected = draws()
    set_random_streams(state, torch.device("cpu"))
    groups_of_whole(optimizer, "--strategy zero1")
    assert draws() == expected


class BySize(torch.optim.SGD):
    """Takes the sign of a gradient where a weight has few, or many, numbers."""

    many, bound = True, 100

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                by_sign = (p.numel() >= self.bound) == self.many
                p -= group["lr"] * (p.grad.sign() if by_sign else p.grad)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("many", "bound", "whole"), [(True, 100, {0}), (False, 100, {0}), (True, 600_000, {1})]
)
def test_a_rule_by_the_size_of_a_weight_is_asked_in_the_parts_of_the_job(
    many: bool, bound: int, whole: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 256 numbers in three parts, 96, 96 and 64; of 1,048,576 in two."""
    monkeypatch.setattr(BySize, "many", many)
    monkeypatch.setattr(BySize, "bound", bound)
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((16, 16), (2**13, 2**7))]
    optimizer = BySize([{"params": [one]} for one in weights], lr=0.1)
    cuts = {id(p): Cut(p.detach()).parts(n) for p, n in zip(weights, (3, 2), strict=True)}
    assert groups_of_whole(optimizer, "--strategy zero1", cuts) == whole


def test_clipping_of_all_parameters_together_is_refused() -> None:
    weights = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))]
    with pytest.raises(RequestError, match="updates every parameter by itself"):
        groups_of_whole(Together(weights), "--strategy zero1")


@pytest.mark.slow
def test_what_looks_at_columns_or_at_several_parameters_is_found() -> None:
    weights = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))]
    assert groups_of_whole(ByRow(weights[:1], lr=0.1), "--strategy tensor") == {0}
    for kind, found in (
        (OfAll, "another update where others have no gradient"),
        (Counting, "hyper-parameters that a step changes"),
        (Remembering, "its attribute 'layers', which refers to parameters"),
    ):
        with pytest.raises(RequestError, match="--strategy zero1 with") as refused:
            groups_of_whole(kind(weights, lr=0.1), "--strategy zero1")
        assert found in refused.value.found


class Mixed(torch.optim.SGD):
    """Plain in a group that says so, else by the length of a gradient; with a value of its own."""

    def __init__(self, groups: Any, lr: float = 0.01) -> None:
        super().__init__(groups, lr=lr)
        self.tag = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                length = 1.0 if group.get("plain") else float(p.grad.norm()) * self.tag
                p -= group["lr"] * p.grad / length


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.01, 0.0])
def test_every_group_is_asked_whatever_its_rate(lr: float) -> None:
    first, second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    groups = [{"params": [first], "plain": True}, {"params": [second]}]
    assert groups_of_whole(Mixed(groups[:1], lr), "--strategy zero1") == set()
    assert groups_of_whole(Mixed(groups, lr), "--strategy zero1") == {1}


def test_a_counter_of_a_weight_is_no_part_of_it() -> None:
    """A rank with one number of a bias keeps it in the shape of a counter of one number."""
    model = nn.Linear(3, 2)
    bias, weight = torch.ones(1), torch.ones(1, 3)
    kept = {
        "bias": {"moment": bias, "count": torch.ones(1)},
        "weight": {"moment": weight, "count": torch.ones(1)},
    }
    state = {"model": {"weight": weight, "bias": bias}, "optimizer": {"state": kept}}
    found = with_parameters(state, model, lambda name, tensor: tensor + 1, {})["optimizer"]["state"]
    assert all(float(found[name]["count"]) == 1 for name in kept)
    assert all(bool((found[name]["moment"] == 2).all()) for name in kept)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adamax", "Rprop"])
def test_an_optimizer_of_numbers_is_asked_and_left_as_it_was(kind: str) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.01)
    before = weight.detach().clone()
    groups = str(optimizer.param_groups)
    assert groups_of_whole(optimizer, "--strategy zero1") == set()
    assert torch.equal(weight, before) and weight.grad is None
    assert str(optimizer.param_groups) == groups
    assert weight not in optimizer.state or not any(
        isinstance(v, torch.Tensor) and v.any() for v in optimizer.state[weight].values()
    )
