"""`single` itself, beside loops written by hand in plain torch: what everything else stands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import contract_tasks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch import Trainer
from allranks.training.order import Order
from contract_tasks import made

STEPS = 12


def trained(task: Any, **job: Any) -> dict[str, Tensor]:
    with Trainer(task, Job(precision="fp64", steps=STEPS, **job)) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        return dict(trainer.weights())


def by_hand(task: Any, loss_of: Any) -> dict[str, Tensor]:
    """A plain loop over the same batches; `loss_of(model, batch)` is the whole scalar loss."""
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = task.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    data = task.train_data()
    tensors = data if isinstance(data, tuple) else tuple(data.values())
    order = Order(len(tensors[0]), task.batch_size, 0, task.last_batch)
    for step in range(STEPS):
        chosen = order.batch(*divmod(step, order.steps_per_epoch))
        if isinstance(data, tuple):
            batch: Any = tuple(tensor[chosen] for tensor in data)
        else:
            batch = {name: tensor[chosen] for name, tensor in data.items()}
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * task.schedule(step)
        optimizer.step()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name].detach(), rtol=1e-11, atol=1e-13)


def test_one_shard_with_batchnorm_and_clipping_is_plain_torch() -> None:
    task = contract_tasks.Images(shards=1, dropout=0.0)
    wanted = by_hand(task, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    assert_equal(trained(task), wanted)


def test_token_weights_regularizer_and_schedule_are_plain_torch() -> None:
    task = contract_tasks.Words()

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        weight = task.weight(batch).double()
        losses = task.loss(model(batch["text"][:, :-1]), batch)
        return (losses * weight).sum() / weight.sum() + task.regularizer(model)

    assert_equal(trained(task), by_hand(task, loss_of))


def test_a_loss_over_the_batch_is_plain_torch() -> None:
    class OneShard(contract_tasks.Pairs):
        def model(self) -> nn.Module:
            model = super().model()
            model.left[2] = nn.Identity()  # type: ignore[index]
            return model

    task = OneShard(shards=1)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        left, right = model(*batch)
        return F.cross_entropy(left @ right.T, torch.arange(len(left)))

    assert_equal(trained(task), by_hand(task, loss_of))


def test_parameters_without_a_gradient_are_left_alone() -> None:
    """As in one process: no weight decay, no momentum for what no sample used."""
    task = contract_tasks.Experts()
    wanted = by_hand(task, lambda model, batch: task.loss(model(batch[0]), batch).mean())
    assert_equal(trained(task), wanted)


def test_a_task_that_forgets_what_makes_its_fields_real_is_refused() -> None:
    with pytest.raises(TypeError, match="has no annotation"):
        type("Bare", (contract_tasks.Plain,), {"batch_size": 8})

    class NoDataclass(contract_tasks.Plain):
        batch_size: int = 8

    with pytest.raises(RequestError, match="@dataclass"):
        Trainer(NoDataclass())


def test_a_trainer_from_parts_is_the_same_trainer() -> None:
    task = contract_tasks.Plain()
    torch.manual_seed(0)
    trainer = Trainer.from_parts(
        task.model(),
        task.optimizer,
        loss=task.loss,
        train_data=task.train_data(),
        job=Job(precision="fp64", steps=STEPS),
        batch_size=24,
        epochs=100,
    )
    with trainer:
        losses = [trainer.step(batch).loss for batch in trainer.batches()]
        found = dict(trainer.weights())
        evaluation = trainer.evaluate((made(10, 4), made(10, seed=3)))
    assert losses[-1] < losses[0]
    assert evaluation.keys() == {"loss"}
    assert_equal(found, trained(task))


@pytest.mark.parametrize("drop", [False, True])
def test_the_end_of_an_epoch_keeps_or_drops_the_rest(drop: bool) -> None:
    task = contract_tasks.Plain(epochs=2, last_batch="drop" if drop else "keep")
    with Trainer(task) as trainer:
        sizes = [trainer.step(batch).samples for batch in trainer.batches()]
    assert sizes == [24, 24, 24, 24] * 2 if drop else [24, 24, 24, 24, 5] * 2


@pytest.mark.parametrize("drop", [False, True])
def test_a_stream_ends_when_all_of_its_shards_have(drop: bool) -> None:
    """Shard k has 10 + 3k samples, 3 go into each batch: 24 a step, then what is left."""
    task = contract_tasks.Uneven(epochs=2, last_batch="drop" if drop else "keep")
    with Trainer(task) as trainer:
        results = [trainer.step(batch) for batch in trainer.batches()]
        seen = trainer.progress.samples_seen
    per_epoch = sum(10 + 3 * shard for shard in range(8))
    if drop:
        assert {r.samples for r in results if r.updated} == {24}
    else:
        assert seen == 2 * per_epoch
    assert results[-1].updated is False
    assert trainer.progress.epoch == 2
