"""One rank of `step.py`: makes all contenders, checks that they train alike, times their blocks."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import math
import os
import time
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from contenders import Contender
from harness import order_of
from workloads import WORKLOADS

import allranks
from allranks.launcher.world import World

CHECKED_STEPS = 5
TOLERANCE = 1e-3  # of a loss, float32, after a few steps; another sample order is off by 1e-1
LIMIT_S = 600  # a rank that has not ended by then shows where it stands, and leaves


def measure_as_rank(
    workload: str,
    ranks: int,
    rank: int,
    names: list[str],
    block: int,
    turns: range,
    source: str,
    folders: list[str],
    contenders_in: str = "contenders",
) -> None:
    """Time the rounds `turns` as `rank` of `ranks`; the leader writes `samples.json`.

    `folders` are that of this set and, if there is one, of the set that it takes turns with;
    `source` is where allranks has to come from.
    """
    found = Path(allranks.__file__).parent.parent
    if found != Path(source):
        raise SystemExit(f"allranks is that of {found}, not of {source}")
    folder = folders[0]
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    world = World(rank, ranks, rank, ranks, 0, str(Path(folder) / "store"))
    os.environ.update(world.variables(), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    torch.set_num_threads(1)
    if ranks == 1:  # a Trainer that is alone makes no group, but the barriers here want one
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    with Turns(folders if world.is_leader else []) as taking:
        contenders = _make(workload, names, world, contenders_in)
        slowest = _measured(contenders, block, turns, taking)
    if world.is_leader:
        (Path(folder) / "samples.json").write_text(json.dumps(slowest))
    gc.unfreeze()  # every DistributedDataParallel must be gone before the group is: one that holds
    gc.collect()  # the group's last reference waits for its threads, and they for Python's lock
    dist.barrier()
    dist.destroy_process_group()


class Turns:
    """Who is timed, of two sets of processes side by side: A, B B, A A, and so on;
    else nobody waits.

    The leader reads a byte when its set may go on; its other ranks wait for it in a barrier.
    """

    def __init__(self, folders: list[str]) -> None:
        pipes = [os.open(f"{folder}/turn", os.O_RDWR) for folder in folders]
        self._own, self._other = pipes if len(pipes) == 2 else (-1, -1)
        self._is_first = folders == sorted(folders)

    def before(self, number: int) -> None:
        """Wait for the turn, where it is the other set's;
        the first waits till the other is there."""
        if self._own >= 0 and number == 0 and not self._is_first:
            os.write(self._other, b"t")
        if self._own >= 0 and self._is_other(number - 1):
            os.read(self._own, 1)

    def after(self, number: int) -> None:
        """Hand on the turn, where it is the other set's."""
        if self._own >= 0 and self._is_other(number):
            os.write(self._other, b"t")

    def _is_other(self, number: int) -> bool:
        """Whether the other set comes after round `number`: the first after even ones."""
        return number < 0 or (number % 2 == 0) == self._is_first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The other set is not left waiting."""
        if self._own >= 0:
            os.write(self._other, b"t")


def _measured(
    contenders: dict[str, Contender], block: int, turns: range, taking: Turns
) -> dict[str, list[float]]:
    """Microseconds per step of each contender in each round, on the slowest rank."""
    names = list(contenders)
    _check(contenders)
    for contender in contenders.values():
        _timed_block_s(contender, block)
    gc.collect()
    gc.freeze()
    own: dict[str, list[float]] = {name: [] for name in names}
    for number, turn in enumerate(turns):
        taking.before(number)
        for name in order_of(names, turn):
            own[name].append(_timed_block_s(contenders[name], block) / block * 1e6)
        taking.after(number)
    return {name: _slowest(values) for name, values in own.items()}


def _make(workload: str, names: list[str], world: World, table: str) -> dict[str, Contender]:
    """All contenders, in the order of `names`; ours come first,
    because a Trainer joins the ranks."""
    ours_first = sorted(names, key=lambda name: not name.startswith("allranks"))
    module = importlib.import_module(table)
    known, of_name = module.CONTENDERS, getattr(module, "WORKLOADS", WORKLOADS)
    made = {name: known[name](of_name[workload], world) for name in ours_first}
    torch.use_deterministic_algorithms(False)  # a bitwise Trainer has set it; see `_timed_block_s`
    return {name: made[name] for name in names}


def _timed_block_s(contender: Contender, steps: int) -> float:
    """Seconds for `steps` steps, from a barrier to this rank's end."""
    torch.use_deterministic_algorithms(contender.deterministic)
    contender.losses.clear()
    dist.barrier()
    start = time.perf_counter()
    contender.run(steps)
    return time.perf_counter() - start


def _check(contenders: dict[str, Contender]) -> None:
    """The first losses of all that log the global mean agree, so all train the same thing.

    Those with BatchNorm agree only where its statistics are over the same samples.
    """
    expected: dict[bool, tuple[str, list[float]]] = {}
    for name, contender in contenders.items():
        _timed_block_s(contender, CHECKED_STEPS)
        if name == "raw" or name.endswith("-local"):
            continue
        other_statistics = contender.workload.has_batchnorm and name in (
            "allranks-8",
            "allranks-bitwise",
        )
        first, losses = expected.setdefault(other_statistics, (name, list(contender.losses)))
        if not all(
            math.isclose(a, b, rel_tol=TOLERANCE)
            for a, b in zip(losses, contender.losses, strict=True)
        ):
            raise SystemExit(f"{name} logs {contender.losses}, but {first} logs {losses}")


def _slowest(own: list[float]) -> list[float]:
    """For each block the time of the slowest rank."""
    times = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    slowest: list[float] = times.tolist()
    return slowest
