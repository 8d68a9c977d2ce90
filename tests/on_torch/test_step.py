"""What every step shares, number by number, on one rank in this process: scale, guard, clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import contract_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from guard_tasks import Counting


@dataclass(kw_only=True)
class Steps(contract_tasks.Plain):
    """SGD, whose update shows how long a gradient is, where AdamW shows its direction alone."""

    lr: float = 0.1

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr)


class Counted(Steps):
    """Writes a buffer in every forward pass."""

    def model(self) -> nn.Module:
        return nn.Sequential(Counting(), *super().model())  # type: ignore[arg-type]


class Steep(Steps):
    """What pulls the weights to 1 is far longer than the gradient of the loss."""

    def regularizer(self, model: nn.Module) -> Tensor:
        return torch.stack([(p - 1).square().sum() for p in model.parameters()]).sum()


def trainer_of(task: Any, **job: Any) -> Trainer:
    return Trainer(task, Job(threads=1, **job))


def steps(trainer: Trainer, number: int) -> list[Any]:
    at = trainer.progress.batch_index
    return [trainer.step(batch) for batch in trainer.batches(steps=at + number)]


def gradients(**job: Any) -> tuple[list[Tensor], float]:
    """Of the first step, as the update had them; and how long it said that they were."""
    with trainer_of(Steps(), **job) as trainer:
        (result,) = steps(trainer, 1)
        found = [p.grad.clone() for p in trainer.strategy.step.parameters if p.grad is not None]
        return found, result.grad_norm


@pytest.mark.parametrize("scale", ["64", "4096", "dynamic:initial=16384"])
def test_gradients_lose_the_loss_scale_again(scale: str) -> None:
    wanted, length = gradients()
    found, its_length = gradients(precision="fp16", loss_scale=scale)
    assert its_length == pytest.approx(length, rel=5e-3)
    assert length == pytest.approx(sum(float(g.square().sum()) for g in wanted) ** 0.5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)


def test_a_step_that_is_skipped_is_no_good_one_of_the_scale() -> None:
    """Its loss is NaN, so the scale is not to blame for it: it neither falls nor comes nearer."""
    job = {"precision": "fp16", "loss_scale": "dynamic:initial=64,every=3", "on_bad_step": "skip"}
    with trainer_of(Steps(), **job) as trainer:
        scale = trainer.strategy.step.loss_scale
        assert scale is not None and all(result.updated for result in steps(trainer, 2))
        trainer.strategy.step.poison_next()
        (bad,) = steps(trainer, 1)
        assert bad.bad and not bad.updated and not bad.overflow
        assert (scale.value, scale.good_steps) == (64, 2)
        steps(trainer, 1)
        assert (scale.value, scale.good_steps) == (128, 0)


def test_an_overflow_leaves_the_buffers_of_the_model() -> None:
    with trainer_of(Counted(), precision="fp16", loss_scale="dynamic:initial=64") as trainer:
        scale = trainer.strategy.step.loss_scale
        steps(trainer, 2)
        before = {name: buffer.clone() for name, buffer in trainer.strategy.model.named_buffers()}
        assert scale is not None and before["0.replaced"] > 0
        scale.value = 2.0**60
        (result,) = steps(trainer, 1)
        assert result.overflow and not result.updated and not result.bad
        for name, buffer in trainer.strategy.model.named_buffers():
            assert torch.equal(buffer, before[name]), name
        scale.value = 64.0
        steps(trainer, 1)
        assert trainer.strategy.model[0].replaced > before["0.replaced"]  # type: ignore[index]


def test_what_is_usual_is_how_long_gradients_are_before_clipping() -> None:
    with trainer_of(Steps(clip_norm=1e-4), spike=100.0) as trainer:
        lengths = [result.grad_norm for result in steps(trainer, 8)]
        assert min(lengths) > 1e-2
        assert trainer.guard.state()["norms"] == lengths


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_what_is_clipped_is_the_gradient_with_the_regularizer(clip: float) -> None:
    task = Steep(clip_norm=clip)
    with trainer_of(task, precision="fp64") as trainer:
        model = trainer.strategy.model
        before = [parameter.detach().clone() for parameter in model.parameters()]
        (result,) = steps(trainer, 1)
        after = [parameter.detach().clone() for parameter in model.parameters()]
    moved = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True)) ** 0.5
    assert result.grad_norm > 5
    assert moved == pytest.approx(task.lr * min(clip, result.grad_norm), rel=1e-5)


def test_an_evaluation_divides_by_the_weight_of_its_tokens() -> None:
    task = contract_tasks.Words()
    data = task.train_data()
    with trainer_of(task, precision="fp64") as trainer:
        found = trainer.evaluate(data)["loss"]
        with torch.no_grad():
            losses = task.loss(trainer.strategy.model(**task.inputs(data)), data)
    weight = task.weight(data).double()
    assert found == pytest.approx(float((losses * weight).sum() / weight.sum()), rel=1e-12)
    assert found != pytest.approx(float((losses * weight).mean()), rel=1e-2)


def test_an_evaluation_leaves_every_layer_in_its_mode() -> None:
    """A frozen part that stays in evaluation mode is not woken up,
    and the rest not put to sleep."""
    with trainer_of(contract_tasks.Images()) as trainer:
        model = trainer.strategy.model
        model.get_submodule("1").eval()
        before = [module.training for module in model.modules()]
        trainer.evaluate()
        assert [module.training for module in model.modules()] == before
        assert before.count(False) == 1


def test_the_loss_of_a_step_is_the_mean_over_the_weight_of_its_tokens() -> None:
    task = contract_tasks.Words()
    with trainer_of(task, precision="fp64") as trainer:
        batch = next(trainer.batches())
        with torch.no_grad():
            parts = [micro.data for micro in batch.micros]
            data = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            model = trainer.strategy.model
            losses = task.loss(model(**task.inputs(data)), data)
            wanted = (losses * task.weight(data)).sum() / task.weight(data).sum()
            wanted = wanted + task.regularizer(model)
        assert trainer.step(batch).loss == pytest.approx(float(wanted), rel=1e-12)


def test_what_no_rank_used_has_no_gradient_where_gradients_lie_in_buckets() -> None:
    """One of zeros would be decayed, and move with the momentum of before."""
    with trainer_of(contract_tasks.Experts(), strategy="ddp") as trainer:
        model = trainer.strategy.model
        never = {n: p.detach().clone() for n, p in model.named_parameters() if "never" in n}
        steps(trainer, 3)
        assert all(torch.equal(model.get_parameter(name), was) for name, was in never.items())
        assert all(model.get_parameter(name).grad is None for name in never)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda losses: losses.detach(), "a tensor without a gradient"),
        (lambda losses: losses.long(), "whole numbers"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(
    spoil: Callable[[Tensor], Tensor], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by torch, in frames that are none of the user's."""
    loss = contract_tasks.Plain.loss
    monkeypatch.setattr(contract_tasks.Plain, "loss", lambda *given: spoil(loss(*given)))
    with Trainer(contract_tasks.Plain()) as trainer:
        batch = next(iter(trainer.batches()))
        with pytest.raises(RequestError, match=found):
            trainer.step(batch)
