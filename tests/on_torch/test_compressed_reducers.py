"""Compressed gradients: equal to plain simulations with error feedback, exact where nothing is
left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import contract_tasks
from allranks.errors import RequestError
from allranks.strategies.resolve import strategy_spec
from allranks.torch.compression.codecs import ErrorFeedback, TwoBit
from allranks.torch.compression.cosines import orthonormal
from allranks.torch.parallel.data.compressed.power_sgd import _drawn, _Group
from compressed_simulation import STEPS, THRESHOLD, Sum, simulated, top_k_sum, two_bit_sum
from conftest import Train


def power_sum(of_ranks: list[list[Tensor]], kept: dict[Any, Tensor]) -> list[Tensor]:
    """Rank 1: a product of two vectors. The first right factor is taken from the reducer."""
    names = [name for name, _ in contract_tasks.Plain().model().named_parameters()]
    found = []
    for at, name in enumerate(names):
        gradients = [own[at] for own in of_ranks]
        if gradients[0].dim() < 2:
            found.append(torch.stack(gradients).sum(0))
            continue
        whole = [kept.get((rank, at), 0) + g for rank, g in enumerate(gradients)]
        right = kept.get(("right", at))
        right = _drawn(name, gradients[0].shape[1], 1)[:, 0] if right is None else right
        left = torch.stack([matrix @ right for matrix in whole]).sum(0)
        left = left / left.norm()
        rights = [matrix.T @ left for matrix in whole]
        for rank, (matrix, own) in enumerate(zip(whole, rights, strict=True)):
            kept[rank, at] = matrix - torch.outer(left, own)
        kept["right", at] = torch.stack(rights).sum(0)
        found.append(torch.outer(left, kept["right", at]))
    return found


SIMULATIONS: dict[str, Sum] = {
    "top-k(k=3,chunk=16,after=2)": top_k_sum,
    f"two-bit(threshold={THRESHOLD})": two_bit_sum,
    "power-sgd(min_rate=0)": power_sum,
}


@pytest.mark.slow(but=1, most=7)
@pytest.mark.parametrize("reduce", SIMULATIONS)
@pytest.mark.parametrize("ranks", [3, 2, 1])
def test_a_training_is_its_simulation(reduce: str, ranks: int, train: Train) -> None:
    """AdamW in float64, uneven last batches; the bytes are those that the card promises."""
    flags: dict[str, Any] = {"ranks": ranks, "precision": "fp64", "steps": STEPS}
    result = train("contract_tasks:Plain", strategy=f"ddp:reduce={reduce}", **flags)
    found = load_file(result.run_dir / "weights.safetensors")
    after = 2 if "after=2" in reduce else 0
    wanted = simulated(ranks, SIMULATIONS[reduce], after)
    exact = simulated(ranks, top_k_sum, after=STEPS)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-10)
    assert max(float((found[key] - exact[key]).abs().max()) for key in found) > 1e-4
    summary = result.summary
    if not after:
        sent = summary["sent_bytes"]["gradients"] / STEPS
        assert sent == pytest.approx(summary["card_bytes_per_step"], rel=0.05)


EXACT = ["top-k(k=32,chunk=32)", "power-sgd(rank=1000,min_rate=0)"]


@pytest.mark.slow(most=3)
@pytest.mark.parametrize("reduce", EXACT)
@pytest.mark.parametrize(("task", "ranks"), [("Images", 3), ("Words", 2)])
def test_nothing_is_left_out_where_the_card_says_so(
    reduce: str, task: str, ranks: int, train: Train
) -> None:
    flags: dict[str, Any] = {"precision": "fp64", "steps": STEPS}
    strategy = f"ddp:reduce={reduce},bucket_mb=0.0005"
    ours, theirs = (
        load_file(result.run_dir / "weights.safetensors")
        for result in (
            train(f"contract_tasks:{task}", strategy=strategy, ranks=ranks, **flags),
            train(f"contract_tasks:{task}", strategy="single", **flags),
        )
    )
    for name, tensor in theirs.items():
        tensor = tensor.double()
        difference = (ours[name].double() - tensor).norm() / max(float(tensor.norm()), 1e-12)
        assert difference < 1e-10, name


@pytest.mark.slow
@pytest.mark.parametrize("reduce", SIMULATIONS)
def test_residuals_are_in_the_state(reduce: str, on_ranks: Callable[..., Any]) -> None:
    strategy = f"ddp:reduce={reduce},bucket_mb=0.0005"
    argument = {"task": "Images", "job": {"strategy": strategy}, "steps": 3}
    on_ranks(2, "contract_workers:go_on_from_a_state", argument)


def test_golden_bytes_of_two_bits() -> None:
    rows = ([0.3, -0.7, 0.6, 0.1, -0.2], [0.3, -0.1, -0.2, 0.5, -0.2], [-0.1, -0.4, 0.2, 0, -0.2])
    sent = ([0, -0.5, 0.5, 0, 0], [0.5, 0, 0, 0.5, 0], [0, -0.5, 0, 0, -0.5])
    feedback = ErrorFeedback(TwoBit(0.5), torch.zeros(5, dtype=torch.float64))
    for row, wanted, byte in zip(rows, sent, (0x2C, 0xC3, 0x20), strict=True):
        message = feedback.encode(torch.tensor(row, dtype=torch.float64))
        found = torch.zeros(5, dtype=torch.float64)
        feedback.codec.add_decoded(message, found)
        assert found.tolist() == wanted
        assert message[0] == byte
    assert feedback.residual.tolist() == pytest.approx([0, -0.2, 0.1, 0.1, -0.1])
    strange = torch.zeros(5, dtype=torch.float64)
    feedback.codec.add_decoded(TwoBit(0.5).encode(torch.tensor([torch.nan, 1, 0, 0, 0])), strange)
    assert strange.isnan().tolist() == [True, False, False, False, False]


def test_columns_become_orthonormal_or_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn((2, 30, 4), generator=generator, dtype=torch.float64)
    given[1, :, 2] = given[1, :, 0] - 3 * given[1, :, 1]
    found = orthonormal(given)
    wanted = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
    wanted[1, 2, 2] = 0
    torch.testing.assert_close(found.mT @ found, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(found @ (found.mT @ given), given, rtol=1e-12, atol=1e-12)


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("reduce", ["top-k(k=16,chunk=256,after=20)", "power-sgd(rank=2,after=20)"])
def test_digits_are_learnt(reduce: str, train: Train) -> None:
    result = train("digits", "epochs=6", strategy=f"ddp:reduce={reduce}", ranks=2)
    assert result.summary["eval"]["accuracy"] >= 0.95


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("ddp:reduce=top-k(k=9,chunk=8)", "12 bits"),
        ("ddp:reduce=top-k(chunk=8192)", "12 bits"),
        ("ddp:reduce=power-sgd,late=1", "residual of its own"),
    ],
)
def test_what_cannot_be_is_refused(strategy: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        assert strategy_spec(strategy, 2).mesh


def test_a_loss_scale_is_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="another loss scale"):
        train("contract_tasks:Plain", strategy="ddp:reduce=two-bit", precision="fp16", steps=1)


@pytest.mark.parametrize("size", [8, 128], ids=["as a batch", "one by one"])
def test_of_a_matrix_that_is_not_finite_nothing_stays(size: int) -> None:
    """It is seen in the sum, and gone from the residual; of finite ones M = P Q' + e."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in range(2)]
    views = [one.clone() for one in given]
    group = _Group(["one", "other"], views, 1)
    left = orthonormal(group.left_factors())
    group.write_sums(left, group.right_factors(left))
    for view, residual, matrix in zip(views, group.residual, given, strict=True):
        torch.testing.assert_close(view + residual, matrix)
        assert torch.linalg.matrix_rank(view) == 1
    views[0][3, 4] = torch.inf
    left = orthonormal(group.left_factors())
    group.write_sums(left, group.right_factors(left))
    assert not views[0].isfinite().all() and views[1].isfinite().all()
    assert group.residual.isfinite().all()


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("name", ["two-bit", "top-k", "power-sgd", "one-bit", "n-bit"])
def test_every_default_trains_digits(name: str, train: Train) -> None:
    result = train("digits", strategy=f"ddp:reduce={name}", ranks=4)
    assert result.summary["eval"]["accuracy"] > 0.95
