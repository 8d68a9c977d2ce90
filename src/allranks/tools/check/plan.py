"""What a check looks at by default: more than one number of ranks, and one that is uneven.

Two ranks share 8 shards evenly; what is wrong where ranks have unlike parts shows on three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from allranks.catalog import ENGINES, TORCH
from allranks.errors import RequestError
from allranks.strategies.resolve import card_of

USUAL = 2, 3
USUAL_STRATEGY = ENGINES[TORCH].many
STEPS = 20
DEEP_STEPS = 100
TRACE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Plan:
    """What is looked at: `many` numbers of ranks in float64, the job as it is on `own` ranks.

    `shards` are those of the task: a strategy may let each go through the model by itself.
    `trace_bytes` bounds the tensors that one run keeps (0: as many as the steps need); `keep`
    leaves them in the folders of the runs.
    """

    many: tuple[int, ...]
    own: int
    shards: int
    trace_bytes: int = 0
    keep: bool = False


def default_ranks(strategy: str) -> int:
    """The ranks of a check that nobody gave a number to; raises `RequestError` for no strategy."""
    return USUAL[0] if card_of(strategy).many_ranks else 1


def ranks_to_check(
    ranks: int, shards: int, *, given: bool, fits: Callable[[int], bool] = lambda ranks: True
) -> tuple[tuple[int, ...], int]:
    """The numbers of ranks to look at, and that of the job itself.

    Where a number was given it is first, and one that does not divide the shards follows it, if it
    `fits` the strategy.
    """
    if ranks == 1:
        return (1,), 1
    if shards == 1:
        raise RequestError(
            asked=f"to check {ranks} ranks beside one process",
            found="a task with shards = 1",
            why="no more than one rank can have a part of its batches",
            do="--set shards=8, or --ranks 1",
        )
    if not given:
        many = tuple(n for n in USUAL if n <= shards and (n == ranks or fits(n)))
        return many, many[-1]
    beside = [n for n in (ranks - 1, ranks + 1) if 1 < n <= shards and shards % n and fits(n)]
    return ((ranks, *beside[:1]) if shards % ranks == 0 else (ranks,)), ranks
