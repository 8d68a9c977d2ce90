"""Tasks whose steps go bad at a sample of choice, and what ranks do with them in the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import contract_tasks
from allranks.errors import BadStep
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.strategies.shards import even_sizes, owned_shards
from allranks.torch import Trainer
from allranks.training.order import Order
from contract_tasks import SAMPLES

BAD = 40  # the sample that goes bad
KINDS = {"nan": float("nan"), "inf": float("inf"), "gradient": 0.0, "none": 1.0}


def scales(bad: int, kind: str, samples: int = SAMPLES) -> Tensor:
    """The factor under the root of each sample's loss: 1, but for the bad one."""
    factors = torch.ones(samples, dtype=torch.float64)
    factors[bad] = KINDS[kind]
    return factors


def rooted(output: Tensor, scale: Tensor) -> Tensor:
    """A part of the loss that is NaN or inf where `scale` is; at 0 only its gradient is NaN."""
    return (output.square().sum(1) * scale).sqrt()


class Counting(nn.Module):
    """Writes a buffer in forward, as no good model should."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("constant", torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(inputs.detach().sum())
            self.replaced = self.replaced + 1
        return inputs


@dataclass(kw_only=True)
class BadImages(contract_tasks.Images):
    """BatchNorm, dropout, AdamW and buffers of the model's own."""

    bad: int = BAD
    kind: str = "nan"
    clip_norm: float | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(*super().model(), Counting())

    def train_data(self) -> Any:
        return *super().train_data(), scales(self.bad, self.kind)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none") + rooted(output, batch[2])


class BadImagesOnly(BadImages):
    def model(self) -> nn.Module:
        return contract_tasks.Images.model(self)


@dataclass(kw_only=True)
class BadPlain(contract_tasks.Plain):
    """No layer that couples samples, and a schedule that counts updates."""

    bad: int = BAD
    kind: str = "nan"

    def train_data(self) -> Any:
        return *super().train_data(), scales(self.bad, self.kind)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) + rooted(output, batch[2])

    def schedule(self, step: int) -> float:
        return 0.9**step


class AlwaysBad(BadPlain):
    def train_data(self) -> Any:
        inputs, targets, factors = super().train_data()
        return inputs, targets, factors * torch.nan


@dataclass(kw_only=True)
class BadInside(contract_tasks.Plain):
    """The gradient is first NaN inside the model, where one sample has a zero under a root."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Root(), nn.Linear(8, 1))

    def train_data(self) -> Any:
        inputs, targets = super().train_data()
        inputs[BAD] = 0
        return inputs, targets


class Root(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        zero = (inputs[:, :1] - inputs[:, :1].detach()).square()
        at_zero = inputs.detach().abs().sum(1, keepdim=True) < self.least
        return inputs + torch.where(at_zero, zero, zero + 1).sqrt()

    least = 1e-9


class BadInsideNoBias(BadInside):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8, bias=False), Root(), nn.Linear(8, 1))


class BadRegularizer(contract_tasks.Plain):
    def regularizer(self, model: nn.Module) -> Tensor:
        return model[0].weight.sum() * torch.inf  # type: ignore[index, operator, union-attr]


class PulledExperts(contract_tasks.Experts):
    """A regularizer on a parameter that no sample uses: its gradient stands in no bucket."""

    def regularizer(self, model: nn.Module) -> Tensor:
        never: Any = model.never
        return 1e3 * never.weight.square().sum()


class BadPairs(contract_tasks.Pairs):
    """A loss over the batch; its bad sample is bad in the output of its rank."""

    def train_data(self) -> Any:
        left, right = super().train_data()
        right[BAD] = torch.nan
        return left, right


class BadStream(contract_tasks.Uneven):
    """The third sample of shard 5 is NaN in the first epoch."""

    def train_data(self) -> Any:
        return _BadStream()

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)


class _BadStream(contract_tasks.UnevenStream):
    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[Any]:
        for at, pair in enumerate(super().open(shard, epoch, seed, skip), start=skip):
            is_bad = (shard, epoch, at) == (5, 0, 2)
            yield pair[0], pair[1] * torch.nan if is_bad else pair[1]


SPIKE_STEP = 23


@dataclass(kw_only=True)
class Spiky(contract_tasks.Plain):
    """Steps of 4 samples; the sample that is second in step 23 wants far too much."""

    batch_size: int = 4
    shards: int = 4
    times: float = 1e3

    def train_data(self) -> Any:
        inputs, targets = super().train_data()
        targets[spiky_sample()] *= self.times
        return inputs, targets


def spiky_sample() -> int:
    return int(Order(SAMPLES, 4, 0, "keep").batch(0, SPIKE_STEP)[1])


class Noisy(SGD):
    """Adds noise to the weights at every step, as Langevin dynamics does."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-2)
        return super().step(closure)


class Langevin(contract_tasks.Plain):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return Noisy(model.parameters(), lr=1e-2)


class NoisyRegularizer(contract_tasks.Plain):
    def regularizer(self, model: nn.Module) -> Tensor:
        weight: Any = model[0].weight  # type: ignore[index]
        return (weight * torch.randn_like(weight)).sum()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)


# --- what is where -------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a sample is in the first epoch."""

    step: int
    shard: int
    rank: int


def place_of(sample: int, ranks: int, batch_size: int = 24, shards: int = 8) -> Place:
    order = Order(SAMPLES, batch_size, 0, "keep")
    for step in range(order.steps_per_epoch):
        chosen = order.batch(0, step).tolist()
        if sample in chosen:
            sizes = even_sizes(len(chosen), shards)
            at = chosen.index(sample)
            shard = next(k for k in range(shards) if at < sum(sizes[: k + 1]))
            owns = (rank for rank in range(ranks) if shard in owned_shards(shards, ranks, rank))
            return Place(step, shard, next(owns))
    raise AssertionError(sample)


# --- what runs in the ranks ----------------------------------------------------------------


def _trainer(argument: dict[str, Any], attempt: str = "", **job: Any) -> Trainer:
    torch.set_num_threads(1)
    world = World.from_environment()
    if world.store:
        world = replace(world, store=world.store + attempt)
    kind = globals().get(argument["task"]) or getattr(contract_tasks, argument["task"])
    task = kind(**argument.get("fields", {}))
    return Trainer(task, Job(**{**argument["job"], **job}), world=world)


def held(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of weights, buffers and optimizer state, by name."""
    step = trainer.strategy.step
    tensors = dict(trainer.strategy.model.state_dict())
    for name, parameter in zip(step.names, step.parameters, strict=True):
        for key, value in step.optimizer.state[parameter].items():
            tensors[f"{name} {key}"] = torch.as_tensor(value)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal to the bit."""
    if left.keys() != right.keys():
        return False
    bits = (
        (left[n].reshape(-1).view(torch.uint8), right[n].reshape(-1).view(torch.uint8))
        for n in left
    )
    return all(torch.equal(a, b) for a, b in bits)


def every_policy(argument: dict[str, Any]) -> None:
    """Each kind of bad step under each policy; what must and must not change."""
    rank = World.from_environment().rank
    place = Place(**argument["place"])
    whom = f"rank {place.rank}: the {{}} of sample {BAD} (shard {place.shard}) is"
    says = {
        "nan": [f"step {place.step}: the loss is nan", whom.format("loss") + " nan"],
        "inf": [f"step {place.step}: the loss is inf", whom.format("loss") + " inf"],
        "gradient": [
            f"step {place.step}: the gradient is not finite; ",
            whom.format("gradient") + " not finite for '0.weight'",
            "first seen in the gradient at the output of the model",
        ],
    }
    for kind, wanted in says.items():
        given = {**argument, "fields": {**argument["fields"], "kind": kind}}
        with _trainer(given, f"-stop-{kind}", on_bad_step="stop") as trainer:
            for batch in trainer.batches(steps=place.step):
                assert trainer.step(batch).bad == ""
            before = held(trainer)
            with pytest.raises(BadStep) as raised:
                trainer.step(next(trainer.batches()))
            assert same(before, held(trainer))
            assert trainer.progress.batch_index == place.step
            for words in wanted:
                assert words in str(raised.value), (rank, str(raised.value))
            assert "rank" not in str(raised.value).replace(wanted[1], "").replace("no rank", "")
        with _trainer(given, f"-skip-{kind}", on_bad_step="skip") as trainer:
            for batch in trainer.batches(steps=place.step + 3):
                before = held(trainer)
                result = trainer.step(batch)
                is_bad = batch.index == place.step
                assert result.updated is not is_bad
                assert same(before, held(trainer)) is is_bad
                assert bool(result.bad) is is_bad
                assert not is_bad or all(words in result.bad for words in wanted), result.bad
            assert trainer.progress.batch_index == place.step + 3
            assert trainer.progress.updates == place.step + 2
            assert trainer.guard.skipped_in_a_row == 0
        with _trainer(given, f"-warn-{kind}", on_bad_step="warn") as trainer:
            for batch in trainer.batches(steps=place.step + 2):
                result = trainer.step(batch)
                assert result.updated
                if batch.index == place.step:
                    assert all(words in result.bad for words in wanted)
                    assert not trainer.strategy.step.parameters[0].isfinite().all()
            assert "weight '0.weight' was not finite before this step" in result.bad


def messages(argument: dict[str, Any]) -> None:
    """Train with `skip`; every rank writes what it was told about each step that went bad."""
    with _trainer(argument) as trainer:
        found = [[r.batch_index, r.bad] for r in map(trainer.step, trainer.batches()) if r.bad]
        path = Path(argument["out"]) / f"rank-{trainer.world.rank}.json"
        path.write_text(json.dumps(found))


def train_and_save(argument: dict[str, Any]) -> None:
    """Train; every rank saves its weights, and the leader what was bad."""
    with _trainer(argument) as trainer:
        results = [trainer.step(batch) for batch in trainer.batches()]
        rank, out = trainer.world.rank, Path(argument["out"])
        weights = {name: tensor.contiguous() for name, tensor in trainer.weights()}
        save_file(weights, out / f"rank-{rank}.safetensors")
        rows = [[r.batch_index, r.updated, r.bad, r.grad_norm] for r in results]
        (out / f"rank-{rank}.json").write_text(json.dumps(rows))


def run(task: Any, batches: Iterable[Any], **job: Any) -> Any:
    """One rank, here."""
    with Trainer(task, Job(**job)) as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]
