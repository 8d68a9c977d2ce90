"""Ranks of an elastic job leave or join: the others go on in another group, in the same processes.

The supervisor names the ranks of the next group in the heartbeats. A rank leaves its group where a
collective breaks, where it waits, or between two steps. It closes its trainer, meets the others of
the next group, and makes another trainer of what it holds: model, data, callbacks (`Handover`). A
step that was broken off has changed nothing. So the ranks are at the same step, or some are one
step behind: these receive the state of the first of the others (`furthest`). Nothing is read from
a disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from allranks.errors import PeerLost
from allranks.job.faults import Faults
from allranks.launcher.heartbeat import Group, Heartbeat
from allranks.launcher.world import World
from allranks.training.callback import Callback
from allranks.training.progress import StepResult

PATIENCE_S = 10.0  # of a rank that lost a peer, until the supervisor has seen that
LOOK_S = 0.001


class TrainsNoMore(PeerLost):
    """This rank is in no group any more: it was asked to leave, and the others train on."""


@dataclass(frozen=True)
class Handover:
    """What a rank takes from its trainer in one group to that in the next.

    `state` is that of `EngineTrainer.course`, and the engine's as `strategy`; its tensors are those
    of the model and the optimizer, not copies. `row` is what the metrics say of the last step. That
    is `unheard`, with its batch, if the callbacks were not called yet. `broken` is the step that
    was begun and not made, or -1. `built` and `data` are the engine's model and its opened data.
    """

    callbacks: list[Callback]
    heartbeat: Heartbeat
    faults: Faults
    state: dict[str, Any]
    is_best: bool
    row: dict[str, Any] | None
    unheard: tuple[Any, StepResult] | None
    broken: int
    built: Any
    data: Any
    is_new: bool = False
    """Whether this rank has trained in no group yet: its state is nobody's."""

    @property
    def step(self) -> int:
        """How many global batches are done; -1 if it is new."""
        return -1 if self.is_new else int(self.state["progress"]["batch_index"])

    def after(self, agreed: Agreed, loaded: Handover) -> Handover:
        """The same once this rank has `loaded` what a group has `agreed` on, and lost it again."""
        is_behind = self.step != agreed.position.step
        unheard = None if is_behind else self.unheard
        return replace(loaded, row=agreed.position.row, unheard=unheard, broken=self.broken)


@dataclass(frozen=True)
class Position:
    """Where a rank is, as it tells the others: the steps done (-1: it is new), and so on.

    `evaluated` is the step after which it last evaluated, `row` what its metrics say of the last
    step, `saved` the step of the newest checkpoint that it sees.
    """

    step: int = -1
    evaluated: int = -1
    is_best: bool = False
    broken: int = -1
    saved: int = -1
    row: dict[str, Any] | None = None


@dataclass(frozen=True)
class Agreed:
    """What the ranks of a group have agreed on: the position of `source`, which others received."""

    position: Position
    source: int
    behind: tuple[int, ...]
    steps_again: int
    """1 if a step is made again, which some ranks had begun."""
    saved: int
    new: tuple[int, ...]


def furthest(positions: Sequence[Position]) -> Agreed:
    """The rank from which those behind it receive the state; every rank decides alike."""
    places = [(position.step, position.evaluated) for position in positions]
    first = max(places)
    source = places.index(first)
    return Agreed(
        positions[source],
        source,
        tuple(rank for rank, place in enumerate(places) if place != first),
        int(any(position.broken == first[0] for position in positions)),
        positions[0].saved,
        tuple(rank for rank, position in enumerate(positions) if position.step < 0),
    )


def next_group(heartbeat: Heartbeat, world: World, step: int, error: PeerLost) -> Group:
    """The group that trains from `step` on; waits for the supervisor to name it.

    Raises `error` if there is none, and `TrainsNoMore` if this rank is in none any more.
    """
    until = time.monotonic() + PATIENCE_S
    heartbeat.enter("exchange")
    while not heartbeat.has_left(world.group, step):
        if time.monotonic() > until:
            raise error
        time.sleep(LOOK_S)
    group = heartbeat.group()
    if world.number not in group.members:
        raise TrainsNoMore(
            f"rank {world.number} trains no more: group {group.number} of this elastic job has "
            f"the ranks {', '.join(map(str, group.members))}"
        ) from error
    return group


def first_group(heartbeat: Heartbeat, world: World) -> Group:
    """The group that a new rank joins, as soon as one of the others has come to its boundary."""
    heartbeat.enter("exchange")
    while True:
        group = heartbeat.group()
        others = [rank for rank in group.members if rank != world.number]
        is_there = any(heartbeat.group_of(rank) == group.number for rank in others)
        if is_there and world.number in group.members:
            return group
        time.sleep(LOOK_S)
