"""How the ranks of one host come to share memory: an engine per process, a segment per group.

A process has one engine and one bell, the page on which it sleeps; they come with its first group
and go with its last. A group has a segment: rank 0 makes it and tells where it is, the others open
it; all map the bells of all. Every rank says how it went, and each hears the same verdict.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import allranks.torch.shared_memory.futures as futures
from allranks.strategies.reduction_tree import merges
from allranks.torch.shared_memory.library import library
from allranks.torch.shared_memory.operands import ProcessCard, one_given
from allranks.torch.shared_memory.segment import Segment

NOT_GIVEN = -1
ONLY_OURS = 2  # references: the attribute, and the argument of whoever counts them
STOPPED_S = 2400.0  # as long as a wait may last: whoever is stopped may be continued
SEGMENT = "memfd:allranks-segment"  # what the launcher's file is called in /proc


@dataclass
class _Process:
    """The engine of this process and its bell, while it has groups."""

    engine: Any = None
    bell: Segment | None = None
    groups: int = 0
    given_fd: int = NOT_GIVEN
    was_given: bool = False
    most_ranks: int = 1
    retired: list[Attached] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Attached:
    """A group of the library: `group` makes collectives, in memory that is kept here.

    `ranks` are its members, counted in the torch group that it serves.
    """

    group: Any
    segment: Segment
    bells: list[Segment]
    ranks: tuple[int, ...]


def hand_over(fd: int) -> None:
    """The launcher gave this process a memory file: the next group of all ranks uses it, once.

    A variable may have been handed down to a process that has no such file: then there is none.
    """
    with suppress(OSError):
        is_ours = fd >= 0 and SEGMENT in os.readlink(f"/proc/self/fd/{fd}")
        if is_ours and not _process.was_given:
            _process.given_fd, _process.was_given = fd, True


def take_given() -> int:
    """The file that was handed over, for whoever asks first; `NOT_GIVEN` for all others."""
    fd, _process.given_fd = _process.given_fd, NOT_GIVEN
    return fd


def drop(given: int) -> None:
    if given != NOT_GIVEN:
        os.close(given)


def loaded() -> Any:
    """The library, where it is known to be there."""
    native = library()
    assert native is not None
    return native


def enter() -> str:
    """Make sure that this process has an engine, for one more group; where its bell is opened."""
    with _process.lock:
        if _process.engine is None:
            native = loaded()
            bell = Segment.made(native.BELL_BYTES, "allranks-bell")
            _process.engine, _process.bell = native.Engine(bell.address, STOPPED_S), bell
        _process.groups += 1
        assert _process.bell is not None
        return _process.bell.where


def leave(attached: Attached | None = None) -> None:
    """A group is gone, and its memory; with the last one the engine goes, its thread and its bell.

    What a thread is about to come back from still uses them: then they go at the next occasion.
    """
    with _process.lock:
        if attached is not None:
            _process.retired.append(attached)
        _process.groups -= 1
        if _process.groups == 0:
            _process.engine = None
            if _process.bell is not None:
                _process.bell.hide()
            _process.bell = None
            futures.end_soon()
    del attached
    _free_retired()


def _free_retired() -> None:
    """Free the groups that were left, and their memory, but for those whose ops somebody holds."""
    if not _process.retired:
        return
    with _process.lock:
        for one in list(_process.retired):
            if sys.getrefcount(one.group) <= ONLY_OURS:  # an op holds its group
                _process.retired.remove(one)
                one.group = None  # before its memory


futures.at_rest.append(_free_retired)


def attached(
    store: Any,
    rank: int,
    ranks: Sequence[int],
    cards: Sequence[ProcessCard],
    given: int = NOT_GIVEN,
) -> Attached:
    """The memory of these `ranks` of a group, whose `cards` say one host; `rank` is among them.

    It is the file `given`, if all have that, and else closes it. Raises `OSError` or
    `RuntimeError`; `store` tells it to those that would wait for the memory.
    """
    native, members = loaded(), [cards[one] for one in ranks]
    own, size = list(ranks).index(rank), len(ranks)
    nbytes = native.segment_bytes(size)
    segment = _segment(store, own, members, nbytes, given)
    bells = [
        Segment.opened(card.bell, native.BELL_BYTES)
        for index, card in enumerate(members)
        if index != own
    ]
    for bell in bells:
        bell.hide()
    own_bell = _process.bell
    assert own_bell is not None
    bells.insert(own, own_bell)
    _process.most_ranks = max(_process.most_ranks, size)
    group = native.Group(
        _process.engine,
        segment.address,
        own,
        size,
        tuple(bell.address for bell in bells),
        tuple(card.pid for card in members),
        merges(tuple((leaf, leaf + 1) for leaf in range(size)), size),
        _process.most_ranks > len({core for card in cards for core in card.cores}),
    )
    return Attached(group, segment, bells, tuple(ranks))


def _segment(
    store: Any, own: int, members: Sequence[ProcessCard], nbytes: int, given: int
) -> Segment:
    if one_given(members):
        return Segment.within(given, nbytes)
    drop(given)
    if own == 0:
        try:
            segment = Segment.made(nbytes, "allranks-group")
        except OSError as error:
            store.set("segment", f"! {error}")
            raise
        store.set("segment", segment.where)
        return segment
    where = store.get("segment").decode()
    if where.startswith("!"):
        raise OSError(where[2:])
    return Segment.opened(where, nbytes)


_process = _Process()
_left_to_the_parent: list[_Process] = []


def _forget() -> None:
    """In a child of a fork the engine has no thread, and its bell is the parent's."""
    global _process
    _left_to_the_parent.append(_process)  # not freed: that would wait for a thread
    _process = _Process()


os.register_at_fork(after_in_child=_forget)
