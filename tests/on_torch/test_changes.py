"""What changes while a training goes on: on all ranks alike and through checkpoints, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import plain_tasks
from allranks.checkpoint.export import export_weights
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Task, Trainer
from allranks.torch.model.reals import read_tensors
from allranks.torch.step.ema import MovingAverage
from allranks.training.rank_program import fit
from conftest import Train
from plain_workers import trained

OnRanks = Callable[..., Any]


@pytest.mark.slow(most=4)
@pytest.mark.parametrize(
    ("task", "stop", "setting"),
    [
        ("Averaged", 3, {"strategy": "ddp"}),
        ("Averaged", 6, {"strategy": "ddp", "bitwise": True}),
        ("Averaged", 10, {"strategy": "ddp-plain"}),
        ("ResumedGroup", 6, {"strategy": "ddp"}),
        ("Averaged", 6, {"strategy": "zero1"}),
        ("ComplexWeight", 6, {"strategy": "ddp"}),
        ("ComplexWeight", 6, {"strategy": "zero2"}),
        ("SparseRows", 6, {"strategy": "ddp"}),
    ],
)
def test_a_training_that_changes_goes_on_from_its_checkpoint(
    task: str, stop: int, setting: dict[str, Any], on_ranks: OnRanks, tmp_path: Path
) -> None:
    argument = {"task": task, "stop": stop, "setting": setting, "out": str(tmp_path)}
    on_ranks(2, "plain_workers:stop_and_go_on", argument)


@dataclass(kw_only=True)
class Unfrozen(Task):
    """Losses of weight 0.25, clipped; the first layer is frozen, or not."""

    frozen: bool = False
    batch_size: int = 8
    clip_norm: float | None = 1e-3

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        model[0].requires_grad_(not self.frozen)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_data(self) -> tuple[Tensor, Tensor]:
        data = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
        return data, data.sum(1, keepdim=True)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square()

    def weight(self, batch: Any) -> Tensor:
        return torch.full_like(batch[1], 0.25)


@pytest.mark.parametrize("clip_norm", [1e-3, None])
@pytest.mark.parametrize("strategy", ["single", "ddp", "ddp-plain"])
def test_the_step_that_unfreezes_divides_and_clips_what_is_new(
    strategy: str, clip_norm: float | None
) -> None:
    def step(frozen: bool) -> tuple[float | None, list[Tensor]]:
        task = Unfrozen(frozen=frozen, clip_norm=clip_norm)
        with Trainer(task, Job(strategy=strategy, steps=1), world=World()) as trainer:
            for batch in trainer.batches():
                trainer.strategy.model.requires_grad_()
                result = trainer.step(batch)
            return result.grad_norm, [p.detach() for p in trainer.strategy.model.parameters()]

    (norm, weights), (wanted_norm, wanted) = step(frozen=True), step(frozen=False)
    assert norm == pytest.approx(wanted_norm, rel=1e-6)
    for found, weight in zip(weights, wanted, strict=True):
        torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-8)


def test_a_wrapper_that_renames_weights_in_the_state_dict_is_saved() -> None:
    """As torch's own `checkpoint_wrapper` does."""

    class Wrapped(Unfrozen):
        def model(self) -> nn.Module:
            return checkpoint_wrapper(super().model())

    with Trainer(Wrapped(), Job(strategy="single", steps=2), world=World()) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        trainer.load_state(trainer.state())


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("task", "ranks", "match", "updates"),
    [
        ("ByRank", 2, "rank 1 trains '0.bias' and rank 0 does not", plain_tasks.CHANGE + 1),
        ("KeepsItsGradient", 1, "a backward pass in them left a gradient", 0),
        ("KeepsItsGradient", 2, "a backward pass in them left a gradient", 0),
        ("UpdatesInBackward", 1, "has replaced `.grad`", 0),
        ("UpdatesInBackward", 2, "has replaced `.grad`", 0),
        ("Router", 1, "which a forward pass has computed", 0),
        ("Router", 2, "which a forward pass has computed", 0),
        ("DetachedRouter", 2, "in the mean over all ranks", 1),
        ("RowsOfADenseTable", 1, "not of some rows alone", 0),
        ("RowsOfADenseTable", 2, "not of some rows alone", 0),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(
    task: str, ranks: int, match: str, updates: int, on_ranks: OnRanks
) -> None:
    argument = {"task": task, "match": match, "updates": updates, "setting": {}}
    on_ranks(ranks, "plain_workers:refused", argument)


def test_a_scheduler_of_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"write schedule\(step\)"):
        Trainer(plain_tasks.Scheduled())
    job = Job(steps=4, run_dir=str(tmp_path))
    with (
        Trainer(plain_tasks.ScheduledOnTheWay(), job) as trainer,
        pytest.raises(RequestError, match=r"write schedule\(step\)"),
    ):
        fit(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_an_optimizer_that_multiplies_gradients_gets_equal_bits(
    precision: str, train: Train
) -> None:
    digests = {
        train(
            "plain_tasks:Preconditioned", ranks=ranks, bitwise=True, steps=12, precision=precision
        ).summary["weights_sha256"]
        for ranks in (1, 2, 3)
    }
    assert len(digests) == 1


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("task", ["ComplexWeight", "Rotary"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_complex_weights_are_written_exported_and_read_again(
    task: str, precision: str, train: Train, tmp_path: Path
) -> None:
    run = train(
        f"plain_tasks:{task}", ranks=2, steps=4, precision=precision, checkpoint_every=4
    ).run_dir
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    names = export_weights(checkpoint, tmp_path / "exported.safetensors")
    exported = read_tensors(tmp_path / "exported.safetensors")
    written = read_tensors(run / "weights.safetensors")
    assert sorted(written) == names
    kind = torch.complex128 if precision == "fp64" else torch.complex64
    assert [t.dtype for t in written.values()].count(kind) == 1
    assert all(torch.equal(tensor, exported[name]) for name, tensor in written.items())
    again = getattr(plain_tasks, task)()
    again.pretrained = lambda: run / "weights.safetensors"
    with Trainer(again, Job(precision=precision)) as trainer:
        for name, tensor in trainer.weights():
            assert tensor.dtype == written[name].dtype
            torch.testing.assert_close(tensor, written[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp:reduce=bf16", "ddp:reduce=fp16", "ddp"])
def test_complex_weights_train_in_16_bits(precision: str, strategy: str, train: Train) -> None:
    result = train("plain_tasks:Waves", ranks=2, steps=6, strategy=strategy, precision=precision)
    assert result.summary["steps"] == 6


def test_an_average_is_exchanged_in_place() -> None:
    weight = nn.Parameter(torch.ones(3))
    memory = weight.data_ptr()
    average = MovingAverage(0.5, lambda **_: nullcontext())
    average.add(["weight"], [weight])
    with torch.no_grad():
        weight.mul_(3)
    average.update()
    with average.in_place():
        assert weight.data_ptr() == memory and weight.tolist() == [2.0, 2.0, 2.0]
    assert weight.data_ptr() == memory and weight.tolist() == [3.0, 3.0, 3.0]
    assert average.state()["weight"].tolist() == [2.0, 2.0, 2.0]


def test_ranks_that_train_apart_change_apart() -> None:
    task = plain_tasks.Unfrozen()
    job = Job(precision="fp64", steps=plain_tasks.STEPS, strategy="independent")
    wanted = plain_tasks.plain(plain_tasks.Unfrozen())
    found = trained(task, job, World())
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-13)
