"""What would change the result in silence is refused, or made the same on every rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import contract_tasks
import plain_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.torch.model.activation_checkpointing import _computing_again
from conftest import Train


def first_step(task: Any, **job: Any) -> Trainer:
    with Trainer(task, Job(**job)) as trainer:
        trainer.rehearse()
        trainer.step(next(trainer.batches()))
        return trainer


class OwnNorm(nn.BatchNorm1d):
    """A subclass, as many model libraries have one."""


class Frozen(nn.BatchNorm1d):
    """Which `train()` leaves in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        self.outer = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, inputs, use_reentrant=False))


def with_model(make: Callable[[], nn.Module]) -> Any:
    return type("Changed", (contract_tasks.Plain,), {"model": lambda self: make()})()


@pytest.mark.parametrize(
    ("make", "job", "match"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 8), OwnNorm(8), nn.Linear(8, 1)), {}, "OwnNorm"),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), Frozen(8, track_running_stats=False)),
            {},
            "Frozen",
        ),
        (Checkpointed, {}, "checkpointing"),
        (lambda: nn.Sequential(nn.Linear(4, 8), spectral_norm(nn.Linear(8, 1))), {}, None),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), spectral_norm(nn.Linear(8, 1))),
            {"bitwise": True},
            "writes .* in its forward pass",
        ),
    ],
)
def test_models_that_follow_the_ranks(make: Any, job: dict[str, Any], match: str | None) -> None:
    if match is not None:
        with pytest.raises(RequestError, match=match):
            first_step(with_model(make), **job)
    else:
        assert any("_u" in name for name in first_step(with_model(make), **job).user_buffers)


def test_a_frozen_batchnorm_is_trained_as_it_is() -> None:
    made: list[Frozen] = []

    def make() -> nn.Module:
        made.append(Frozen(8))
        return nn.Sequential(nn.Linear(4, 8), made[0], nn.Linear(8, 1))

    assert first_step(with_model(make), bitwise=True).witness.testimony.found == []
    assert torch.equal(made[0].running_mean, torch.zeros(8))


def test_batchnorm_with_shards_of_one_sample_is_refused() -> None:
    with pytest.raises(RequestError, match="no variance"):
        first_step(contract_tasks.Images(batch_size=8))


def test_a_trained_parameter_outside_of_the_model_is_refused() -> None:
    class Temperature(contract_tasks.Plain):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            self.temperature = nn.Parameter(torch.ones(()))
            return torch.optim.SGD([*model.parameters(), self.temperature], lr=0.1)

    with pytest.raises(RequestError, match="not in the model"):
        first_step(Temperature())


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    class Newton(contract_tasks.Plain):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(model.parameters())

    with pytest.raises(RequestError, match="closure"):
        first_step(Newton())


def test_a_parameter_used_by_a_loss_over_the_batch_is_refused() -> None:
    class Clip(contract_tasks.Pairs):
        def model(self) -> nn.Module:
            self.made = super().model()
            self.made.scale = nn.Parameter(torch.ones(()))
            return self.made

        def loss(self, output: Any, batch: Any) -> Tensor:
            return super().loss(output, batch) * self.made.scale

    with pytest.raises(RequestError, match="uses the parameter 'scale' itself"):
        first_step(Clip())


def test_metrics_that_change_their_names_are_refused() -> None:
    @dataclass(kw_only=True)
    class PerClass(contract_tasks.Images):
        def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
            return {f"class {int(batch[1][0])}": (1, 1)}

    with Trainer(PerClass()) as trainer, pytest.raises(RequestError, match="every metric"):
        trainer.evaluate()


def test_a_model_is_the_users_own_again_after_training() -> None:
    trainer = first_step(contract_tasks.Images())
    model = pickle.loads(pickle.dumps(trainer.strategy.model))
    assert {type(m) for m in model} >= {nn.BatchNorm2d, nn.BatchNorm1d, nn.Dropout}
    for parameter in trainer.strategy.model.parameters():
        assert not parameter._post_accumulate_grad_hooks, "a hook is left on the user's model"


def test_a_frozen_batchnorm_stays_frozen() -> None:
    class Frozen(contract_tasks.Images):
        def model(self) -> nn.Module:
            model = super().model()
            model[1].eval()  # type: ignore[index, operator]
            return model

    with Trainer(Frozen()) as trainer:
        trainer.evaluate()
        trainer.step(next(trainer.batches()))
        norms = [
            m for m in trainer.strategy.model if isinstance(m, nn.modules.batchnorm._BatchNorm)
        ]
        assert [int(norm.num_batches_tracked) for norm in norms] == [0, 1]


def test_a_state_does_not_go_on_by_itself() -> None:
    with Trainer(contract_tasks.Images()) as trainer:
        batches = trainer.batches()
        trainer.step(next(batches))
        state = trainer.state()
        before = copy.deepcopy(state)
        trainer.step(next(batches))
        for name, tensor in state["strategy"]["model"].items():
            assert torch.equal(tensor, before["strategy"]["model"][name]), name


def test_a_trainer_that_cannot_be_made_leaves_the_process_as_it_was() -> None:
    with pytest.raises(RequestError):
        Trainer(contract_tasks.Images(batch_size=8), Job(bitwise=True))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_random_choices_of_a_task_are_the_same_on_every_rank(train: Train) -> None:
    """A split drawn in `train_data`, and numbers drawn inside a stream, from any generator."""
    for task in ("RandomSplit", "RandomStream"):
        losses = {
            train(f"contract_tasks:{task}", precision="fp64", steps=3, ranks=ranks).summary[
                "train_loss"
            ]
            for ranks in (1, 3)
        }
        assert max(losses) == pytest.approx(min(losses), rel=1e-12), task


def test_a_group_that_is_not_the_world_is_refused(on_ranks: Callable[..., Any]) -> None:
    """Ranks that joined by themselves, in an environment that says there is only one."""
    on_ranks(2, "contract_workers:join_by_hand", None)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "gpipe"])
def test_a_copy_of_a_model_in_parts_is_refused(strategy: str, train: Train) -> None:
    with pytest.raises(RequestError, match="--set ema=") as refused:
        train("contract_tasks:Averaged", ranks=2, steps=1, strategy=strategy)
    assert refused.value.asked.startswith("copy.deepcopy of a ")


def test_a_copy_of_a_whole_model_is_none_of_that(train: Train) -> None:
    train("contract_tasks:Averaged", ranks=2, steps=1, strategy="zero1")


def test_blocks_that_are_computed_again_find_no_keys_of_their_first_time() -> None:
    """As models of transformers do: `use_cache` of their config is off while they train."""
    ends = []
    for computes_again in (False, True):
        job = Job(activation_checkpointing=computes_again)
        with Trainer(plain_tasks.Cached(), job) as trainer:
            losses = [trainer.step(batch).loss for batch in trainer.batches()]
            assert any("use_cache" in note for note in trainer.model_notes) == computes_again
            settings = trainer.model.config
            with trainer.whole_model() as model:
                assert model.config.use_cache is True  # `save_pretrained` writes it
            assert settings.use_cache is not computes_again
        ends.append(losses)
        assert settings.use_cache is True  # as the task made it
    assert ends[0] == ends[1] and len(ends[0]) == 4
    with Trainer(plain_tasks.Cached(can_say_so=False), Job(activation_checkpointing=True)) as again:
        with pytest.raises(RequestError, match="cache of keys and values") as raised:
            again.step(next(iter(again.batches())))
        assert "blocks(self, model)" in raised.value.do


def test_a_device_that_fails_while_a_block_is_computed_again_is_no_cache() -> None:
    with pytest.raises(RuntimeError, match="CUDA error"), _computing_again(nullcontext()):
        raise RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RequestError, match="then: ValueError"), _computing_again(nullcontext()):
        raise ValueError


@dataclass(kw_only=True)
class Flat(contract_tasks.Plain):
    """A loss for each of five tokens, in one row, as nanoGPT has it."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.expand(-1, 5).reshape(-1)


@dataclass(kw_only=True)
class OfModel(contract_tasks.Plain):
    """The loss that the model returns, as those of transformers do where they get labels."""

    def model(self) -> nn.Module:
        return _WithLoss()

    def loss(self, output: Any, batch: Any) -> Tensor:
        return output.loss  # type: ignore[no-any-return]


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x)
        return Output(logits.square().mean(), logits)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


@pytest.mark.parametrize(
    ("task", "found", "do"),
    [(Flat(), "(120,) for 24", "loss.view(24, 5)"), (OfModel(), "a scalar", "output.logits")],
)
def test_a_loss_that_is_no_mean_is_told_from_one(task: Any, found: str, do: str) -> None:
    with Trainer(task, Job(micro_batch=24)) as trainer:
        with pytest.raises(RequestError) as raised:
            trainer.step(next(iter(trainer.batches())))
        assert found in raised.value.found and do in raised.value.do
