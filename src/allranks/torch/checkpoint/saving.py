"""Saving one training and resuming it: what is saved, and what must be as it was.

The trainer decides when; `checkpoint` knows how it gets to the disk and back. What every rank holds
is saved once; the random streams of user code, and everything of ranks that train apart, belong to
one rank and are taken up again only where the number of ranks is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from allranks.checkpoint import checkpointer
from allranks.checkpoint.checkpointer import EveryRank, Loaded, is_below, values_of
from allranks.checkpoint.commit import Planned, Ranks
from allranks.checkpoint.format import Manifest, SavedTensor, refused, unflatten
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.torch.checkpoint.plan import (
    Planner,
    TorchSnapshot,
    read_files,
)
from allranks.torch.checkpoint.spare import (
    LiveParts,
    PlacedRank,
    SpareReader,
    SpareState,
    opened_live,
)
from allranks.torch.checkpoint.state import (
    DTYPES,
    flatten,
    is_dtensor,
    random_streams,
    set_random_streams,
)
from allranks.torch.comm.comm import Comm
from allranks.torch.machine import DECIDES_BITS, facts
from allranks.torch.step.trainable import check_no_scheduler
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task
from allranks.training.callback import Callback
from allranks.training.engine.regroup import Spare
from allranks.training.engine.saved_job import SavedTraining

# --- loading -------------------------------------------------------------------------------------
# Reads the tensors of a checkpoint that a rank needs: its own, and those that all ranks hold.


Templates = dict[str, Tensor]


@dataclass(frozen=True)
class CheckpointReader:
    """Reads for `rank`, one of `ranks`; `templates` are tensors, by path, to be filled in place.

    `fill` is what reads tensors: from files, or from the memory of ranks.
    """

    rank: int
    ranks: int
    templates: Templates
    fill: Callable[[Path, dict[str, SavedTensor], Templates], None] = read_files

    def read(self, folder: Path, manifest: Manifest) -> Loaded:
        """Read a verified checkpoint; raises `BadCheckpoint` if something in it is missing."""
        common, rank_states = values_of(manifest)
        has_own = manifest.ranks == self.ranks
        prefixes = ["common", f"own/{self.rank}"] if has_own else ["common"]
        wanted = {
            p: t for p, t in manifest.tensors.items() if any(is_below(p, x) for x in prefixes)
        }
        targets = {path: self._target(folder, path, tensor) for path, tensor in wanted.items()}
        self.fill(folder, wanted, targets)
        mine = unflatten(rank_states[self.rank], targets) if has_own else None
        return Loaded(manifest.step, folder, manifest, unflatten(common, targets), mine)

    def _target(self, folder: Path, path: str, saved: SavedTensor) -> Tensor:
        target = self.templates.get(path)
        if target is None:
            return torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        if target.dtype != DTYPES[saved.dtype] or tuple(target.shape) != saved.shape:
            raise _does_not_fit(folder, path, f"{saved.dtype} {saved.shape}", target)
        return target.detach()


def _does_not_fit(folder: Path, path: str, saved: str, target: Tensor) -> RequestError:
    return RequestError(
        asked=f"to resume from {folder}",
        found=f"{path} is {saved} there, and {target.dtype} {tuple(target.shape)} here",
        why="weights of another shape or type are those of another model",
        do="give the model the shape that it was saved with, or start afresh",
    )


# --- checkpointer --------------------------------------------------------------------------------
# The checkpoints of a training with torch: every rank writes its part of the common plan.
#
# `allranks.checkpoint` defines a save and a load; `plan` decides which rank writes which part
# and copies tensors in memory, and `tree` defines the types of state.


class TensorCopies:
    """Copies of tensors in memory, and the plan of writes; one for each rank."""

    def __init__(self) -> None:
        self._snapshot = TorchSnapshot()
        self._planner: Planner | None = None

    def plan(self, ranks: Ranks, step: int, common: Any, rank_state: Any) -> Planned:
        """Plan a save. Gathers one digest, and the plans if one has changed."""
        skeleton, tensors = flatten(common, "common")
        own_skeleton, own_tensors = _flat_rank_state(ranks, rank_state)
        plan, writes = self._planning(ranks).plan(step, {**own_tensors, **tensors})
        take = partial(self._snapshot.take, writes)
        return Planned(skeleton, own_skeleton, plan.tensors, self._snapshot, take)

    def preparation(self, ranks: Ranks, common: Any, rank_state: Any) -> Callable[[], None]:
        """A function for a thread, before the first save: it plans, and allocates the copy."""
        tensors = {**_flat_rank_state(ranks, rank_state)[1], **flatten(common, "common")[1]}

        def act() -> None:
            writes = self._planning(ranks).plan(-1, tensors)[1]
            with suppress(MemoryError):  # the save tries again, and reports it
                self._snapshot.make_room(writes)

        return act

    def reader(
        self, ranks: Ranks, templates: Templates | None
    ) -> Callable[[Path, Manifest], Loaded]:
        """A reader of the common state, and of this rank's, if as many ranks have saved it."""
        return CheckpointReader(ranks.rank, ranks.size, templates or {}).read

    def _planning(self, ranks: Ranks) -> Planner:
        if self._planner is None or self._planner.comm is not ranks:
            self._planner = Planner(ranks)
        return self._planner


class TorchCheckpointer(checkpointer.Checkpointer):
    """The checkpoints of one run of torch; `rules` are those of all engines.

    A thread of each rank has its own communicator, separate from `comm`: every rank makes one.
    """

    def __init__(self, folder: Path, comm: Comm, **rules: Any) -> None:
        self._tensors = TensorCopies()
        super().__init__(folder, EveryRank(comm, comm.aside()), self._tensors, **rules)

    def prepare(self, common: Any, rank_state: Any) -> None:
        """Plan, and allocate the snapshot, so that the first save is like all others.

        All ranks call this when the state has all its tensors (after the first step); a thread
        runs it.
        """
        self.wait()
        self.writers.thread.start(self._tensors.preparation(self._ready(), common, rank_state))


def _flat_rank_state(ranks: Ranks, rank_state: Any) -> tuple[Any, dict[str, Tensor]]:
    return flatten(rank_state, f"own/{ranks.rank}")


OF_RANK = "callbacks_of_rank"
DEEPEST, MOST_ITEMS = 3, 64  # of what callbacks keep


class Saving(SavedTraining):
    """The checkpoints of one training with torch: each rank writes its part."""

    deciding = DECIDES_BITS
    checkpointer: TorchCheckpointer

    def __init__(
        self,
        task: Task,
        job: Job,
        strategy: Strategy,
        attempt: int,
        reach: Callable[[str, int], None],
        report: Callable[..., None],
        spare: SpareState | None = None,
    ) -> None:
        """`spare` are the copies in memory, where the job has some."""
        self.spare = spare
        super().__init__(task, job, attempt, reach, report)
        self.strategy, self._told_of_rates = strategy, False
        self.checkpointer = TorchCheckpointer(self.sources[0], strategy.comm, **self.rules)

    @staticmethod
    def facts(job: Job) -> dict[str, Any]:
        return facts(job)

    def save(self, step: int, other_state: dict[str, Any], metrics: dict[str, float]) -> None:
        about = self.about(other_state, metrics)
        self.checkpointer.save(step, *self._parts(other_state), about)

    def look_at_rates(self) -> None:
        """Before a step: refuse a scheduler, or note once that others set rates: not saved."""
        step = self.strategy.step
        check_no_scheduler(step.optimizer, "to train with checkpoints")
        if step.rates.warning and not self._told_of_rates:
            self._told_of_rates = True
            if self.strategy.comm.rank == 0:
                self.report("rate_notes", notes=[step.rates.warning])

    def prepare(self, other_state: dict[str, Any]) -> None:
        self.checkpointer.prepare(*self._parts(other_state))

    def _parts(self, other_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state that all ranks hold, and this rank's own."""
        other_state = dict(other_state)
        rank_state = {
            "random": random_streams(self.strategy.comm.device),
            "strategy": self.strategy.own_state() if self.strategy.has_own_state else {},
            OF_RANK: other_state.pop(OF_RANK, {}),
        }
        state = {**self.strategy.state(), **other_state}
        if self.strategy.agreement.is_one_training:
            return state, rank_state
        return {}, {**rank_state, **state}

    def load(self, load_other_state: Callable[[dict[str, Any]], None]) -> int | None:
        take = partial(self._take, load_other_state)
        return self.load_newest(self.strategy.comm.rank, take, self._templates())

    def refresh_spare(
        self, number: int, group: int, step: int, other_state: dict[str, Any]
    ) -> None:
        """Exchange the copies in memory that the job has: see `SpareState.refresh`."""
        assert self.spare is not None
        if unlike := other_state.get(OF_RANK):
            raise RequestError(
                asked="--spare-state",
                found=f"a state of callbacks that differs between ranks: {', '.join(unlike)}",
                why="nobody could take up that of a rank that is lost",
                do="leave it out of their state_dict(), or have it alike on all ranks",
            )
        strategy, other = self.strategy, {n: s for n, s in other_state.items() if n != OF_RANK}
        rank = PlacedRank(number, group, strategy.comm)
        has_parts = not strategy.layout.kept_whole
        local_state = {**strategy.local_state(), **other} if has_parts else {}
        self.spare.refresh(rank, step, local_state, lambda: {**strategy.state(), **other})

    def load_spare(
        self,
        spare: Spare,
        live: LiveParts | None,
        load_other_state: Callable[[dict[str, Any]], None],
    ) -> None:
        """Load what the ranks have in memory; every rank calls this."""
        comm = self.strategy.comm
        if self.spare is None:
            version = opened_live(comm, spare, live)
        else:
            version = self.spare.opened(comm, spare)
        fill = SpareReader(comm, version, spare.holders).fill
        reader = CheckpointReader(comm.rank, 0, self._templates(), fill)

        def take(state: dict[str, Any]) -> None:
            load_other_state(state if live is None else {**state, **live.callbacks})

        self._take(take, reader.read(Path(), version.manifest))

    def _take(self, load_other_state: Callable[[dict[str, Any]], None], loaded: Loaded) -> None:
        state, rank_state = self._state_in(loaded), loaded.rank_state or {}
        self.strategy.load_state(state)
        self.strategy.load_own_state(rank_state.get("strategy", {}))
        load_other_state({**state, OF_RANK: rank_state.get(OF_RANK), "step": loaded.step})
        if (random := rank_state.get("random")) is not None:
            set_random_streams(random, self.strategy.comm.device)

    def _templates(self) -> dict[str, Tensor]:
        """The target for this rank's part of each tensor that is not whole on every rank, by path.

        New memory for that part alone (none for a meta tensor, which is not read): the state of the
        training is unchanged until all of a checkpoint is read, and belongs to the same job.
        """
        prefix = "common"
        if not self.strategy.agreement.is_one_training:
            prefix = f"own/{self.strategy.comm.rank}"
        tensors = flatten(self.strategy.state(), prefix)[1]
        return {
            path: torch.empty_like(t) for path, t in tensors.items() if is_dtensor(t) or t.is_meta
        }

    def _state_in(self, loaded: Loaded) -> dict[str, Any]:
        if self.strategy.agreement.is_one_training:
            return dict(loaded.common)
        if loaded.rank_state is None:
            raise RequestError(
                asked=f"to resume from {loaded.path} on {self.strategy.comm.size} ranks",
                found=f"the states of {loaded.manifest.ranks} ranks that trained apart",
                why="each of them is a training of its own",
                do=f"--ranks {loaded.manifest.ranks}",
            )
        return dict(loaded.rank_state)


# --- callbacks ------------------------------------------------------------------------------------


def digest_of_state(state: Any, name: str) -> str:
    """A digest of the state of a callback; raises `RequestError` if it cannot be saved."""
    skeleton, tensors = flatten(state, f"callbacks/{name}")
    digest = hashlib.blake2b(json.dumps(skeleton).encode(), digest_size=16)
    for path, tensor in tensors.items():
        if is_dtensor(tensor):
            raise refused(path, "a part of a tensor that ranks share (DTensor)")
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def contents_of(callback: Callback, model: nn.Module) -> dict[str, Any]:
    """Versions of a callback's attributes outside the `model`, by name: they show changes."""
    versions: dict[str, Any] = {}
    known = {id(module) for module in model.modules()}
    waiting = [(name, value, 1) for name, value in vars(callback).items()]
    while waiting:
        name, value, depth = waiting.pop()
        if id(value) in known or type(value).__module__.startswith("allranks."):
            continue
        known |= {id(value)} if hasattr(value, "__dict__") else set()
        if isinstance(value, nn.Module):
            versions[name] = [t._version for t in (*value.parameters(), *value.buffers())]
        elif isinstance(value, Tensor):
            versions[name] = id(value), value._version
        elif isinstance(value, (int, float, np.number)):
            versions[name] = value
        elif isinstance(value, np.ndarray):
            versions[name] = hashlib.blake2b(np.ascontiguousarray(value).data).digest()
        elif isinstance(value, (list, tuple, dict, set, deque)):
            versions[name] = len(value)
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            if depth < DEEPEST:
                items = islice(pairs, MOST_ITEMS)
                waiting += [(f"{name}[{key!r}]", item, depth + 1) for key, item in items]
        elif depth < DEEPEST and not callable(value):
            attributes = getattr(value, "__dict__", {})
            waiting += [(f"{name}.{key}", item, depth + 1) for key, item in attributes.items()]
    return versions
