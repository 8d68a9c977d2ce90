"""Gradients that are moved to where they belong, also past the caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from allranks.torch.parallel.data import buckets as moved
from allranks.torch.parallel.data.buckets import Moved


class Small:
    """The library on a machine that has hardly a cache; counts what is written past it."""

    def __init__(self) -> None:
        self.calls = 0

    def cache_bytes(self) -> int:
        return 64

    def move(self, *given: Any) -> None:
        self.calls += 1
        LIBRARY.move(*given)  # type: ignore[union-attr]


LIBRARY = moved.LIBRARY


@pytest.mark.parametrize("read_later", [True, False])
@pytest.mark.parametrize(
    ("dtype", "numbers", "is_past"),
    [
        (torch.float32, 5, 1),
        (torch.float32, 3001, 1),
        (torch.float64, 1027, 1),
        (torch.half, 99, 0),
    ],
)
def test_what_is_moved_is_what_was_made(
    dtype: torch.dtype,
    numbers: int,
    is_past: int,
    *,
    read_later: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of -0.0 it is 0.0, as it is where backward adds to zeros; neighbours stay."""
    monkeypatch.setattr(moved, "LIBRARY", library := Small())
    parameter = nn.Parameter(torch.zeros(numbers, dtype=dtype))
    memory = torch.full((numbers + 2,), 7.0, dtype=dtype)
    moving = Moved({0: (parameter, memory[1:-1])}, read_later=read_later)
    monkeypatch.setattr(moving, "_past_caches", read_later)
    moving.begin()
    made = torch.randn(numbers).to(dtype)
    made[0] = -0.0
    parameter.grad = made.clone()
    moving.finished(0)
    moving.settle()
    assert torch.equal(memory[1:-1], made) and not memory[1].signbit()
    assert memory[0] == memory[-1] == 7.0
    assert parameter.grad.data_ptr() == memory[1:].data_ptr()
    assert library.calls == (is_past if read_later else 0)


def test_what_a_cache_holds_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "LIBRARY", Small())
    found = []
    for numbers in (16, 17):
        parameter = nn.Parameter(torch.zeros(numbers))
        homes = {0: (parameter, torch.zeros(numbers))}
        found.append(Moved(homes, read_later=True)._past_caches)
    assert found == [False, True]
