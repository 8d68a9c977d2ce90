"""Random calls of the C library against the reference, and the reference against torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from random_calls import pools
from tree_reference import Array, reduced

PROGRAM = Path(__file__).parent / "stress.py"
ALONE = {"OPENBLAS_NUM_THREADS": "1"}  # a process that forks has one thread


def stress(calls: int) -> str:
    command = [sys.executable, str(PROGRAM), "--calls", str(calls), "--seed", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | ALONE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_random_calls_have_the_bits_of_the_reference(exhaustive: bool) -> None:
    """`--exhaustive`: a million, in about ten minutes."""
    calls = 10**6 if exhaustive else 2500
    made, seconds = re.findall(r"^(\d+) calls in ([\d.]+) s", stress(calls), re.MULTILINE)[-1]
    assert int(made) >= calls and float(seconds) > 0


@cache
def numbers_of_all_types() -> dict[str, Array]:
    return pools(seed=5, nbytes=2**20)


@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
def test_the_reference_adds_as_torch_does(op: str) -> None:
    """A pair of every type; a mean is a sum that torch divides."""
    does = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
    for name, numbers in numbers_of_all_types().items():
        left, right = numbers[:60_000], numbers[-60_000:]
        a, b = (torch.from_numpy(one.copy()) for one in (left, right))
        if name == "bfloat16":
            a, b = a.view(torch.bfloat16), b.view(torch.bfloat16)
        wanted = does[op](a, b)
        found = torch.from_numpy(reduced(name, op, [left, right]).copy()).view(wanted.dtype)
        assert torch.equal(found.isnan(), wanted.isnan())
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
