"""What the dial knows of a job: its model, its measured step, its ranks and the link. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.strategies.dial.link import Link


@dataclass(frozen=True)
class Facts:
    """`parameters` of the model and the bytes of its buffers; `compute_s` of a step on one rank.

    `per_node` is how many ranks each of `nodes` nodes has, 0 where they differ. `busy` is by how
    much ranks that share the cores of a machine slow each other down. `steps` of the job, and
    `shapes` of its parameters, if known.
    """

    parameters: int
    compute_s: float
    ranks: int
    nodes: int
    link: Link
    per_node: int = 1
    buffer_bytes: int = 0
    shards: int = 8
    busy: float = 1.0
    steps: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
