"""One rank of `checkpoint.py`: trains with our Trainer, saves in every way, loads in every way."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_probes import Probes, probed
from harness import order_of, say
from savers import SAVERS, AllRanks, Saver
from workloads import WORKLOADS, task_of

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer

STEPS_LIMIT = 10**9
LIMIT_S = 600  # a rank that has not ended by then shows where it stands, and leaves
Samples = dict[str, dict[str, list[float]]]


class Rank:
    """One rank with its training and all ways to save it, below `folder`."""

    def __init__(self, workload: str, world: World, names: list[str], folder: Path) -> None:
        self.world = world
        job = Job(
            checkpoint_every=STEPS_LIMIT,
            strategy="ddp" if world.size > 1 else "single",
            run_dir=str(folder / "run"),
            keep=1,
        )
        task = task_of(WORKLOADS[workload], world.size, world.size)
        self.trainer = Trainer(task, job, world=world, report=self.report)
        self.current: Saver | None = None
        self.savers = {name: SAVERS[name](self.trainer, folder / name) for name in names}
        self.batches = self.trainer.batches(steps=STEPS_LIMIT)

    def report(self, event: str, **values: Any) -> None:
        if event not in ("checkpoint", "resumed"):
            raise SystemExit(f"{event}: {values}")
        if isinstance(self.current, AllRanks):
            self.current.heard(event, **values)

    def step(self, count: int) -> None:
        for batch in islice(self.batches, count):
            result = self.trainer.step(batch)
            self.trainer.save_if_due(result)  # as `fit` does; nothing is due here

    def block(self, name: str, steps: int) -> dict[str, float]:
        """One step, a save, and more steps: how long the save held training, and all of it.

        What is left to do for the save after the last step counts as part of the block.
        """
        saver = self.current = self.savers[name]
        saver.commit_s.clear()
        gc.collect()
        self.trainer.comm.barrier()
        start = time.perf_counter()
        self.step(1)
        before = time.perf_counter()
        saver.save()
        held = time.perf_counter()
        self.step(steps - 1)
        trained = time.perf_counter()
        saver.wait()
        end = time.perf_counter()
        commit_s = saver.commit_s[-1] if saver.commit_s else 0.0
        times = {"stall_s": held - before, "block_s": end - start, "left_s": end - trained}
        times = self.slowest({**times, "commit_s": commit_s})
        if self.world.is_leader:
            saver.tidy()
            os.sync()
        self.trainer.comm.barrier()
        return times

    def load(self, name: str, is_cold: bool) -> dict[str, float]:
        """Seconds until what was saved last is in the model and the optimizer of every rank."""
        saver = self.current = self.savers[name]
        if is_cold and self.world.is_leader:
            for path in saver.files():
                _forget(path)
        gc.collect()
        self.trainer.comm.barrier()
        start = time.perf_counter()
        saver.load()
        return self.slowest({"cold_load_s" if is_cold else "load_s": time.perf_counter() - start})

    def slowest(self, times: dict[str, float]) -> dict[str, float]:
        """The largest over the ranks."""
        if self.world.size == 1:
            return times
        values = torch.tensor(list(times.values()), dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return dict(zip(times, values.tolist(), strict=True))

    def state_bytes(self) -> int:
        step = self.trainer.strategy.step
        moments = [v for s in step.optimizer.state.values() for v in s.values()]
        tensors = [*step.model.state_dict().values(), *moments]
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    def close(self) -> None:
        self.trainer.close()
        self.savers.clear()
        gc.collect()


def measure_as_rank(rank: int, asked: dict[str, Any], folder: str) -> None:
    """Measure what `asked` says, a `checkpoint.Plan` as a mapping;
    the leader writes `found.json`."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    world = World(rank, asked["ranks"], rank, asked["ranks"], 0, str(Path(folder) / "store"))
    os.environ.update(world.variables(), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    torch.set_num_threads(1)
    names = list(dict.fromkeys([*asked["savers"], *asked["loaders"]]))
    this = Rank(asked["workload"], world, names, Path(folder))
    this.step(2)
    found = _profiled(this, asked) if asked["is_profile"] else _measured(this, asked)
    if world.is_leader:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    this.close()


def _measured(this: Rank, asked: dict[str, Any]) -> dict[str, Any]:
    first = {name: this.block(name, asked["steps"])["stall_s"] for name in asked["savers"]}
    first_of = {name: first[name] for name in asked["savers"] if name in ("allranks", "dcp-async")}
    samples: Samples = {}
    for turn in range(asked["rounds"]):
        for name in order_of(asked["savers"], turn):
            _add(samples, f"save {name}", this.block(name, asked["steps"]))
        _say_last(this, samples, f"round {turn + 1}", ("stall_s", "block_s"))
    for turn in range(asked["rounds"]):
        for name in order_of(asked["loaders"], turn):
            for is_cold in (False, True) if asked["is_cold"] else (False,):
                _add(samples, f"load {name}", this.load(name, is_cold))
    return {"samples": samples, "first_stall_s": first_of, "state_bytes": this.state_bytes()}


def _profiled(this: Rank, asked: dict[str, Any]) -> dict[str, Any]:
    """Where our own saves and loads spend their time, on the leader; the first of each apart."""
    tables = []
    with probed() as probes:
        for name in ("allranks", "allranks-blocking"):
            for count, times in ((1, "the first"), (asked["rounds"], "later ones")):
                probes.clear()
                found = [this.block(name, asked["steps"])["stall_s"] for _ in range(count)]
                tables.append(_table(f"save {name}, {times}, stall", probes, found))
        probes.clear()
        found = [this.load("allranks", False)["load_s"] for _ in range(asked["rounds"])]
        tables.append(_table("load allranks", probes, found))
    return {"profile": tables, "state_bytes": this.state_bytes()}


def _table(what: str, probes: Probes, seconds: list[float]) -> dict[str, Any]:
    mean = sum(seconds) / len(seconds)
    return {"what": what, "mean_s": mean, "parts": probes.parts(len(seconds))}


def _add(samples: Samples, name: str, times: dict[str, float]) -> None:
    for metric, value in times.items():
        samples.setdefault(name, {}).setdefault(metric, []).append(value)


def _say_last(this: Rank, samples: Samples, what: str, metrics: tuple[str, ...]) -> None:
    if this.world.is_leader:
        last = [(n, "/".join(f"{s[m][-1]:.2f}" for m in metrics)) for n, s in samples.items()]
        say(f"{this.world.size} ranks, {what}: " + "  ".join(f"{n[5:]} {text}" for n, text in last))


def _forget(path: Path) -> None:
    """Take a file out of the page cache, so that it is read from its disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
