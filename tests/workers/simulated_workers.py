"""What ranks do in the tests of simulated nodes: a few commands, or one large sum."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore


def shell(script: str) -> int:
    """A few commands of a shell."""
    return subprocess.run(["sh", "-c", script], check=False).returncode


def all_reduce_64_mb(given: dict[str, Any]) -> None:
    """Sum 64 MB over all ranks, a few times; rank 0 writes the seconds of the quickest."""
    host, _, port = given["address"].rpartition(":")
    store = TCPStore(host, int(port), given["size"], is_master=given["rank"] == 0)
    distributed.init_process_group(
        "gloo", store=store, rank=given["rank"], world_size=given["size"]
    )
    tensor = torch.ones(16_000_000)
    seconds = []
    for _ in range(4):
        distributed.barrier()
        start = time.perf_counter()
        distributed.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
    distributed.destroy_process_group()
    if given["rank"] == 0:
        Path(given["folder"], "seconds").write_text(str(min(seconds)))
