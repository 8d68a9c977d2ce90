"""Gradients that are moved to where they belong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allranks.torch.parallel.data.buckets import Moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.half])
def test_what_is_moved_is_what_was_made(dtype: torch.dtype) -> None:
    """Of -0.0 it is 0.0, as it is where backward adds to zeros; neighbours stay."""
    parameter = nn.Parameter(torch.zeros(99, dtype=dtype))
    memory = torch.full((101,), 7.0, dtype=dtype)
    moving = Moved({0: (parameter, memory[1:-1])})
    moving.begin()
    made = torch.randn(99).to(dtype)
    made[0] = -0.0
    parameter.grad = made.clone()
    moving.finished(0)
    moving.settle()
    assert torch.equal(memory[1:-1], made) and not memory[1].signbit()
    assert memory[0] == memory[-1] == 7.0
    assert parameter.grad.data_ptr() == memory[1:].data_ptr()
