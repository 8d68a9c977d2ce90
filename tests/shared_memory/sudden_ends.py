"""A rank is killed, stopped or paused in the midst of random calls; the others have to say which.

    python tests/shared_memory/sudden_ends.py --rounds 12 --seed 1

Every lane of every survivor reports whom it lost. Those of the group of all name the rank itself;
in groups of some, others may have left because of it. (A receive from any rank goes on without one
that left: some could wait for good there, so each receive in those groups names its rank.) Nobody
misses a rank that is stopped for a fifth of a second. Afterwards no survivor has a descriptor more
than before. The last line says how long the slowest report took.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from forked_ranks import STOPPED_S, World, descriptors, ended, forked, library, names
from random_calls import Call, calls, pools
from stress import Groups, groups_of, lane_of, memory_of_plans
from tree_reference import Array

WAYS = ("killed", "stopped", "paused")
REASONS = {"killed": "died", "stopped": "stopped"}
PAUSED_S, PAUSED_CALLS = 0.2, 900
PATIENT_S = 60.0  # nobody says how late a loaded machine continues who is paused
ENDLESS = 10**9
MOST_BYTES = 2**20
LANES = 3


class Report(ctypes.Structure):
    """What a lane of a rank has lost: a rank of the world, why, and when (CLOCK_MONOTONIC)."""

    _fields_ = [("at", ctypes.c_double), ("rank", ctypes.c_int), ("reason", ctypes.c_char * 20)]


def reports_of(world: World, address: int) -> Any:
    return ((Report * LANES) * world.size).from_address(address)


def linked(numbers: Iterable[str]) -> list[str]:
    """What these descriptors are, where they still are."""
    return [os.readlink(at) for n in numbers if os.path.lexists(at := f"/proc/self/fd/{n}")]


def survive(
    world: World,
    lanes: list[Groups],
    memory: list[int],
    reports: Any,
    pool: dict[str, Array],
    schedules: list[Iterable[Call]],
) -> None:
    """What a rank does: it calls in all lanes until each is through or has lost somebody."""
    wrong: list[str] = []

    def work(number: int, first: int) -> None:
        groups = lanes[number]
        lane = lane_of(world, pool, first, groups, memory)
        lane.from_any = len(groups) == 1
        try:
            lane.run(schedules[number])
        except world.core.PeerLost as lost:
            failed = next(g for g, one in enumerate(lane.groups) if one and one.failed == str(lost))
            report = reports[world.rank][number]
            report.rank, report.reason = groups[failed][lost.rank], lost.reason.encode()
            report.at = time.monotonic()
        except BaseException:
            wrong.append(traceback.format_exc())
        for group in filter(None, lane.groups):
            group.leave()

    firsts = [sum(map(len, lanes[:number])) for number in range(LANES)]
    threads = [
        threading.Thread(target=work, args=(number, firsts[number])) for number in range(LANES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threading.enumerate():  # those that waited beside a lane for the same op
        if thread is not threading.current_thread():
            thread.join()
    assert not wrong, "\n".join(wrong)
    world.engine = None
    gc.collect()
    now = descriptors()
    assert now == world.held, f"descriptors are left behind: {now} {linked(now - world.held)}"


def one_round(way: str, size: int, draw: random.Random, pool: dict[str, Array]) -> float:
    """Disturb one rank, and hold the reports of the others to it; the seconds of the slowest."""
    lanes, seed = groups_of(size), draw.getrandbits(30)
    stopped_s = PATIENT_S if way == "paused" else STOPPED_S
    world = World(size, [group for lane in lanes for group in lane], library(), stopped_s)
    memory = memory_of_plans(world)
    reports = reports_of(world, world.shared(4096 * size))
    number = PAUSED_CALLS if way == "paused" else ENDLESS
    schedules = [
        calls(seed + index, list(map(len, groups)), number, MOST_BYTES)
        for index, groups in enumerate(lanes)
    ]
    started = forked(world, lambda its: survive(its, lanes, memory, reports, pool, schedules))
    victim = draw.randrange(size)
    world.await_all()
    time.sleep(0.05 + 0.3 * draw.random())
    begun = time.monotonic()
    os.kill(started[victim], signal.SIGKILL if way == "killed" else signal.SIGSTOP)
    if way == "paused":
        time.sleep(PAUSED_S)
        os.kill(started[victim], signal.SIGCONT)
    others = [pid for rank, pid in enumerate(started) if rank != victim]
    codes = ended(others)
    if way != "paused":
        os.kill(started[victim], signal.SIGKILL)
    last = ended([started[victim]])
    assert codes == [0] * (size - 1), f"{way}, {size} ranks: survivors exited with {codes}"
    assert last == [0 if way == "paused" else -signal.SIGKILL], last
    found = [
        (rank, lane, reports[rank][lane])
        for rank in range(size)
        for lane in range(LANES)
        if rank != victim
    ]
    slowest = 0.0
    for rank, lane, report in found:
        told = f"{way} rank {victim} of {size}: rank {rank} lane {lane} says {report.rank} "
        told += f"{report.reason.decode()!r}"
        if way == "paused":
            assert report.at == 0, told
            continue
        if not any(rank in group for group in lanes[lane]):
            continue
        assert report.at > 0, told
        slowest = max(slowest, report.at - begun)
        if len(lanes[lane]) == 1:
            assert report.rank == victim and report.reason.decode() == REASONS[way], told
        else:
            assert report.rank == victim or report.reason == b"left", told
    world.free()
    return slowest


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    asked = options.parse_args()
    draw, pool = random.Random(asked.seed), pools(asked.seed)
    before, own = names(), descriptors()
    slowest: dict[str, float] = {}
    for number in range(asked.rounds):
        way = asked.ways[number % len(asked.ways)]
        size = draw.choice(asked.ranks)
        slowest[way] = max(slowest.get(way, 0.0), one_round(way, size, draw, pool))
    assert names() <= before, "names are left in /dev/shm"
    assert descriptors() == own, "descriptors are left behind"
    print(json.dumps({"rounds": asked.rounds, "slowest_report_s": slowest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
