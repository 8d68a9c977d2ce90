"""DeMo: a momentum for each rank, of which the largest cosines are sent, and steps of signs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from allranks.errors import RequestError
from allranks.strategies.resolve import strategy_spec
from allranks.torch.compression.codecs import ErrorFeedback
from allranks.torch.compression.cosines import CosineBlocks, cosines
from compressed_simulation import STEPS, Sum, simulated
from conftest import Train
from demo_tasks import Signed

CPU = torch.device("cpu")
BETA = 0.9


def plain_cosines(count: int) -> Tensor:
    """The formula of the orthonormal DCT-II, number by number."""
    rows = []
    for k in range(count):
        size = math.sqrt((1 if k == 0 else 2) / count)
        rows.append([size * math.cos(math.pi * (2 * i + 1) * k / 2 / count) for i in range(count)])
    return torch.tensor(rows, dtype=torch.float64)


def demo_sum(keep: int, chunk: int) -> Sum:
    """Blocks of `chunk` rows and columns, which divide those of `Plain`; (1, n) where it is one."""

    def sums(of_ranks: list[list[Tensor]], kept: dict[Any, Tensor]) -> list[Tensor]:
        found = [torch.zeros_like(gradient) for gradient in of_ranks[0]]
        for rank, gradients in enumerate(of_ranks):
            for at, gradient in enumerate(gradients):
                momentum = BETA * kept.get((rank, at), torch.zeros_like(gradient)) + gradient
                matrix = momentum.view(-1, gradient.shape[-1])
                total = found[at].view(matrix.shape)
                high, wide = (min(chunk, size) for size in matrix.shape)
                left, right = plain_cosines(high), plain_cosines(wide)
                for row in range(0, matrix.shape[0], high):
                    for column in range(0, matrix.shape[1], wide):
                        block = matrix[row : row + high, column : column + wide]
                        sent = (left @ block @ right.T).flatten()
                        order = sorted(range(len(sent)), key=lambda k: -abs(float(sent[k])))
                        sent[order[keep:]] = 0
                        back = left.T @ sent.view(high, wide) @ right
                        total[row : row + high, column : column + wide] += back
                        block -= back
                kept[rank, at] = momentum
        return [total.sign() for total in found]

    return sums


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "keep", "chunk"), [(3, 3, 4), (2, 3, 4), (1, 3, 4), (2, 32, 8)])
def test_a_training_is_its_simulation(ranks: int, keep: int, chunk: int, train: Train) -> None:
    """SGD with weight decay in float64, uneven last batches; with k of a whole block, signs alone.

    The bytes are those that the card promises.
    """
    strategy = f"ddp:reduce=demo(k={keep},chunk={chunk},beta={BETA})"
    flags: dict[str, Any] = {"ranks": ranks, "precision": "fp64", "steps": STEPS}
    result = train("demo_tasks:Signed", strategy=strategy, **flags)
    found = load_file(result.run_dir / "weights.safetensors")
    for key, tensor in simulated(ranks, demo_sum(keep, chunk), kind=Signed).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-10)
    signs = simulated(ranks, signs_of_sums, kind=Signed)
    far = max(float((found[key] - signs[key]).abs().max()) for key in found)
    assert far < 1e-10 if keep == 32 else far > 1e-4
    sent = result.summary["sent_bytes"]["gradients"] / STEPS
    assert sent == pytest.approx(result.summary["card_bytes_per_step"], abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 2])
def test_a_training_in_parts_is_its_simulation(ranks: int, train: Train) -> None:
    """Groups of two sum two passes as they are; each rank has a momentum of its rows."""
    strategy = f"hsdp:shard=2,reduce=demo(k=3,chunk=4,beta={BETA})"
    flags: dict[str, Any] = {"ranks": ranks, "precision": "fp64", "steps": STEPS}
    result = train("demo_tasks:Signed", strategy=strategy, micro_batch=3, **flags)
    found = load_file(result.run_dir / "weights.safetensors")

    def sums(of_ranks: list[list[Tensor]], kept: dict[Any, Tensor]) -> list[Tensor]:
        groups = [of_ranks[at : at + 2] for at in range(0, ranks, 2)]
        whole = [[a + b for a, b in zip(*pair, strict=True)] for pair in groups]
        rows = [[part for g in group for part in g.split(-(-len(g) // 2))] for group in whole]
        parts = iter(demo_sum(3, 4)(rows, kept))
        return [torch.cat([next(parts) for _ in g.split(-(-len(g) // 2))]) for g in whole[0]]

    for key, tensor in simulated(ranks, sums, kind=Signed).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-10)
    sent = result.summary["sent_bytes"]["gradients"] / STEPS
    assert sent <= result.summary["card_bytes_per_step"] + 1


def signs_of_sums(of_ranks: list[list[Tensor]], kept: dict[Any, Tensor]) -> list[Tensor]:
    return [torch.stack(own).sum(0).sign() for own in zip(*of_ranks, strict=True)]


def test_cosines_are_the_formula_and_orthonormal() -> None:
    for count in (1, 2, 5, 64):
        found = cosines(count, torch.float64, CPU)
        torch.testing.assert_close(found, plain_cosines(count), rtol=0, atol=1e-14)
        wanted = torch.eye(count, dtype=torch.float64)
        torch.testing.assert_close(found @ found.T, wanted, rtol=0, atol=1e-14)


def test_golden_steps_of_a_momentum() -> None:
    """Of (1, 3): cosines 4/sqrt 2 and -2/sqrt 2. The first is sent, so (2, 2), and (-1, 1) stays;
    half of it and (1, 1) are (.5, 1.5): (1, 1) is sent, and (-.5, .5) stays."""
    feedback = ErrorFeedback(CosineBlocks((2,), 1, 64), torch.zeros(2, dtype=torch.float64), 0.5)
    for gradient, sent, left in (([1, 3], [2, 2], [-1, 1]), ([1, 1], [1, 1], [-0.5, 0.5])):
        message = feedback.encode(torch.tensor(gradient, dtype=torch.float64))
        found = torch.zeros(2, dtype=torch.float64)
        feedback.codec.add_decoded(message, found)
        torch.testing.assert_close(found, torch.tensor(sent).double())
        torch.testing.assert_close(feedback.residual, torch.tensor(left).double())


@pytest.mark.parametrize("shape", [(6, 10), (130,), (7, 3, 2), (128, 64)])
def test_all_of_a_block_is_all_of_it(shape: tuple[int, ...]) -> None:
    """Blocks of 6 x 10, 65, 7 x 6 and 64 x 64."""
    given = torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(0)).double()
    codec = CosineBlocks(shape, 4096, 65 if len(shape) == 1 else 64)
    found = torch.zeros_like(given)
    codec.add_decoded(codec.encode(given), found)
    torch.testing.assert_close(found, given)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp:reduce=demo(k=3,chunk=4)", "hsdp:reduce=demo(k=3)"])
def test_a_momentum_is_in_the_state(strategy: str, on_ranks: Callable[..., Any]) -> None:
    argument = {"module": "demo_tasks", "task": "Signed", "job": {"strategy": strategy}, "steps": 3}
    on_ranks(2, "contract_workers:go_on_from_a_state", argument)


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("strategy", ["ddp:reduce=demo", "hsdp:shard=2,reduce=demo"])
def test_digits_are_learnt(strategy: str, train: Train) -> None:
    ranks = 4 if "shard" in strategy else 2
    result = train("demo_tasks:SignedDigits", "epochs=8", strategy=strategy, ranks=ranks)
    assert result.summary["eval"]["accuracy"] > 0.95


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("strategy", "task", "why"),
    [
        ("ddp:reduce=demo", "contract_tasks:Plain", "AdamW"),
        ("ddp:reduce=demo", "demo_tasks:SignedPenalised", "a regularizer"),
        ("local-sgd:learners=1,inner=ddp(reduce=demo)", "contract_tasks:Plain", "AdamW"),
    ],
)
def test_other_updates_are_refused(strategy: str, task: str, why: str, train: Train) -> None:
    with pytest.raises(RequestError, match=why):
        train(task, strategy=strategy, ranks=2, steps=1)


def test_a_momentum_of_sgd_is_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="SGD without momentum"):
        train("demo_tasks:Signed", "momentum=0.9", strategy="ddp:reduce=demo", steps=1)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("ddp:reduce=demo(chunk=65)", "12 bits"),
        ("hsdp:reduce=demo(k=17,chunk=4)", "12 bits"),
        ("hsdp:reduce=demo,offload=cpu", "where gradients are exchanged"),
        ("fsdp:reduce=demo", "one of mean, tree, top-k, two-bit"),
    ],
)
def test_what_cannot_be_is_refused(strategy: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        assert strategy_spec(strategy, 2).mesh
