"""Parts of gradients that are sent compressed, under `fsdp` and `hsdp`: equal to plain simulations
with error feedback, exact where nothing is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from allranks.errors import RequestError
from allranks.strategies.card import Workload
from allranks.strategies.cards import CARDS
from allranks.strategies.resolve import strategy_spec
from compressed_simulation import STEPS, THRESHOLD, Sum, simulated, top_k_sum, two_bit_sum
from conftest import Train

TOP_K = "top-k(k=3,chunk=16,after=2)"
SUMS: dict[str, Sum] = {TOP_K: top_k_sum, f"two-bit(threshold={THRESHOLD})": two_bit_sum}


def batched(given: Sequence[Any], count: int) -> list[Sequence[Any]]:
    return [given[at : at + count] for at in range(0, len(given), count)]


def cut(gradients: list[Tensor], parts: int) -> list[Tensor]:
    """What each owner has of each layer of `Plain`, which is a unit of two tensors: flat."""
    found = []
    for layer in batched(gradients, 2):
        whole = [torch.zeros(-(-len(g) // parts) * parts, *g.shape[1:]).double() for g in layer]
        for padded, gradient in zip(whole, layer, strict=True):
            padded[: len(gradient)] = gradient
        for rows in zip(*(padded.chunk(parts) for padded in whole), strict=True):
            found.append(torch.cat([part.flatten() for part in rows]))
    return found


def joined(pieces: list[Tensor], like: list[Tensor], parts: int) -> list[Tensor]:
    """The gradients that were cut."""
    found = []
    for layer, own in zip(batched(like, 2), batched(pieces, parts), strict=True):
        sizes = [-(-len(g) // parts) * g[0].numel() for g in layer]
        of_each = zip(*(piece.split(sizes) for piece in own), strict=True)
        for gradient, rows in zip(layer, of_each, strict=True):
            found.append(torch.cat(rows)[: gradient.numel()].view(gradient.shape))
    return found


def sum_of_parts(summed: Sum, parts: int, group: int) -> Sum:
    """`summed`, of parts; `group` ranks at a time add up their gradients before it."""

    def sums(of_ranks: list[list[Tensor]], kept: dict[Any, Tensor]) -> list[Tensor]:
        groups = [
            [torch.stack(own).sum(0) for own in zip(*ranks, strict=True)]
            for ranks in batched(of_ranks, group)
        ]
        total = summed([cut(gradients, parts) for gradients in groups], kept)
        return joined(total, of_ranks[0], parts)

    return sums


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("reduce", SUMS)
@pytest.mark.parametrize(
    ("name", "ranks", "parts", "group"),
    [("fsdp", 3, 3, 1), ("hsdp:shard=2", 4, 2, 2), ("fsdp:reshard=false", 2, 2, 1)],
)
def test_a_training_is_its_simulation(
    name: str, ranks: int, parts: int, group: int, reduce: str, train: Train
) -> None:
    """AdamW in float64, uneven last batches; the bytes are those that the card promises."""
    flags: dict[str, Any] = {"ranks": ranks, "precision": "fp64", "steps": STEPS}
    strategy = f"{name}{',' if ':' in name else ':'}reduce={reduce}"
    result = train("contract_tasks:Plain", strategy=strategy, **flags)
    found = load_file(result.run_dir / "weights.safetensors")
    after = 2 if reduce == TOP_K else 0
    wanted = simulated(ranks, sum_of_parts(SUMS[reduce], parts, group), after)
    exact = simulated(ranks, top_k_sum, after=STEPS)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-10)
    assert max(float((found[key] - exact[key]).abs().max()) for key in found) > 1e-4
    if not after:
        sent = result.summary["sent_bytes"]["gradients"] / STEPS
        assert sent == pytest.approx(result.summary["card_bytes_per_step"], abs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *(("fsdp:reduce=top-k(k=32,chunk=32)", ranks) for ranks in (3, 2)),
        ("hsdp:shard=2,reduce=top-k(k=32,chunk=32)", 4),
    ],
)
def test_nothing_is_left_out_where_the_card_says_so(
    strategy: str, ranks: int, train: Train
) -> None:
    """Two passes a step, each summed by itself."""
    flags: dict[str, Any] = {"precision": "fp64", "steps": STEPS}
    ours, theirs = (
        load_file(result.run_dir / "weights.safetensors")
        for result in (
            train("contract_tasks:Words", strategy=strategy, ranks=ranks, micro_batch=4, **flags),
            train("contract_tasks:Words", strategy="single", **flags),
        )
    )
    for name, tensor in theirs.items():
        difference = (ours[name].double() - tensor.double()).norm()
        assert difference < 1e-10 * max(float(tensor.double().norm()), 1), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, f"fsdp:reduce={TOP_K}"), (4, f"hsdp:shard=2,reduce={TOP_K}")]
)
def test_residuals_are_in_the_state(
    ranks: int, strategy: str, on_ranks: Callable[..., Any]
) -> None:
    argument = {"task": "Images", "job": {"strategy": strategy}, "steps": 3}
    on_ranks(ranks, "contract_workers:go_on_from_a_state", argument)


def test_the_codes_of_a_part_of_each_unit() -> None:
    """Two units of 8 x 10 and 20 numbers: half of each to a rank, in 16 and 8 bytes."""
    shapes = ((8, 10),), ((20,),)
    work = Workload((0, 0, 400, 0), 2, 8, shapes=shapes)
    options = CARDS["fsdp"].read_options({"reduce": "two-bit"})
    assert CARDS["fsdp"].bytes_sent(work, options) == 16 + 8
    work = Workload((0, 0, 400, 0), 6, 8, shapes=shapes)
    options = CARDS["hsdp"].read_options({"reduce": "two-bit"})
    assert CARDS["hsdp"].bytes_sent(work, options) == 200 + 2 * (16 + 8)


@pytest.mark.parametrize(
    ("strategy", "ranks", "why"),
    [
        ("fsdp:reduce=two-bit", 1, "no owner"),
        ("fsdp:reduce=two-bit,tensor=2", 4, "unlike residuals"),
        ("fsdp:reduce=top-k(k=9,chunk=8)", 2, "12 bits"),
        ("hsdp:reduce=top-k(chunk=8192)", 4, "12 bits"),
        ("fsdp:reduce=power-sgd", 2, "one of mean, tree, top-k, two-bit"),
    ],
)
def test_what_cannot_be_is_refused(strategy: str, ranks: int, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        assert strategy_spec(strategy, ranks).mesh


def test_a_loss_scale_is_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="another loss scale"):
        train("contract_tasks:Plain", strategy="fsdp:reduce=two-bit", ranks=2, precision="fp16")
