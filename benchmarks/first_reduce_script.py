"""What `launch.py` has the other launchers start: as little as `first_reduce_task.py`, or less.

    torchrun --nproc-per-node N first_reduce_script.py FILE

A process group, one model, one optimizer, two steps by hand; no DistributedDataParallel, no data
set, no log. The leader writes the time of the first all-reduce, and the world size, to FILE.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD


def main(first: Path) -> None:
    """Two steps as one rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 8)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if step == 0 and dist.get_rank() == 0:
            now = time.monotonic()
            first.write_text(f"{now} {dist.get_world_size()}")
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
