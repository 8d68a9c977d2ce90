"""Sets up shared memory for the ranks of one host: an engine per process, a segment per group.

A process has one engine and one bell, the page on which it sleeps, from its first group to its
last. A group has a segment: rank 0 creates it and sends its place, the others open it. All ranks
map the bells of all. Then the ranks exchange errors, so that all make the same decision.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from allranks.strategies.reduction_tree import merges
from allranks.torch.shared_memory.operands import ProcessCard, have_one_file
from allranks.torch.shared_memory.segment import Segment, library
from allranks.torch.shared_memory.work import at_rest, end_soon

NO_FILE = -1
ONLY_OURS = 2  # references: the attribute, and the argument of getrefcount
STOPPED_S = 2400.0  # as long as a wait may last: a stopped process may be continued
SEGMENT = "memfd:allranks-segment"  # what the launcher's file is called in /proc


@dataclass
class _Process:
    """The engine of this process and its bell, while it has groups."""

    engine: Any = None
    bell: Segment | None = None
    groups: int = 0
    fd: int = NO_FILE
    had_file: bool = False
    most_ranks: int = 1
    retired: list[Attached] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Attached:
    """A group of the library: `group` makes collectives in this memory.

    `ranks` are its members in the torch group.
    """

    group: Any
    segment: Segment
    bells: list[Segment]
    ranks: tuple[int, ...]


def offer_file(fd: int) -> None:
    """Use a memory file from the launcher for the next group of all ranks, once.

    Ignores a number without such a file: a child process may have inherited the variable alone.
    """
    with suppress(OSError):
        is_ours = fd >= 0 and SEGMENT in os.readlink(f"/proc/self/fd/{fd}")
        if is_ours and not _process.had_file:
            _process.fd, _process.had_file = fd, True


def take_file() -> int:
    """The file of `offer_file`, for the first caller; `NO_FILE` afterwards."""
    fd, _process.fd = _process.fd, NO_FILE
    return fd


def drop(fd: int) -> None:
    if fd != NO_FILE:
        os.close(fd)


def loaded() -> Any:
    """The library, which must be there."""
    native = library()
    assert native is not None
    return native


def enter() -> str:
    """Ensure an engine, for one more group; returns the place of this process's bell."""
    with _process.lock:
        if _process.engine is None:
            native = loaded()
            bell = Segment.create(native.BELL_BYTES, "allranks-bell")
            _process.engine, _process.bell = native.Engine(bell.address, STOPPED_S), bell
        _process.groups += 1
        assert _process.bell is not None
        return _process.bell.where


def leave(attached: Attached | None = None) -> None:
    """Free a group and its memory; with the last group also the engine, its thread and bell.

    If a thread still returns from an op of the group, the memory is freed later.
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
            end_soon()
    del attached
    _free_retired()


def _free_retired() -> None:
    """Free the left groups and their memory, except those whose ops are still referenced."""
    if not _process.retired:
        return
    with _process.lock:
        for each in list(_process.retired):
            if sys.getrefcount(each.group) <= ONLY_OURS:  # an op holds its group
                _process.retired.remove(each)
                each.group = None  # before its memory


at_rest.append(_free_retired)


def attached(
    store: Any,
    rank: int,
    ranks: Sequence[int],
    cards: Sequence[ProcessCard],
    fd: int = NO_FILE,
) -> Attached:
    """The memory of these `ranks` of a group, all on one host; `rank` is one of them.

    Uses the file `fd` if all have it, else closes it. Raises `OSError` or `RuntimeError`, also in
    the ranks which wait for the memory: the error is sent by `store`.
    """
    native, members = loaded(), [cards[member] for member in ranks]
    position, size = list(ranks).index(rank), len(ranks)
    nbytes = native.segment_bytes(size)
    segment = _segment(store, position, members, nbytes, fd)
    bells = [
        Segment.open(card.bell, native.BELL_BYTES)
        for index, card in enumerate(members)
        if index != position
    ]
    for bell in bells:
        bell.hide()
    own_bell = _process.bell
    assert own_bell is not None
    bells.insert(position, own_bell)
    _process.most_ranks = max(_process.most_ranks, size)
    group = native.Group(
        _process.engine,
        segment.address,
        position,
        size,
        tuple(bell.address for bell in bells),
        tuple(card.pid for card in members),
        merges(tuple((leaf, leaf + 1) for leaf in range(size)), size),
        _process.most_ranks > len({core for card in cards for core in card.cores}),
    )
    return Attached(group, segment, bells, tuple(ranks))


def _segment(
    store: Any, position: int, members: Sequence[ProcessCard], nbytes: int, fd: int
) -> Segment:
    if have_one_file(members):
        return Segment.within(fd, nbytes)
    drop(fd)
    if position == 0:
        try:
            segment = Segment.create(nbytes, "allranks-group")
        except OSError as error:
            store.set("segment", f"! {error}")
            raise
        store.set("segment", segment.where)
        return segment
    where = store.get("segment").decode()
    if where.startswith("!"):
        raise OSError(where[2:])
    return Segment.open(where, nbytes)


_process = _Process()
_left_to_the_parent: list[_Process] = []


def _forget() -> None:
    """After a fork the child's engine has no thread, and its bell is the parent's."""
    global _process
    _left_to_the_parent.append(_process)  # not freed: that would wait for a thread
    _process = _Process()


os.register_at_fork(after_in_child=_forget)
