"""Random calls of the C library on forked ranks, each held to the reference bit for bit.

    python tests/shared_memory/stress.py --calls 4000 --seed 1
    python tests/shared_memory/stress.py --calls 1000000 --seed 1

A round has 2 to 8 ranks in turn, each with three threads that call at once: in the group of all, in
two halves and pairs that overlap, and in another group of all. Some calls are awaited, out of order
and with up to 6 in flight; some by two threads; some are only polled, so that the engine's own
thread ends them. The last line says how many calls were made, in how many seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from forked_ranks import World, ended, forked, library, loaded
from random_calls import MOST_BYTES, PLAN_BYTES, Call, calls, given, pools
from tree_reference import DTYPES, Array, merges_of, reduced, same_bits

IN_FLIGHT = 6
PLAN_LEAVES = 2  # of each rank
Check = Callable[[], None]
Groups = list[tuple[int, ...]]
Plans = tuple[Any, list[int]]


def groups_of(size: int) -> list[Groups]:
    """The groups of each lane, as ranks of the world; those of one lane may overlap."""
    every = tuple(range(size))
    pairs = [(rank, rank + 1) for rank in range(size - 1)]
    halves = [every[0::2], every[1::2]]
    return [[every], [group for group in (*halves, *pairs) if len(group) > 1], [every]]


Made = tuple[list[Any], Check]


@dataclass
class Pending:
    call: Call
    ops: list[Any]
    check: Check


@dataclass(frozen=True)
class Share:
    """What one rank of a group has to do with a call."""

    call: Call
    group: Any
    rank: int
    size: int
    core: Any
    pool: dict[str, Array]

    @property
    def type(self) -> int:
        return int(self.core.TYPES[self.call.type])

    @property
    def op(self) -> int:
        return int(self.core.OPS[self.call.op])

    @property
    def item(self) -> int:
        return np.dtype(DTYPES[self.call.type]).itemsize

    def given(self, rank: int, count: int, part: int = 0) -> Array:
        return given(self.pool, self.call, rank, count, part)

    def all_given(self, count: int) -> list[Array]:
        return [self.given(rank, count) for rank in range(self.size)]


@dataclass
class Lane:
    """One thread of one rank: it posts its share of the calls of a lane, and checks them."""

    world: World
    pool: dict[str, Array]
    groups: list[Any]
    members: Groups
    plans: dict[tuple[int, str], Plans]
    draw: random.Random
    from_any: bool = True  # whether some receives name no rank
    ahead: list[Pending] = field(default_factory=list)

    def run(self, all_calls: Iterable[Call]) -> None:
        for call in all_calls:
            if self.world.rank not in self.members[call.group]:
                continue
            if call.kind.startswith("plan"):
                self._finish_plans(call)
            self.ahead.append(self._post(call))
            while len(self.ahead) >= IN_FLIGHT or (self.ahead and self.draw.random() < 0.5):
                self._finish(self.ahead.pop(self.draw.randrange(len(self.ahead))))
        while self.ahead:
            self._finish(self.ahead.pop())

    def _finish_plans(self, call: Call) -> None:
        """The leaves of a plan may be written once its last run is over."""
        for pending in [one for one in self.ahead if one.call.kind.startswith("plan")]:
            self.ahead.remove(pending)
            self._finish(pending)

    def _finish(self, pending: Pending) -> None:
        how = self.draw.random()
        for op in pending.ops:
            if how < 0.01:
                while not op.done:
                    time.sleep(0.0003)
            elif how < 0.02:
                other = threading.Thread(target=_wait, args=(op,))
                other.start()
                op.wait()
                other.join()
            elif how < 0.1:
                while not op.wait(0):
                    time.sleep(0)
            assert op.wait()
        pending.check()

    def _post(self, call: Call) -> Pending:
        group, members = self.groups[call.group], self.members[call.group]
        rank = members.index(self.world.rank)
        share = Share(call, group, rank, len(members), self.world.core, self.pool)
        plans = {"plan": "whole", "plan of parts": "parts"}
        if call.kind in plans:
            which = plans[call.kind]
            ops, check = _plan(share, which == "parts", *self.plans[call.group, which])
        elif call.kind == "messages":
            ops, check = _messages(share, self.draw, self.from_any)
        else:
            ops, check = POSTS[call.kind](share)
        return Pending(call, ops, check)


def _wait(op: Any) -> None:
    """In a thread of its own; what goes wrong is said by the one that waits beside it."""
    with suppress(RuntimeError):
        op.wait()


def _all_reduce(share: Share, in_place: bool = False) -> Made:
    call = share.call
    source = share.given(share.rank, call.count)
    target = source.copy() if in_place else np.empty_like(source)
    begin = _address(target if in_place else source)
    made = share.group.all_reduce(begin, _address(target), call.count, share.type, share.op)

    def check() -> None:
        _same(share, target, reduced(call.type, call.op, share.all_given(call.count)))

    return [made], check


def _reduce_scatter(share: Share) -> Made:
    call, count = share.call, share.call.count
    source = share.given(share.rank, count * share.size)
    target = np.empty(count, source.dtype)
    addresses = _address(source), _address(target)
    made = share.group.reduce_scatter(*addresses, count, share.type, share.op)

    def check() -> None:
        own = slice(share.rank * count, (share.rank + 1) * count)
        parts = [whole[own] for whole in share.all_given(count * share.size)]
        _same(share, target, reduced(call.type, call.op, parts))

    return [made], check


def _all_gather(share: Share, in_place: bool = False) -> Made:
    count = share.call.count
    source, nbytes = share.given(share.rank, count), count * share.item
    target = np.empty(count * share.size, source.dtype)
    begin = _address(source)
    if in_place:
        target[share.rank * count : (share.rank + 1) * count] = source
        begin = _address(target) + share.rank * nbytes
    made = share.group.all_gather(begin, _address(target), nbytes)
    return [made], lambda: _same(share, target, np.concatenate(share.all_given(count)))


def _broadcast(share: Share) -> Made:
    call = share.call
    wanted = share.given(call.root, call.count)
    target = wanted if share.rank == call.root else np.empty_like(wanted)
    made = share.group.broadcast(_address(target), call.count * share.item, call.root)
    return [made], lambda: _same(share, target, wanted)


def _barrier(share: Share) -> Made:
    return [share.group.barrier()], lambda: None


def _messages(share: Share, draw: random.Random, from_any: bool) -> Made:
    """Each sends three to the rank `root` further, maybe itself; tags come in any order."""
    call, group, count = share.call, share.group, share.call.count // 3
    to, source = (share.rank + call.root) % share.size, (share.rank - call.root) % share.size
    tag, nbytes = call.number * 4, count * share.item
    asked = -1 if draw.random() < 0.3 and from_any else source
    found = [np.empty(count, DTYPES[call.type]) for _ in range(3)]
    ops = [
        group.send(_address(share.given(share.rank, count, k)), nbytes, to, tag + k)
        for k in range(3)
    ]
    receives = [
        group.receive(_address(found[k]), nbytes, asked, tag + k) for k in draw.sample(range(3), 3)
    ]

    def check() -> None:
        assert all(op.source == source for op in receives)
        for k in range(3):
            _same(share, found[k], share.given(source, count, k))

    return draw.sample(ops + receives, 6), check


def _plan(share: Share, parts: bool, plan: Any, addresses: list[int]) -> Made:
    """A sum in place of the leaves of all ranks, two of each, of float32."""
    share = replace(share, call=replace(share.call, type="float32"))
    rank, size, count = share.rank, share.size, PLAN_BYTES // 4
    for part in range(PLAN_LEAVES):
        leaf = _floats(addresses[rank] + part * PLAN_BYTES, count)
        leaf[:] = share.given(rank, count, part)
    made = plan.start()

    def check() -> None:
        leaves = [share.given(r, count, part) for r in range(size) for part in range(PLAN_LEAVES)]
        each = count // size
        own = slice(rank * each, (rank + 1) * each) if parts else slice(0, count)
        target = _floats(addresses[rank] + PLAN_LEAVES * PLAN_BYTES, own.stop - own.start)
        _same(share, target, reduced("float32", "sum", leaves)[own])

    return [made], check


POSTS: dict[str, Callable[[Share], Made]] = {
    "all-reduce": _all_reduce,
    "all-reduce in place": partial(_all_reduce, in_place=True),
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "all-gather in place": partial(_all_gather, in_place=True),
    "broadcast": _broadcast,
    "barrier": _barrier,
}


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _floats(address: int, count: int) -> Array:
    return np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)


def _same(share: Share, found: Array, wanted: Array) -> None:
    same = same_bits(share.call.type, found, wanted)
    assert same, f"rank {share.rank} of {share.size} has other bits in {share.call}"


def plans_of(world: World, members: tuple[int, ...], group: Any, memory: int) -> dict[str, Plans]:
    """Two plans over the same leaves; the target of each rank lies behind its leaves."""
    size, stride = len(members), (PLAN_LEAVES + 1) * PLAN_BYTES
    addresses = [memory + index * stride for index in range(size)]
    leaves = tuple(at + part * PLAN_BYTES for at in addresses for part in range(PLAN_LEAVES))
    targets = tuple(at + PLAN_LEAVES * PLAN_BYTES for at in addresses)
    merges, kind = merges_of(len(leaves)), world.core.TYPES["float32"]
    count = PLAN_BYTES // 4
    whole = world.core.Plan(group, leaves, targets, count, kind, merges, False)
    parts = world.core.Plan(group, leaves, targets, count // size, kind, merges, True)
    return {"whole": (whole, addresses), "parts": (parts, addresses)}


def memory_of_plans(world: World) -> list[int]:
    """Where the leaves and targets of each group lie."""
    stride = (PLAN_LEAVES + 1) * PLAN_BYTES
    return [world.shared(stride * len(group)) for group in world.members]


def lane_of(
    world: World, pool: dict[str, Array], first: int, lane_groups: Groups, memory: list[int]
) -> Lane:
    """What a rank has of a lane, whose groups are those of the world from number `first` on."""
    made: list[Any] = []
    plans = {}
    for number, ranks in enumerate(lane_groups):
        made.append(None)
        if world.rank in ranks:
            made[-1] = world.group(first + number, merges_of(len(ranks)), world.size > 2)
            found = plans_of(world, ranks, made[-1], memory[first + number])
            plans |= {(number, which): plan for which, plan in found.items()}
    return Lane(world, pool, made, lane_groups, plans, random.Random(world.rank * 10 + first))


def rank_main(
    world: World, lanes: list[Groups], memory: list[int], pool: dict[str, Array], schedules: Any
) -> None:
    """All lanes of one rank, each in its thread; the first failure ends the rank."""
    failures: list[str] = []

    def work(lane: Lane, schedule: list[Call]) -> None:
        try:
            lane.run(schedule)
        except BaseException:
            failures.append(traceback.format_exc())

    threads, first = [], 0
    for lane_groups, schedule in zip(lanes, schedules, strict=True):
        lane = lane_of(world, pool, first, lane_groups, memory)
        first += len(lane_groups)
        threads.append(threading.Thread(target=work, args=(lane, schedule), daemon=True))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failures:
        for thread in threads:
            thread.join(0.02)
    assert not failures, "\n".join(failures)


def one_round(
    core: Any, size: int, number: int, seed: int, most_bytes: int, pool: dict[str, Array]
) -> list[int]:
    """So many calls on so many ranks; what the ranks exited with."""
    lanes = groups_of(size)
    world = World(size, [group for lane in lanes for group in lane], core)
    memory = memory_of_plans(world)
    schedules = [
        list(calls(seed * 10 + index, list(map(len, groups)), number // len(lanes), most_bytes))
        for index, groups in enumerate(lanes)
    ]
    codes = ended(forked(world, lambda its: rank_main(its, lanes, memory, pool, schedules)))
    world.free()
    return codes


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--calls", type=int, default=4000)
    options.add_argument("--round", type=int, default=20_000, help="calls of a round at most")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    options.add_argument("--most-bytes", type=int, default=MOST_BYTES)
    options.add_argument("--library", type=Path, help="another build of it")
    asked = options.parse_args()
    core = loaded(asked.library) if asked.library else library()
    pool = pools(asked.seed)
    each = min(asked.round, -(-asked.calls // len(asked.ranks)))
    begun, made, rounds = time.monotonic(), 0, 0
    while made < asked.calls:
        size, seed = asked.ranks[rounds % len(asked.ranks)], asked.seed * 1000 + rounds
        codes = one_round(core, size, each, seed, asked.most_bytes, pool)
        if any(codes):
            print(f"{size} ranks, seed {seed}: they exited with {codes}")
            return 1
        made, rounds = made + each // 3 * 3, rounds + 1
        seconds = time.monotonic() - begun
        print(f"{made} calls in {seconds:.1f} s, the last on {size} ranks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
