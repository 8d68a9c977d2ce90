"""A process of `two_processes.py`: loops that train the same, and what part of a step is what."""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from turns import answer_asked
from workloads import WORKLOADS, Workload, batches, task_of

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.shared_memory.backend import outcome_of, register
from allranks.torch.shared_memory.posting import BACKEND

STEPS_LIMIT = 10**9


class Loop(ABC):
    """A training that goes on where its last block of steps ended; `losses` are what it logged."""

    def __init__(self, workload: Workload, world: World) -> None:
        self.workload, self.world = workload, world
        self.losses: list[float] = []
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Build the model and what goes with it; every rank calls this."""

    @property
    @abstractmethod
    def trained(self) -> nn.Module:
        """The model whose forward passes are counted."""

    @abstractmethod
    def run(self, steps: int) -> None:
        """The next `steps` optimizer steps."""

    def end(self) -> None:
        """There will be no more steps."""


class ByHand(Loop):
    """Forward, backward, update, and the loss as a number; no communication."""

    def prepare(self) -> None:
        self.model = self.wrapped(self.workload.model())
        self.optimizer = self.workload.optimizer(self.model)
        self.batches = batches(self.workload, self.world.rank, self.world.size)

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    @property
    def trained(self) -> nn.Module:
        return self.model

    def logged(self, loss: torch.Tensor) -> float:
        return loss.item()

    def run(self, steps: int) -> None:
        for inputs, labels in islice(self.batches, steps):
            self.optimizer.zero_grad()
            output = self.model(inputs)
            loss = F.cross_entropy(output.flatten(0, -2), labels.flatten())
            loss.backward()
            self.optimizer.step()
            self.losses.append(self.logged(loss))


class DDP(ByHand):
    """Torch's DistributedDataParallel with the options that save time; the mean loss of all."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, forward_sync_buffers=False
        )

    @property
    def trained(self) -> nn.Module:
        module: nn.Module = self.model.module
        return module

    def logged(self, loss: torch.Tensor) -> float:
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / self.world.size


class AllRanks(Loop):
    """Our Trainer with as many shards as ranks; its loss is the mean over all ranks, always."""

    def prepare(self) -> None:
        task = task_of(self.workload, self.world.size, self.world.size)
        self.trainer = Trainer(task, Job(strategy="ddp"), world=self.world)
        self.batches = self.trainer.batches(steps=STEPS_LIMIT)

    @property
    def trained(self) -> nn.Module:
        model: nn.Module = self.trainer.built.model
        return model

    def run(self, steps: int) -> None:
        for batch in islice(self.batches, steps):
            self.losses.append(self.trainer.step(batch).loss)

    def end(self) -> None:
        self.trainer.close()


LOOPS: dict[str, Callable[[Workload, World], Loop]] = {
    "allranks": AllRanks,
    "DDP": DDP,
    "by hand": ByHand,
    "apart": ByHand,
}


class Stages:
    """While it is on: seconds in forward passes and in updates, in a block of steps."""

    def __init__(self, model: nn.Module) -> None:
        self.forward_s = self.update_s = self._began = 0.0
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._forward),
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._update),
        ]

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _forward(self, *_: Any) -> None:
        self.forward_s += time.perf_counter() - self._began

    def _update(self, *_: Any) -> None:
        self.update_s += time.perf_counter() - self._began

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Processes:
    """Answers what `two_processes.py` asks one of `world`'s processes about its loops."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loops: dict[str, Loop] = {}

    def answer(self, what: str, *details: Any) -> Any:
        answers = {"make": self.make, "time": self.time, "stages": self.stages}
        return (answers | {"losses": self.losses})[what](*details)

    def make(self, name: str, loops: list[str]) -> None:
        """Loops that train the workload `name`, instead of those that there were."""
        gc.unfreeze()
        for loop in self.loops.values():
            loop.end()
        self.loops.clear()
        gc.collect()
        workload = WORKLOADS[name]
        if self.world.size == 1:  # as large a batch as the others have together
            workload = replace(workload, batch=2 * workload.batch)
        self.loops = {loop: LOOPS[loop](workload, self.world) for loop in loops}

    def losses(self, name: str, steps: int) -> list[float]:
        """The losses of the next steps, which also make all ready for steps that are timed."""
        loop = self.loops[name]
        loop.losses.clear()
        loop.run(steps)
        gc.collect()
        gc.freeze()
        return list(loop.losses)

    def time(self, name: str, steps: int) -> list[float]:
        """Seconds and processor seconds of a step, over a block that begins at a barrier."""
        if self.world.size > 1:
            dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        self.loops[name].run(steps)
        seconds = time.perf_counter() - start, time.process_time() - busy
        return [each / steps for each in seconds]

    def stages(self, name: str, steps: int) -> dict[str, float]:
        """Microseconds of a step's stages; `rest` is backward, with what is communicated."""
        stages = Stages(self.loops[name].trained)
        step_s, _ = self.time(name, steps)
        stages.end()
        forward_s, update_s = stages.forward_s / steps, stages.update_s / steps
        rest_s = step_s - forward_s - update_s
        found = {"forward": forward_s, "rest": rest_s, "update": update_s, "step": step_s}
        return {f"{stage}_us": 1e6 * seconds for stage, seconds in found.items()}


def serve(rank: int, ranks: int, threads: int, address: str, store: str, backend: str) -> None:
    """Join the ranks on `backend`, and answer until nothing more is asked."""
    torch.set_num_threads(threads)
    world = World(rank, ranks, rank, ranks, 0, store)
    os.environ.update(world.variables(), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    if ranks > 1:
        register()
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    if backend == BACKEND:
        outcome = outcome_of()
        assert outcome is not None and outcome.did == BACKEND, outcome
    processes = Processes(world)
    answer_asked(address, rank, processes.answer)
    if ranks > 1:
        processes.loops.clear()
        gc.unfreeze()  # every DistributedDataParallel must be gone before the group is
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
