"""The processes of a benchmark's ranks: forked from a server that has imported torch once.

The commands themselves never import a framework; what a rank calls does. Standard library only.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any


def start_ranks(
    ranks: int, target: Callable[..., None], arguments: Sequence[Any], preload: Sequence[str]
) -> list[BaseProcess]:
    """Start `target(rank, *arguments)` for every rank. The first call fixes what is preloaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    started: list[BaseProcess] = []
    for rank in range(ranks):
        process = context.Process(target=target, args=(rank, *arguments), name=f"rank {rank}")
        process.start()
        started.append(process)
    return started


def wait_for(what: str, ranks: list[BaseProcess]) -> None:
    """Until all have ended well; one that fails ends the others, which would wait for it."""
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in connection.wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode:
                for other in running.values():
                    other.kill()
                raise SystemExit(f"{what}: {process.name} ended with {process.exitcode}")
