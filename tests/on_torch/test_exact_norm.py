"""A norm that no cut changes: on numbers of all sizes, cut anyhow, in any order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from allranks.torch.parallel.data.reducer import exact_norm


def numbers(kind: torch.dtype, count: int = 200_003) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64)
    sizes = torch.randint(-20, 20, (count,), generator=generator)
    return (drawn * 2.0**sizes).to(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_is_that_of_all_numbers_to_the_bit_however_they_are_cut(
    kind: torch.dtype,
) -> None:
    values = numbers(kind)
    whole = exact_norm([values])
    wanted = math.sqrt(math.fsum(float(x) * float(x) for x in values))
    assert whole == pytest.approx(wanted, rel=1e-15)
    mixed = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(2))]
    for parts in (list(values.split(777)), list(mixed.split(131_071)), [mixed.view(-1, 1)]):
        assert exact_norm(parts) == whole


def test_ranks_that_hold_parts_have_the_norm_of_the_whole() -> None:
    values = numbers(torch.float32)
    first, second = values[:50_000], values[50_000:]
    rows: list[list[Tensor]] = [[], []]

    def as_rank(rank: int, known: list[Tensor]) -> float:
        calls = iter(known)

        def everywhere(row: Tensor) -> Tensor:
            rows[rank].append(row)
            other = next(calls, torch.zeros_like(row))
            return torch.stack([row, other] if rank == 0 else [other, row])

        return exact_norm([first, second][rank : rank + 1], everywhere)

    as_rank(1, [torch.tensor([float(first.abs().max()), len(first)], dtype=torch.float64)])
    as_rank(0, [rows[1][0]])
    assert as_rank(0, rows[1]) == as_rank(1, rows[0][:2]) == exact_norm([values])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_norm_is_finite_exactly_if_all_numbers_are(bad: float) -> None:
    values = torch.ones(10)
    assert exact_norm([torch.full((4,), 1e-45), torch.full((4,), 3e38)]) == pytest.approx(6e38)
    values[3] = bad
    assert not math.isfinite(exact_norm([values, torch.ones(3)]))
    assert exact_norm([torch.zeros(3)]) == exact_norm([]) == 0
