"""Measures an all-reduce of 25 MB by the ranks of a script, in bytes per second, for `bench`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

NUMBERS = 25 * 2**18
ROUNDS = 7


def measure(out: Path) -> None:
    """The best of a few rounds, by the clock of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numbers, best = torch.ones(NUMBERS), float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(numbers)
        best = min(best, time.perf_counter() - begun)
        numbers.fill_(1.0)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(numbers.nbytes / best))
    dist.destroy_process_group()


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
