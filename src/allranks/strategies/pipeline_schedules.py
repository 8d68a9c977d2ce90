"""Pipeline schedules as data: for each rank, its passes of micro-batches through stages, in order.

A model is cut into stages; stage s lies on rank s mod ranks. `F` is a forward pass of one
micro-batch through one stage, `B` its backward pass. Where there is a `W` too, `B` computes the
gradients of the inputs of the stage alone, and `W` those of its weights. Schedules are pure
functions of integers, so that they can be printed, counted and tried without a device; one loop
runs any of them (`torch.strategies.pipeline`).

    gpipe        all F, then all B. Huang et al. 2019, GPipe, arXiv 1811.06965
    1f1b         F and B in turn: at most `ranks - rank` micro-batches are stashed on a rank.
                 Narayanan et al. 2019, PipeDream; 2021, Megatron-LM, arXiv 2104.04473
    interleaved  1f1b with several stages on each rank: a smaller bubble, more messages. ibid.
    zero-bubble  1f1b with W apart from B, and later: ZB-H1, a third of the bubble of 1f1b with
                 its memory. Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241

On each stage B, and W, take the micro-batches in their order: sums of gradients are left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: Literal["F", "B", "W"]
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


Schedule = tuple[tuple[Action, ...], ...]
"""What each rank does, in order."""


def gpipe(ranks: int, micros: int) -> Schedule:
    """Every forward pass, then every backward pass."""
    return tuple(
        tuple(Action(kind, rank, micro) for kind in ("F", "B") for micro in range(micros))
        for rank in range(ranks)
    )


def one_forward_one_backward(ranks: int, micros: int) -> Schedule:
    """As many forward passes as there are stages behind, then one backward for each forward."""
    return tuple(
        _alternating(
            [(rank, micro) for micro in range(micros)],
            [(rank, micro) for micro in range(micros)],
            ranks - rank - 1,
        )
        for rank in range(ranks)
    )


def interleaved(ranks: int, micros: int, chunks: int) -> Schedule:
    """1F1B over `chunks` stages on each rank, in groups of as many micro-batches as ranks.

    A last group that is not full is filled up with passes that are then left out.
    """
    if chunks == 1:
        return one_forward_one_backward(ranks, micros)
    filled = -(-micros // ranks) * ranks
    groups = [range(start, start + ranks) for start in range(0, filled, ranks)]
    lists = []
    for rank in range(ranks):
        forward = [(c * ranks + rank, k) for g in groups for c in range(chunks) for k in g]
        backward = [
            (c * ranks + rank, k) for g in groups for c in reversed(range(chunks)) for k in g
        ]
        ahead = (chunks - 1) * ranks + 2 * (ranks - rank - 1)
        actions = _alternating(forward, backward, ahead)
        lists.append(tuple(action for action in actions if action.micro < micros))
    return tuple(lists)


def _alternating(
    forward: list[tuple[int, int]], backward: list[tuple[int, int]], ahead: int
) -> tuple[Action, ...]:
    """`ahead` forward passes; then one forward and one backward, in turn, while there are any."""
    ahead = min(ahead, len(forward))
    actions = [Action("F", *at) for at in forward[:ahead]]
    for number, at in enumerate(backward):
        if ahead + number < len(forward):
            actions.append(Action("F", *forward[ahead + number]))
        actions.append(Action("B", *at))
    return tuple(actions)


def zero_bubble(ranks: int, micros: int) -> Schedule:
    """1F1B, in which rank r makes the W of a micro-batch after the B of the r-th one behind it.

    Gradients of inputs, for which the rank before waits, are computed first; W fills the time in
    which the last ranks would wait. No rank keeps more than `ranks` micro-batches, as 1F1B does.
    """
    return tuple(
        _with_weights(rank, actions, micros)
        for rank, actions in enumerate(one_forward_one_backward(ranks, micros))
    )


def _with_weights(rank: int, actions: tuple[Action, ...], micros: int) -> tuple[Action, ...]:
    all_actions = []
    for action in actions:
        all_actions.append(action)
        if action.kind == "B" and action.micro >= rank:
            all_actions.append(Action("W", rank, action.micro - rank))
    all_actions += [Action("W", rank, micro) for micro in range(max(0, micros - rank), micros)]
    return tuple(all_actions)


SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda ranks, micros, chunks: gpipe(ranks, micros),
    "1f1b": lambda ranks, micros, chunks: one_forward_one_backward(ranks, micros),
    "interleaved": interleaved,
    "zero-bubble": lambda ranks, micros, chunks: zero_bubble(ranks, micros),
}
"""By the name of the strategy, for so many ranks, micro-batches, and stages on each rank."""


def places(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """Which in its rank's list each action is, by (kind, stage, micro)."""
    return {
        (action.kind, action.stage, action.micro): at
        for actions in schedule
        for at, action in enumerate(actions)
    }
