"""1-bit SGD and its n bits: golden columns, CNTK's words, a simulation, and what residuals do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from allranks.torch.comm.comm import Comm
from allranks.torch.compression.codecs import ColumnQuantizer
from allranks.torch.parallel.data.buckets import Buckets
from allranks.torch.parallel.data.compressed.columns import one_bit
from compressed_simulation import STEPS, simulated
from conftest import Train

GIVEN = ([0.3, -0.7, 0.6, 0.1, -0.2], [0.3, -0.1, -0.2, 0.5, -0.2], [-0.1, -0.4, 0.2, 0, -0.2])
SENT = (
    [0.33333, -0.45, 0.33333, 0.33333, -0.45],
    [0.1625, -0.35, 0.1625, 0.1625, 0.1625],
    [0.070833, -0.35625, 0.070833, 0.070833, -0.35625],
)


def test_golden_column() -> None:
    quantizer, left = ColumnQuantizer(1), torch.zeros((1, 5), dtype=torch.float64)
    for given, sent in zip(GIVEN, SENT, strict=True):
        left += torch.tensor(given)
        message = quantizer.encode(left)
        found = quantizer.decode(message, 5, left.dtype)
        assert found[0].tolist() == pytest.approx(sent, abs=1e-5)
        left -= found
        assert float(left.sum()) == pytest.approx(0, abs=1e-6)
    assert left[0].tolist() == pytest.approx(
        [-0.066667, -0.04375, 0.033333, 0.033333, 0.04375], abs=1e-6
    )
    assert quantizer.decode(quantizer.encode(torch.tensor([[1.0, 2, 3]])), 3, left.dtype)[
        0
    ].tolist() == pytest.approx([2, 2, 2])


def test_words_are_interleaved() -> None:
    """Of 70 numbers word w has 0, 3, 6 and so on from w on: number 4 is bit 1 of word 1."""
    column = -torch.ones((1, 70))
    column[0, 4], column[0, 69] = 1, 1
    message = ColumnQuantizer(1).encode(column)
    assert message.shape == (1, 4 * 3 + 8)
    assert message.view(torch.int32)[0, :3].tolist() == [1 << 23, 1 << 1, 0]
    assert message.view(torch.float32)[0, 3:].tolist() == [-2, 2]  # -1 and 1 are at 1/4 and 3/4
    four = ColumnQuantizer(4).encode(torch.tensor([[1.0, -1, 0, 1, 1, -1, 1, -1, 4]]))
    assert four.view(torch.int32)[0, :2].tolist()[1] == 0x6686  # numbers 1, 3, 5, 7


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_n_bits_are_as_near_as_their_steps(bits: int) -> None:
    columns = torch.randn((5, 45), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns[3] = 0
    quantizer = ColumnQuantizer(bits)
    found = quantizer.decode(quantizer.encode(columns), 45, torch.float64)
    step = 8 * columns.square().mean(1, keepdim=True).sqrt() / (2**bits - 1)
    assert ((found - columns).abs() <= step / 2 + 1e-6).all()
    assert not found[3].any()


def coded(column: list[float], bits: int) -> list[float]:
    """What becomes of a column, number by number."""

    def rounded(value: float) -> float:
        return float(torch.tensor(value, dtype=torch.float32))

    if bits == 1:
        classes = [[a for a in column if (a >= 0) is above] for above in (False, True)]
        low, high = (sum(own) / max(len(own), 1) for own in classes)
        lower, upper = rounded(low - (high - low) / 2), rounded(high + (high - low) / 2)
        quarter = (upper - lower) / 4
        return [lower + (3 if a >= 0 else 1) * quarter for a in column]
    upper = rounded(4 * math.sqrt(sum(a * a for a in column) / len(column)))
    if upper == 0:
        return [0.0] * len(column)
    steps = 2**bits - 1
    codes = [min(max(int((a + upper) * steps / (2 * upper)), 0), steps) for a in column]
    return [(code + 0.5) * 2 * upper / steps - upper for code in codes]


def columns_sum(bits: int) -> Callable[[list[list[Tensor]], dict[Any, Tensor]], list[Tensor]]:
    def once(key: Any, given: Tensor, kept: dict[Any, Tensor]) -> Tensor:
        left = kept.get(key, torch.zeros_like(given)) + given
        rows = [coded(row.tolist(), bits) for row in left]
        sent = torch.tensor(rows, dtype=torch.float64)
        kept[key] = left - sent
        return sent

    def summed(of_ranks: list[list[Tensor]], kept: dict[Any, Tensor]) -> list[Tensor]:
        found = []
        for at, gradients in enumerate(zip(*of_ranks, strict=True)):
            total = torch.stack(gradients).sum(0)
            if total.dim() > 1:
                sent = [once((rank, at), own, kept) for rank, own in enumerate(gradients)]
                total = once(("sum", at), torch.stack(sent).sum(0), kept)
            found.append(total)
        return found

    return summed


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("reduce", "bits"), [("one-bit", 1), ("n-bit(bits=4)", 4)])
@pytest.mark.parametrize("ranks", [3, 2, 1])
def test_a_training_is_its_simulation(reduce: str, bits: int, ranks: int, train: Train) -> None:
    """AdamW in float64, uneven last batches; the bytes are those that the card promises."""
    flags: dict[str, Any] = {"ranks": ranks, "precision": "fp64", "steps": STEPS}
    result = train("contract_tasks:Plain", strategy=f"ddp:reduce={reduce}", **flags)
    found = load_file(result.run_dir / "weights.safetensors")
    for key, tensor in simulated(ranks, columns_sum(bits)).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-7)
    exact = simulated(ranks, columns_sum(bits), after=STEPS)
    assert max(float((found[key] - exact[key]).abs().max()) for key in found) > 1e-4
    summary = result.summary
    sent = summary["sent_bytes"]["gradients"] / STEPS
    assert sent == pytest.approx(summary["card_bytes_per_step"], rel=0.05)


@pytest.mark.slow
def test_residuals_of_both_stages_are_in_the_state(on_ranks: Callable[..., Any]) -> None:
    job = {"strategy": "ddp:reduce=one-bit,bucket_mb=0.0005"}
    on_ranks(2, "contract_workers:go_on_from_a_state", {"task": "Images", "job": job, "steps": 3})


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("feedback", [True, False])
def test_one_bit_converges_only_with_feedback(feedback: bool) -> None:
    """Noise has the mean 0; where the signs of two numbers are one, each gets the other's."""
    noise = torch.tensor([[3.0, 0.5], [-1, 0.5], [-1, -0.5], [-1, -0.5]])
    weight = nn.Parameter(torch.tensor([[1.0, 1.0]], dtype=torch.float64))
    reducer = one_bit(Comm(), 8, after=0)
    buckets = Buckets(["w"], [weight], tally_size=1, bucket_bytes=64, reducer=reducer)
    for step in range(1000):
        buckets.begin()
        assert weight.grad is not None
        weight.grad.copy_(weight.detach() + noise[step % 4])
        buckets.finish(range(8))
        weight.data.sub_(0.5 / (1 + step / 20) * weight.grad)
        if not feedback:
            for parts in reducer.state()["kept"].values():
                for residual in parts.values():
                    residual.zero_()
    error = float(weight.detach().abs().max())
    assert error < 0.05 if feedback else error > 0.2
