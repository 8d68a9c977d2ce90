"""`dp`: replicas in threads, each with weights of its own, give what one process gives.

What every strategy must give is in `tests/test_every_strategy.py`; here is what only replicas in
one process can get wrong.
"""

from __future__ import annotations

import threading
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import contract_tasks
import trainer_tasks
from allranks.errors import BadStep, RequestError
from allranks.job.job import Job
from allranks.strategies.shards import even_sizes, micro_batches
from allranks.torch import Trainer
from allranks.torch.data.batch import shares_of
from allranks.torch.machine import check_devices
from conftest import Train
from in_this_process import STEPS, assert_equal, one_thread_each, trained, with_model

DP = "dp:replicas=3"

__all__ = ["one_thread_each"]


# --- the same as one process ----------------------------------------------------------------


class KeepsItsWeights(nn.Module):
    """An LSTM (which lists its weights), a list of its own, a tied weight, its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 1)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.inner.weight
        self.listed = [self.inner.bias]

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(next(self.parameters()).dtype)
        hidden = self.again(torch.relu(self.inner(self.lstm(inputs.unsqueeze(2))[0][:, -1])))
        out: Tensor = self.out(hidden) + sum(bias.sum() for bias in self.listed)
        return out


class Noted(nn.Parameter):
    """A class of its own, as libraries have one."""

    def doubled(self) -> Tensor:
        return self * 2


class Hooked(nn.Module):
    """Hooks without state on modules, a parametrization, and what is noted on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), weight_norm(nn.Linear(4, 1))
        self.weight: Any = Noted(torch.eye(4))
        self.weight.gain, self.weight.gains = 0.5, [2.0]
        self.inner.register_forward_hook(lambda module, inputs, output: output * 2)
        self.inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
        self.inner.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
        self.out.register_forward_pre_hook(self.note)
        self.seen: list[Tensor] = []

    def note(self, module: nn.Module, inputs: Any) -> None:
        self.seen.append(inputs[0])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(inputs.requires_grad_() * 1))
        gain = self.weight.gain * self.weight.gains[0]
        out: Tensor = self.out(hidden @ self.weight.doubled() * gain)
        return out + self.seen.pop().sum(1, keepdim=True)


class Changing(contract_tasks.Plain):
    """Its callback changes a rate of dropout, freezes a weight,
    and leaves a layer in evaluation."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)
        )

    def callbacks(self) -> list[Any]:
        return [self]

    def on_start(self, trainer: Any) -> None:
        self.on_step(trainer, None, None)

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        model, step = trainer.strategy.model, trainer.progress.batch_index
        model[2].p = 0.1 * step
        model[1].train(step != 2)
        model[3].bias.requires_grad_(step < 3)


@dataclass(kw_only=True)
class Few(contract_tasks.Images):
    """Batches of 7 samples on 8 shards: with 8 replicas one has none."""

    batch_size: int = 20
    shards: int = 8


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("task", "job"),
    [
        pytest.param(contract_tasks.Images(), {"micro_batch": 7}, id="micro-batches"),
        pytest.param(contract_tasks.Pictures(), {"micro_batch": 2}, id="parts of shards"),
        pytest.param(contract_tasks.Pairs(), {"micro_batch": 9}, id="loss over the batch"),
        pytest.param(contract_tasks.Images(), {"strategy": "dp:replicas=8"}, id="many replicas"),
        pytest.param(contract_tasks.Words(), {"strategy": "dp:replicas=1"}, id="one replica"),
        pytest.param(trainer_tasks.Blocks(), {"activation_checkpointing": True}, id="recomputed"),
        pytest.param(trainer_tasks.Blocks(frozen=True), {"channels_last": True}, id="frozen"),
        pytest.param(with_model(KeepsItsWeights), {}, id="weights that a module keeps"),
        pytest.param(with_model(Hooked), {}, id="hooks of modules"),
    ],
)
def test_equal_to_one_process(task: Any, job: dict[str, Any]) -> None:
    wanted = trained(task, **{**job, "strategy": "single"})
    assert_equal(trained(task, **{"strategy": DP, **job}), wanted)


def test_what_is_changed_on_the_way_reaches_every_replica() -> None:
    def run(strategy: str) -> tuple[dict[str, Tensor], list[float]]:
        task = Changing()
        losses = []
        with Trainer(task, Job(strategy=strategy, precision="fp64")) as trainer:
            task.on_start(trainer)
            for batch in trainer.batches(steps=STEPS):
                losses.append(trainer.step(batch).loss)
                task.on_step(trainer, batch, None)
            return {n: t.clone() for n, t in trainer.strategy.model.state_dict().items()}, losses

    assert_equal(run(DP), run("single"))


@given(samples=st.integers(1, 40), limit=st.none() | st.integers(1, 40), replicas=st.integers(1, 9))
def test_replicas_share_whole_pieces_in_order(
    samples: int, limit: int | None, replicas: int
) -> None:
    sizes = dict(enumerate(even_sizes(samples, 8)))
    for pieces in micro_batches(sizes, limit):
        shares = shares_of(pieces, replicas)
        assert sum(shares, ()) == pieces
        assert len(shares) == min(replicas, len(pieces))
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 1


# --- replicas and threads --------------------------------------------------------------------


def test_every_replica_has_weights_a_thread_and_a_gradient_of_its_own() -> None:
    """All forward passes meet at one barrier, so they run at the same time."""
    meeting, seen = threading.Barrier(3, timeout=60), []

    class Meets(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if not self.training:
                return super().forward(inputs)
            meeting.wait()
            output = super().forward(inputs)
            seen.append((id(self), self.weight.data_ptr(), threading.get_ident(), output.dtype))
            assert torch.is_grad_enabled() and self.weight.is_leaf
            return output

    task = with_model(lambda: nn.Sequential(nn.Linear(4, 8), Meets(8, 1)))
    job = Job(strategy=DP, precision="bf16", witness="off")  # which runs the first one alone
    with Trainer(task, job) as trainer:
        replicas = [trainer.strategy.first, *trainer.strategy.copies]  # type: ignore[attr-defined]
        grown: list[int] = []
        for replica in replicas[1:]:
            weight = replica.model[1].weight
            weight.register_hook(lambda g, k=replica.number: grown.append(k))
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
            assert sorted(grown) == [1, 2]
            grown.clear()
            for replica in replicas[1:]:
                assert all(weight.grad is None for weight in replica.model.parameters())
        for column in range(3):
            assert len({row[column] for row in seen}) == 3, "one each, the same in both steps"
        assert {row[3] for row in seen} == {torch.bfloat16}, "arithmetic goes along"


def test_the_first_error_of_a_replica_names_it_once_all_are_done() -> None:
    done = []

    class Fails(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training and threading.current_thread() is not threading.main_thread():
                done.append(threading.current_thread().name)
                if (inputs[:, 0] == 7).any():
                    raise ValueError("a sample that no replica can take")
            return super().forward(inputs)

    class Task(contract_tasks.Plain):
        def model(self) -> nn.Module:
            return Fails(4, 1)

        def train_data(self) -> tuple[Tensor, Tensor]:
            inputs, targets = super().train_data()
            inputs[:, 0] = 7
            return inputs, targets

    with Trainer(Task(), Job(strategy=DP)) as trainer:
        with pytest.raises(ValueError, match="no replica can take") as failed:
            trainer.step(next(trainer.batches()))
        assert len(done) == 3
        told = "".join(traceback.format_exception(failed.value))
        assert "in replica 0 of 3, on cpu" in told and "in forward" in told
    assert not [t.name for t in threading.enumerate() if t.name.startswith("replica")]


def test_a_bad_sample_is_found_as_in_one_process() -> None:
    told = []
    for strategy in ("single", DP):
        with Trainer(contract_tasks.Images(), Job(strategy=strategy)) as trainer:
            batches = trainer.batches()
            trainer.step(next(batches))
            trainer.strategy.step.poison_next()
            with pytest.raises(BadStep) as bad:
                trainer.step(next(batches))
            told.append(str(bad.value))
    assert told[0] == told[1] and "the loss of sample" in told[0]


# --- going on ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_ddp_on_two_ranks_goes_on_where_dp_stopped(train: Train) -> None:
    flags = {"precision": "fp64", "checkpoint_every": 3, "threads": 1}
    first = train("contract_tasks:Images", strategy=DP, steps=3, **flags)
    resumed = train(
        "contract_tasks:Images",
        strategy="ddp",
        ranks=2,
        steps=7,
        resume=str(first.run_dir),
        **flags,
    )
    assert resumed.summary["resumed_from_step"] == 3
    wanted, _ = trained(contract_tasks.Images(), 7)
    found = load_file(resumed.run_dir / "weights.safetensors")
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=1e-10, atol=1e-12)


# --- what is refused ---------------------------------------------------------------------------


class RunsAgain(nn.Module):
    """Checkpoints its dropout by hand where the thread is that of the last replica."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        self.outer = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if threading.current_thread().name.startswith("replica-2"):
            return self.outer(checkpoint(self.inner, inputs, use_reentrant=False))
        return self.outer(self.inner(inputs))


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of me")


def no_rows(self: Any, samples: list[Any]) -> Any:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets), torch.zeros(3)


class Keeping(nn.Linear):
    """Its hook keeps what it sees: by a closure, or in an object beside the model."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__(4, 1)
        self.kept: list[Tensor] = []
        keeps = lambda module, inputs, output: self.kept.append(output)  # noqa: E731
        self.register_forward_hook(keeps if kept is None else kept)


class Recorder:
    def note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.last = output


@dataclass(kw_only=True)
class Clamped(contract_tasks.Plain):
    """A hook on a parameter, which is not linear."""

    when: str = ""

    def model(self) -> nn.Module:
        model = nn.Linear(4, 1)
        if self.when == "before":
            model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        if self.when == "accumulated":
            model.weight.register_post_accumulate_grad_hook(lambda weight: None)
        return model

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        if self.when == "late":
            model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return torch.optim.SGD(model.parameters(), lr=0.1)


class GradientPenalty(contract_tasks.Plain):
    def inputs(self, batch: Any) -> Tensor:
        rows: Tensor = batch[0].requires_grad_()
        return rows

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        losses = super().loss(output, batch)
        if not torch.is_grad_enabled():
            return losses
        (slope,) = torch.autograd.grad(output.sum(), batch[0].requires_grad_(), create_graph=True)
        return losses + slope.pow(2).sum(1)


@pytest.mark.parametrize("strategy", [DP, "model-parallel:by=size,split=4"])
def test_a_gradient_by_an_input_is_refused_in_loss(strategy: str) -> None:
    with pytest.raises(RequestError, match="the gradient of an output by an input"):
        trained(GradientPenalty(), 1, strategy=strategy)


@pytest.mark.parametrize("when", ["before", "accumulated", "late"])
def test_a_hook_on_a_parameter_is_refused(when: str) -> None:
    with pytest.raises(RequestError, match="a hook on the parameter 'weight'"):
        trained(Clamped(when=when), 1, strategy=DP)
    trained(Clamped(when=when), 1, strategy="dp:replicas=1")


@pytest.mark.parametrize(
    ("task", "job", "found"),
    [
        (with_model(Keeping), {}, "a hook on the module '' that keeps something of its own"),
        (with_model(lambda: Keeping(Recorder().note)), {}, "that keeps something of its own"),
        (with_model(RunsAgain), {}, "such a layer ran again during backward"),
        (with_model(lambda: NoCopy(4, 1)), {}, "TypeError: there is one of me"),
        (
            with_model(lambda: nn.Linear(4, 1)),
            {"compile": "eager"},
            "copies of the model in threads",
        ),
        (
            with_model(lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), Mean())),
            {},
            "an output of shape () for 9 samples",
        ),
        (
            type("NoRows", (contract_tasks.Pictures,), {"collate": no_rows})(),
            {},
            "a tensor of shape (3,) in a batch of 24 samples",
        ),
    ],
)
def test_what_replicas_cannot_do_is_refused(task: Any, job: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError) as refused:
        trained(task, 1, strategy=DP, **job)
    assert found in refused.value.found


class Mean(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean()


class WithTable(contract_tasks.Pictures):
    """What goes into the model has a table beside the samples, of as many rows as a batch."""

    def collate(self, samples: list[Any]) -> Any:
        inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        return inputs, targets, torch.ones(self.batch_size, dtype=inputs.dtype)


@pytest.mark.parametrize("strategy", [DP, "model-parallel:by=size,split=4"])
def test_a_table_of_as_many_rows_as_samples_by_chance_is_not_cut(strategy: str) -> None:
    with pytest.raises(RequestError, match=r"a tensor of shape \(24,\) in a batch of 24 samples"):
        trained(WithTable(), 2, strategy=strategy)
    task = contract_tasks.Pictures()
    trained(task, 1, strategy=strategy)
    assert "collate" not in vars(task)


def test_more_replicas_than_devices_are_refused() -> None:
    with pytest.raises(RequestError) as refused:
        check_devices(Job(device="cuda", strategy="dp:replicas=999"), 1)
    assert refused.value.asked == "--device cuda --strategy dp:replicas=999"
    assert "every replica needs a device of its own" in str(refused.value)
