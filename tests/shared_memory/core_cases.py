"""Single cases of the C library on forked ranks: `python core_cases.py NAME`; 0 if all is well."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from forked_ranks import World, ended, forked, library, names
from tree_reference import merges_of

SIZE = 3
BEGUN_S = 0.05
SOON_LOOKS = 1000  # a ms each, of what takes 20, and took 5000 before the helper was told of it
WITHIN_S = 30.0  # of what takes less than one, on a loaded machine


def group_of(world: World, number: int = 0) -> Any:
    size = len(world.members[number])
    return world.group(number, merges_of(size), size > 2)


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def on_ranks(
    target: Callable[[World], None], size: int = SIZE, groups: int = 1
) -> tuple[World, list[int]]:
    """Start the ranks of groups of all."""
    world = World(size, [tuple(range(size))] * groups, library())
    return world, forked(world, target)


def lost(world: World, call: Callable[[], Any]) -> tuple[int, str]:
    """Whom a call that cannot end has lost, and why."""
    begun = time.monotonic()
    try:
        call()
    except world.core.PeerLost as error:
        assert time.monotonic() - begun < WITHIN_S
        return error.rank, error.reason
    raise AssertionError("it came to an end")


def until(claim: Callable[[], Any]) -> None:
    """Wait until that is so."""
    latest = time.monotonic() + WITHIN_S
    while not claim():
        assert time.monotonic() < latest
        time.sleep(0.001)


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def no_thread_per_wait() -> None:
    """300 calls in flight in two groups, ended in any order: one more thread than before."""

    def rank(world: World) -> None:
        before, groups = threads_of_this_process(), [group_of(world, 0), group_of(world, 1)]
        given = np.arange(300 * 500, dtype=np.int64).reshape(300, 500)
        found = np.empty_like(given)
        ops = [
            groups[k % 2].all_reduce(address(given[k]), address(found[k]), 500, 8, 0)
            for k in range(300)
        ]
        for number, op in enumerate(reversed(ops)):
            assert op.wait()
            if number % 20 == 0:
                assert threads_of_this_process() <= before + 1
        assert (found == SIZE * given).all()

    _, pids = on_ranks(rank, groups=2)
    assert ended(pids) == [0] * SIZE


def ends_without_a_wait() -> None:
    """What is posted goes on although nobody waits for it."""

    def rank(world: World) -> None:
        group = group_of(world)
        given = np.full(400_000, world.rank, np.float32)
        op = group.all_reduce(address(given), address(given), len(given), 0, 0)
        until(lambda: op.done)
        assert (given == 3).all()
        assert group.barrier().wait()

    _, pids = on_ranks(rank)
    assert ended(pids) == [0] * SIZE


def a_message_leaves_while_its_sender_computes() -> None:
    """Also of 128 times the bytes that a channel holds: nobody waits for its sender to wait."""
    count, world = 8 << 20, World(2, [(0, 1)], library())
    came = ctypes.c_double.from_address(world.shared(4096))

    def rank(its: World) -> None:
        group, given = group_of(its), np.full(count, 3.0, np.float32)
        if its.rank == 0:
            sent = group.send(address(given), given.nbytes, 1, 5)
            for _ in range(SOON_LOOKS):  # a machine that stands still makes none
                if came.value:
                    break
                time.sleep(0.001)
            assert came.value, "it has not left"
            assert sent.wait()
            return
        found = np.zeros_like(given)
        time.sleep(BEGUN_S)  # the post is over
        assert group.receive(address(found), found.nbytes, 0, 5).wait()
        came.value = 1.0
        assert (found == given).all()

    assert ended(forked(world, rank)) == [0, 0]


def a_loss_is_seen_between_signals() -> None:
    """A timer that interrupts every sleep hides neither a dead rank nor that a time is up."""

    def rank(world: World) -> None:
        group = group_of(world)
        assert group.barrier().wait()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        begun = time.monotonic()
        assert not group.receive(0, 0, world.rank, 5).wait(0.3)  # from itself, which sends nothing
        assert 0.3 <= time.monotonic() - begun < WITHIN_S
        assert lost(world, lambda: group.barrier().wait()) == (2, "died")

    _, pids = on_ranks(rank)
    assert ended(pids) == [0, 0, -signal.SIGKILL]


def who_waits_for_a_survivor_hears_of_the_dead() -> None:
    """Rank 0 waits for rank 1 alone, which has lost rank 2 and does not leave."""

    def rank(world: World) -> None:
        group = group_of(world)
        heard = ctypes.c_int.from_address(memory)
        assert group.barrier().wait()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        received = ctypes.create_string_buffer(8)
        call = group.receive(ctypes.addressof(received), 8, world.rank + 1, 1)
        assert lost(world, call.wait) == (2, "died")
        if world.rank == 0:
            heard.value = 1
        until(lambda: heard.value)

    world = World(SIZE, [tuple(range(SIZE))], library())
    memory = world.shared(4096)
    assert ended(forked(world, rank)) == [0, 0, -signal.SIGKILL]


def who_leaves_fails_no_receive_from_any_rank() -> None:
    """Ranks 1 and 2 each send once and leave; the third receive has nobody left to send."""

    def rank(world: World) -> None:
        group, number = group_of(world), np.full(1, world.rank, np.int64)
        if world.rank > 0:
            time.sleep(0.3 * (world.rank - 1))
            assert group.send(address(number), 8, 0, 7).wait()
            group.leave()
            return
        found = []
        for _ in range(2):
            op = group.receive(address(number), 8, -1, 7)
            assert op.wait()
            found.append((op.source, int(number[0])))
        assert sorted(found) == [(1, 1), (2, 2)]
        assert lost(world, group.receive(address(number), 8, -1, 7).wait)[1] == "left"

    _, pids = on_ranks(rank)
    assert ended(pids) == [0] * SIZE


def calls_that_differ_are_told() -> None:
    """Another count, type, kind, root, and a message of another size."""
    world = World(SIZE, [tuple(range(SIZE))] * 5, library())
    heard = (ctypes.c_int * SIZE).from_address(world.shared(4096))

    def rank(world: World) -> None:
        own, memory = world.rank, np.zeros(64, np.float32)
        at = address(memory)
        calls = [
            lambda g: g.all_reduce(at, at, 4 + own % 2, 0, 0),
            lambda g: g.all_reduce(at, at, 4, own % 2, 0),
            lambda g: g.all_reduce(at, at, 4, 0, own % 2),
            lambda g: g.barrier() if own == 1 else g.all_gather(at, at + 64, 4),
            lambda g: g.send(at, 16, 1, 3) if own == 0 else g.receive(at, 8, 0, 3),
        ]
        for number, call in enumerate(calls):
            group = group_of(world, number)
            if number == 4 and own == 0:
                call(group).wait()
                assert lost(world, group.barrier().wait) == (0, "contradiction")
            elif number < 4 or own == 1:
                assert lost(world, call(group).wait)[1] == "contradiction"
            else:
                assert lost(world, group.barrier().wait) == (0, "contradiction")
            assert group.failed
            assert lost(world, group.barrier().wait)[1] == "contradiction"
        heard[own] = 1
        until(lambda: all(heard))  # nobody leaves before

    assert ended(forked(world, rank)) == [0] * SIZE


def a_forked_child_is_no_rank() -> None:
    """It can neither call nor wait nor leave, whatever its parent's threads did when it forked."""

    def rank(world: World) -> None:
        group = group_of(world)
        assert group.barrier().wait()
        if world.rank != 0:
            assert group.barrier().wait()
            assert group.barrier().wait()
            return
        under_way = group.receive(0, 0, 1, 99)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert lost(world, lambda: group.barrier().wait())[1] == "left"
                assert lost(world, lambda: under_way.wait())[1] == "left"
                group.leave()
                del group, under_way
                world.engine = None
                code = 0
            finally:
                os._exit(code)
        assert ended([child]) == [0]
        assert group.barrier().wait()
        assert group.barrier().wait()

    _, pids = on_ranks(rank)
    assert ended(pids) == [0] * SIZE


def wrong_trees_are_refused() -> None:
    def rank(world: World) -> None:
        for merges in (b"\0\0\0", b"\1\0\1", b"\0\2\0", b"\0\1\2", b"\0\1"):
            try:
                world.group(0, merges, False)
            except ValueError:
                continue
            raise AssertionError(merges)

    _, pids = on_ranks(rank)
    assert ended(pids) == [0] * SIZE


CASES = [
    no_thread_per_wait,
    ends_without_a_wait,
    a_message_leaves_while_its_sender_computes,
    a_loss_is_seen_between_signals,
    who_waits_for_a_survivor_hears_of_the_dead,
    who_leaves_fails_no_receive_from_any_rank,
    calls_that_differ_are_told,
    a_forked_child_is_no_rank,
    wrong_trees_are_refused,
]

if __name__ == "__main__":
    before = names()
    next(case for case in CASES if case.__name__ == sys.argv[1])()
    assert names() <= before
