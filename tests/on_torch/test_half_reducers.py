"""16-bit reducers: equal to a plain simulation, bit by bit; the tally is not rounded;
they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import contract_tasks
from allranks.errors import ProgramError, RequestError
from allranks.job.config import resolve
from allranks.strategies.shards import even_sizes, owned_shards
from allranks.tools.check.check import is_approximate
from allranks.torch.parallel.data.half import _matching
from allranks.training.order import Order
from conftest import Train
from half_workers import KINDS, plain_sum

STEPS = 20


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_have_the_bits_of_the_simulation(ranks: int, on_ranks: Callable[..., Any]) -> None:
    """Buckets smaller than the ranks and uneven ones, infinities, a tally beyond 16 bits."""
    on_ranks(ranks, "half_workers:sums_are_the_simulation", None)


@pytest.mark.parametrize(("values", "part"), [(7, 4), (8, 4), (1, 4), (4, 4), (3, 1), (0, 0)])
def test_a_bucket_fills_its_rows_one_after_another(values: int, part: int) -> None:
    given, rows = torch.arange(1, values + 1), torch.zeros((4, part), dtype=torch.int64)
    for value, row in _matching(given, rows):
        row.copy_(value)
    assert rows.flatten()[:values].tolist() == given.tolist()
    assert not rows.flatten()[values:].any()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("fp16", 2), ("bf16", 3)])
def test_a_training_is_its_simulation(name: str, ranks: int, train: Train) -> None:
    """20 steps of AdamW in float64, uneven last batches; and the bytes that the card promises."""
    flags: dict[str, Any] = {"ranks": ranks, "precision": "fp64", "steps": STEPS}
    strategy = f"ddp:reduce={name},bucket_mb=0.0001"
    result = train("contract_tasks:Plain", strategy=strategy, **flags)
    found = load_file(result.run_dir / "weights.safetensors")
    wanted = simulated(ranks, KINDS[name])
    exact = simulated(ranks, torch.float64)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-10, atol=1e-12)
        assert (found[key] - exact[key]).abs().max() > 1e-6, "nothing was rounded"
    summary = result.summary
    padding = 4 * 2 * ranks * 8  # of at most 4 buckets, in both directions
    sent = summary["sent_bytes"]["gradients"] / STEPS
    assert summary["card_bytes_per_step"] <= sent <= summary["card_bytes_per_step"] + padding


def simulated(ranks: int, kind: torch.dtype) -> dict[str, Tensor]:
    """A plain loop in one process: the gradient of each rank's samples, rounded and summed."""
    task = contract_tasks.Plain()
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = task.optimizer(model)
    data = task.train_data()
    order = Order(len(data[0]), task.batch_size, 0, "keep")
    for step in range(STEPS):
        chosen = order.batch(*divmod(step, order.steps_per_epoch))
        sizes = even_sizes(len(chosen), task.shards)
        of_ranks = []
        for rank in range(ranks):
            owned = owned_shards(task.shards, ranks, rank)
            first = sum(sizes[: owned.start])
            own = chosen[first : first + sum(sizes[k] for k in owned)]
            batch = [tensor[own] for tensor in data]
            loss = task.loss(model(batch[0]), batch).sum() / len(chosen)
            of_ranks.append(torch.autograd.grad(loss, list(model.parameters())))
        for position, parameter in enumerate(model.parameters()):
            parameter.grad = plain_sum([gradients[position] for gradients in of_ranks], kind)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
def test_moments_of_batchnorm_and_the_loss_are_not_rounded(train: Train) -> None:
    """After one step from equal weights they are those of `mean`; the weights are not."""
    flags: dict[str, Any] = {"ranks": 3, "precision": "fp64", "steps": 1}
    results = [
        train("contract_tasks:Images", strategy=f"ddp:reduce={how}", **flags)
        for how in ("bf16", "mean")
    ]
    ours, theirs = (load_file(result.run_dir / "weights.safetensors") for result in results)
    for name in (name for name in theirs if "running" in name):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-14, atol=1e-14)
    losses = [result.summary["train_loss"] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)
    assert not torch.equal(ours["0.weight"], theirs["0.weight"])


def test_one_rank_rounds_nothing(train: Train) -> None:
    found = [
        train("contract_tasks:Images", strategy=strategy, steps=3).summary
        for strategy in ("ddp", "ddp:reduce=bf16")
    ]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[1]["sent_bytes"]["gradients"] == found[1]["card_bytes_per_step"] == 0


def test_a_bucket_leaves_before_backward_ends(on_ranks: Callable[..., Any]) -> None:
    argument = {"task": "Images", "job": {"strategy": "ddp:reduce=bf16,bucket_mb=0.0005"}}
    on_ranks(2, "contract_workers:first_bucket_leaves_early", argument)


@pytest.mark.slow
def test_what_fp16_cannot_hold_is_a_bad_step(train: Train) -> None:
    """Finite on every rank, infinite where it was exchanged: the guard sees it on all of them."""
    with pytest.raises(ProgramError, match="only their sum is not"):
        train("half_tasks:Steep", strategy="ddp:reduce=fp16", ranks=2, steps=2, max_restarts=0)
    result = train("half_tasks:Steep", strategy="ddp:reduce=bf16", ranks=2, steps=2)
    assert result.summary["steps"] == 2


@pytest.mark.slow
def test_digits_are_learnt_in_bf16(train: Train) -> None:
    result = train("digits", "epochs=6", strategy="ddp:reduce=bf16", ranks=2)
    assert result.summary["eval"]["accuracy"] >= 0.96


def test_16_bits_promise_neither_one_process_nor_its_bits() -> None:
    job = resolve("digits", {"strategy": "ddp:reduce=fp16", "ranks": 2}).job
    assert is_approximate(job, 2) and not is_approximate(job, 1)
    with pytest.raises(RequestError, match="only the tree"):
        resolve("digits", {"strategy": "ddp:reduce=bf16", "ranks": 2, "bitwise": True})
