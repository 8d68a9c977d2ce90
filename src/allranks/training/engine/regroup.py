"""Ranks of an elastic job leave or join: the others go on in another group, in the same processes.

The supervisor names the ranks of the next group in the heartbeats. A rank leaves its group where a
collective breaks, where it waits, or between two steps. It closes its trainer, meets the others of
the next group, and makes another trainer of what it holds: model, data, callbacks (`Handover`). A
step that was broken off has changed nothing. So the ranks are at the same step, or some are one
step behind: these receive the state of the first of the others (`furthest`), and then all compare
digests. Nothing is read from a disk.

Where each rank holds a part of the state, parts are lost with a rank. There all ranks build the
model anew and load the newest checkpoint, as after a restart, or begin anew if there is none: the
steps since then are made again. Before ranks join or leave, the old group saves one of its last
step, so that none is. With `--spare-state` ranks have copies of the parts of others in memory, and
load these instead where all parts are there (`newest_spare`). Where several ranks hold each part
(`hsdp`), what the ranks that are left trained with serves instead of copies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any, NamedTuple, Protocol

from allranks.errors import PeerLost
from allranks.job.faults import Faults
from allranks.launcher.heartbeat import Group, Heartbeat
from allranks.launcher.world import World
from allranks.training.callback import Callback
from allranks.training.progress import StepResult

PATIENCE_S = 30.0  # of a rank that lost a peer, until the supervisor has seen that
LOOK_S = 0.001
SPARE, REPLICAS, CHECKPOINT, START = "spare", "replicas", "checkpoint", "start"


class TrainsNoMore(PeerLost):
    """This rank is in no group any more: it was asked to leave, and the others train on."""


@dataclass(frozen=True)
class Handover:
    """What a rank takes from its trainer in one group to that in the next.

    `state` is that of `EngineTrainer.course`, and the engine's as `strategy`; its tensors are those
    of the model and the optimizer, not copies. `row` is what the metrics say of the last step. That
    is `unheard`, with its batch, if only the first `callbacks_called` were called yet. `reached` is
    how many steps were begun, `steps_again` how many were made again before. `built`, `optimizer`
    and `data` are the engine's model, its optimizer as it was made, and its opened data.

    Where parts of the state are lost with a rank, it has neither state of the engine, nor model,
    nor callbacks: the next trainer makes them anew. `spare` are the engine's copies of parts, and
    `live` is the part that this rank trained with, if other ranks have the same.
    """

    callbacks: list[Callback]
    heartbeat: Heartbeat
    faults: Faults
    state: dict[str, Any]
    is_best: bool
    row: dict[str, Any] | None
    unheard: tuple[Any, StepResult] | None
    callbacks_called: int
    reached: int
    steps_again: int
    built: Any
    optimizer: Any
    data: Any
    spare: Any = None
    live: Any = None
    is_new: bool = False
    """Whether this rank has trained in no group yet: its state is nobody's."""
    shard_seconds: float = 0.0
    """What a shard took this rank lately, with `--share auto`; 0 if that was not measured."""
    is_compared: bool = True
    """Whether digests were compared since ranks of this group received a state."""
    joins: bool = False
    """Whether this rank has joined, and was not compared with the others since."""
    streamed: int = -1
    """The step after which a new rank has the weights and the optimizer, sent before it joined."""

    @property
    def step(self) -> int:
        """How many global batches are done; -1 if it is new."""
        return -1 if self.is_new else int(self.state["progress"]["batch_index"])

    def after(self, agreed: Agreed, loaded: Handover) -> Handover:
        """The same once this rank has `loaded` what a group has `agreed` on, and lost it again."""
        is_behind = self.step != agreed.position.step
        unheard = None if is_behind else self.unheard
        loaded = replace(loaded, row=agreed.position.row, unheard=unheard, is_compared=False)
        return replace(loaded, reached=self.reached, joins=self.joins)


class SpareParts(NamedTuple):
    """The parts that a rank has of the state after `step`, in memory, by the number of a process.

    The state was that of `group`, whose ranks were the processes `numbers`.
    """

    step: int
    group: int
    numbers: Sequence[int]
    parts: Sequence[int]


@dataclass(frozen=True)
class Position:
    """Where a rank is, as it tells the others: the steps done (-1: it is new), and so on.

    `evaluated` is the step after which it last evaluated, `row` what its metrics say of the last
    step, `saved` the step of the newest checkpoint that it sees; `reached`, `steps_again`,
    `is_compared`, `joins` and `streamed` are those of `Handover`. `spares` are the copies of parts
    of the state that it has.
    """

    step: int = -1
    evaluated: int = -1
    is_best: bool = False
    reached: int = -1
    saved: int = -1
    row: dict[str, Any] | None = None
    steps_again: int = 0
    is_compared: bool = True
    joins: bool = False
    spares: Sequence[SpareParts] = ()
    streamed: int = -1


@dataclass(frozen=True)
class Spare:
    """The state after `step` of the ranks of `group`, in the memory of the ranks of the next one.

    `holders` has a rank of the next group for each part; a part that no rank has is `missing`.
    """

    step: int
    group: int
    holders: dict[int, int]
    missing: tuple[int, ...] = ()


def newest_spare(positions: Sequence[Position]) -> Spare | None:
    """The newest copies of which no part is missing, else the newest; every rank decides alike."""
    spares: dict[tuple[int, int], Spare] = {}
    for rank, position in enumerate(positions):
        for step, group, numbers, parts in starmap(SpareParts, position.spares):
            before = spares.get((step, group), Spare(step, group, {}, tuple(numbers)))
            holders = {**dict.fromkeys(parts, rank), **before.holders}
            missing = tuple(number for number in numbers if number not in holders)
            spares[step, group] = Spare(step, group, holders, missing)
    whole = {key for key, spare in spares.items() if not spare.missing}
    return spares[max(whole or spares)] if spares else None


@dataclass(frozen=True)
class Agreed:
    """What the ranks of a group have agreed on: the position of `source`, which others received.

    With `loaded_from` the position is that of the state that all have loaded: of their copies
    ("spare"), of the "replicas" that are left, of a checkpoint, or of a start. `parts_lost` are
    then the parts of the newest copies or replicas that nobody had: the numbers of the ranks that
    made the copies, or places within a replica.
    """

    position: Position
    source: int
    behind: tuple[int, ...]
    steps_again: int
    """How many steps are made again, which some ranks had begun."""
    saved: int
    new: tuple[int, ...]
    """Those that have joined, and were not compared with the others since."""
    again_before: int = 0
    """How many were made again before."""
    loaded_from: str = ""
    parts_lost: tuple[int, ...] = ()
    spare: Spare | None = None
    """The newest copies of the state in memory."""
    is_compared: bool = True
    """Whether digests were compared since ranks of earlier groups received a state."""
    is_streamed: bool = False
    """Whether those behind have the weights and the optimizer, and receive only the others."""

    @property
    def compares(self) -> bool:
        """Whether digests are compared: a rank has received its state, or loaded it."""
        return bool(self.behind or self.loaded_from) or not self.is_compared

    @property
    def unequal(self) -> tuple[int, ...]:
        """The ranks that may differ: the sender and the receivers of the state; () is all."""
        return (self.source, *self.behind) if self.behind and self.is_compared else ()

    def at(self, step: int, loaded_from: str) -> Agreed:
        """The same ranks, after all have loaded the state of `step`."""
        again, spare = self.position.step + self.steps_again - step, self.spare
        is_whole = spare is None or loaded_from in (SPARE, REPLICAS)
        lost = () if spare is None or is_whole else spare.missing
        row = self.position.row if step == self.position.step else None
        agreed = replace(self, position=Position(step=step, row=row), behind=(), steps_again=again)
        return replace(agreed, loaded_from=loaded_from, parts_lost=lost)


def furthest(positions: Sequence[Position]) -> Agreed:
    """The rank from which those behind it receive the state; every rank decides alike.

    Of those that are as far, it is the first that had not just joined: the state of a new rank may
    be wrong until it is compared.
    """
    places = [(position.step, position.evaluated) for position in positions]
    first = max(places)
    ahead = [rank for rank, place in enumerate(places) if place == first]
    source = min(ahead, key=lambda rank: positions[rank].joins)
    behind = tuple(rank for rank, place in enumerate(places) if place != first)
    return Agreed(
        positions[source],
        source,
        behind,
        max(0, max(position.reached for position in positions) - first[0]),
        positions[0].saved,
        tuple(rank for rank, position in enumerate(positions) if position.joins),
        max(position.steps_again for position in positions),
        spare=newest_spare(positions),
        is_compared=all(position.is_compared for position in positions),
        is_streamed=all(positions[rank].streamed == first[0] for rank in behind),
    )


def next_group(heartbeat: Heartbeat, world: World, step: int, error: PeerLost) -> Group:
    """The group that trains from `step` on; waits for the supervisor to name it.

    If only a connection broke, it has the same ranks. Raises `error` if there is none, and
    `TrainsNoMore` if this rank is in none any more.
    """
    until = time.monotonic() + PATIENCE_S
    heartbeat.enter("exchange")
    heartbeat.report_broken(world.group)
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


class Receiver(Protocol):
    """What receives the state of a new rank while the others train.

    The state has `state_bytes` in all. `step` is the step after which this rank has it, else -1.
    """

    state_bytes: int
    step: int

    def look(self, heartbeat: Heartbeat, number: int) -> bool:
        """Take what has come for rank `number`; returns whether more may come."""
        ...


def first_group(heartbeat: Heartbeat, world: World, receiver: Receiver) -> Group:
    """The group that a new rank joins; there it waits until the others come to their boundary."""
    heartbeat.enter("exchange")
    while world.number not in (group := heartbeat.group()).members:
        receiver.look(heartbeat, world.number)
        time.sleep(LOOK_S)
    while receiver.look(heartbeat, world.number) and heartbeat.group_number == group.number:
        time.sleep(LOOK_S)
    heartbeat.wants_save()  # what was asked for before is none of its business
    return group
