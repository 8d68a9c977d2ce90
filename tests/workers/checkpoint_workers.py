"""What runs in the ranks of the checkpoint tests, and states that tell a wrong load at once.

Every tensor of a state is filled from its step number, so that a mixture of two steps shows.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from allranks.checkpoint.checkpointer import Loaded
from allranks.checkpoint.format import About
from allranks.errors import PeerLost, RequestError
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.strategies.mesh import Agreement
from allranks.torch.checkpoint.saving import Saving, TorchCheckpointer
from allranks.torch.comm.comm import CPU, Comm
from allranks.torch.comm.join import join
from kinds_tasks import Rows
from small_disk import small_disk

POINTS = ("save:snapshot", "save:write", "save:half", "save:fsync", "save:written")
LEADER_POINTS = ("save:manifest", "save:rename", "save:committed", "save:prune")
NAMES = [f"{i}.weight" for i in range(7)]


def state(step: int) -> dict[str, Any]:
    """What all ranks hold after `step`: odd tensors, and plain values."""
    return {
        "model": {name: torch.full((3, 5 + i), float(step)) for i, name in enumerate(NAMES)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(step), "exp_avg": torch.full((4, 6), step).t()}},
            "param_groups": [{"lr": 0.5, "betas": (0.9, float("nan")), "params": [0]}],
        },
        "half": torch.full((5,), step, dtype=torch.bfloat16),
        "flags": torch.tensor([True, step % 2 == 0]),
        "empty": torch.empty(0, 3),
        "ordinal": step,
    }


def own(step: int, rank: int) -> dict[str, Any]:
    return {"random": torch.full((8,), 100 * rank + step), "rank": rank}


def check(loaded: Loaded, rank: int, has_own: bool) -> None:
    """Whole, and of one step."""
    step = loaded.step
    assert loaded.manifest.step == step
    assert_same(loaded.common, state(step))
    assert (loaded.rank_state is not None) is has_own
    if has_own:
        assert_same(loaded.rank_state, own(step, rank))


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted or found != found != wanted != wanted


def joined(attempt: str = "") -> Comm:
    torch.set_num_threads(1)
    return join(World.from_environment(), CPU)


def save_steps(argument: dict[str, Any]) -> None:
    """Save the steps in `steps`; each rank has something of its own."""
    comm = joined()
    checkpointer = TorchCheckpointer(Path(argument["folder"]), comm)
    for step in argument["steps"]:
        checkpointer.save(step, state(step), own(step, comm.rank), About(metrics={"loss": 1.0}))
    assert checkpointer.wait()
    comm.leave()


def load_step(argument: dict[str, Any]) -> None:
    """Load on any number of ranks, and check all of it."""
    comm = joined()
    loaded = TorchCheckpointer(Path(argument["folder"]), comm).load([Path(argument["folder"])])
    assert loaded is not None and loaded.step == argument["step"]
    check(loaded, comm.rank, has_own=comm.size == argument["ranks"])
    comm.leave()


def _sharded() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(7 * 4.0).view(7, 4),
        "columns": torch.arange(3 * 9.0).view(3, 9),
        "whole": torch.arange(5.0),
        "few": torch.arange(3.0),
    }


PLACES = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate(), "few": Shard(0)}


def _distributed(comm: Comm, tensors: dict[str, torch.Tensor]) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (comm.size,))
    return {name: distribute_tensor(t, mesh, [PLACES[name]]) for name, t in tensors.items()}


def save_sharded(argument: dict[str, Any]) -> None:
    comm = joined()
    checkpointer = TorchCheckpointer(Path(argument["folder"]), comm)
    for step in (1, 2):
        parts = _distributed(comm, {n: t * step for n, t in _sharded().items()})
        checkpointer.save(step, {"model": parts}, None, About())
    assert checkpointer.wait()
    comm.leave()


def load_sharded(argument: dict[str, Any]) -> None:
    """Into DTensors over another number of ranks, in place; on one rank into whole tensors."""
    comm = joined()
    parts: dict[str, Any] = {n: torch.zeros_like(t) for n, t in _sharded().items()}
    if comm.size > 1:
        parts = _distributed(comm, parts)
    folder = Path(argument["folder"])
    templates = {f"common/model/{name}": tensor for name, tensor in parts.items()}
    loaded = TorchCheckpointer(folder, comm).load([folder], templates)
    assert loaded is not None and loaded.step == 2
    for name, tensor in _sharded().items():
        found = parts[name].full_tensor() if comm.size > 1 else loaded.common["model"][name]
        assert torch.equal(found, 2 * tensor), name
    comm.leave()


SHARDED = Agreement("sharded")


@dataclass
class Halves:
    """Stands in for a strategy that splits its weights over the ranks."""

    comm: Comm
    parts: dict[str, DTensor]
    agreement: Agreement = SHARDED
    has_own_state: bool = True

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        assert state == {}

    def state(self) -> dict[str, Any]:
        return {"model": self.parts, "count": torch.tensor(3)}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            assert state["model"][name].placements == part.placements, "a whole one was read"
            part.copy_(state["model"][name])


def job_of_halves(argument: dict[str, Any]) -> None:
    """A job saves weights that are split over its ranks; one of another size goes on from them."""
    comm = joined()
    job = Job(run_dir=argument["folder"], ranks=comm.size, strategy="ddp")
    factor = 2.0 if argument["saves"] else 0.0
    parts = _distributed(comm, {n: t * factor for n, t in _sharded().items()})
    strategy: Any = Halves(comm, parts)
    saving = Saving(Rows(), job, strategy, 0, lambda point, step: None, lambda event, **_: None)
    if argument["saves"]:
        saving.save(4, {"progress": {}}, {})
        assert saving.checkpointer.wait()
    else:
        assert saving.load(lambda state: None) == 4
        for name, tensor in _sharded().items():
            assert torch.equal(parts[name].full_tensor(), 2 * tensor), name
    saving.checkpointer.close()
    comm.leave()


def disagree(argument: dict[str, Any]) -> None:
    """States that are not the same on all ranks are refused on all ranks, and nothing hangs."""
    comm = joined()
    checkpointer = TorchCheckpointer(Path(argument["folder"]), comm)
    same = {"w": torch.zeros(3)}
    checkpointer.save(1, same, None, About(), blocking=True)
    other = torch.zeros(3 + comm.rank)
    with pytest.raises(RequestError, match="the same on every rank"):
        checkpointer.save(2, {"w": other}, None, About())
    with pytest.raises(RequestError, match="common/more on one of the ranks"):
        checkpointer.save(2, {**same, **({"more": other} if comm.rank else {})}, None, About())
    with pytest.raises(RequestError, match="steps 2, 3"):
        checkpointer.save(2 + comm.rank, same, None, About())
    checkpointer.save(4, same, {"many": [other] * comm.rank}, About(), blocking=True)
    loaded = checkpointer.load([Path(argument["folder"])])
    assert loaded is not None and loaded.step == 4 and len(loaded.rank_state["many"]) == comm.rank
    comm.leave()


def one_rank_fails(argument: dict[str, Any]) -> None:
    """At every point, on one rank: nobody commits, all are told, and the next save stands."""
    comm = joined()
    folder = Path(argument["folder"])
    told: list[tuple[str, dict[str, Any]]] = []
    failing: list[str] = []

    def reach(point: str, step: int) -> None:
        if failing == [point] and comm.rank == argument["rank"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpointer = TorchCheckpointer(
        folder,
        comm,
        keep=100,
        reach=reach,
        report=lambda event, **values: told.append((event, values)),
    )
    points = POINTS if argument["rank"] else POINTS + LEADER_POINTS
    for number, point in enumerate(points):
        good, bad = 2 * number + 1, 2 * number + 2
        failing[:] = []
        checkpointer.save(good, state(good), own(good, comm.rank), About())
        assert checkpointer.wait()
        failing[:] = [point]
        checkpointer.save(bad, state(bad), own(bad, comm.rank), About())
        stands = point in ("save:committed", "save:prune")
        assert checkpointer.wait() is stands, point
        loaded = checkpointer.load([folder])
        assert loaded is not None and loaded.step == (bad if stands else good), point
        check(loaded, comm.rank, has_own=True)
    failures = [values for event, values in told if event == "checkpoint_failed"]
    if comm.rank == 0:
        assert len(failures) == len(points) - 2 * (argument["rank"] == 0)
        assert {values["rank"] for values in failures} == {argument["rank"]}
        assert all("No space left" in values["error"] for values in failures)
        assert not any(event == "checkpoint_skipped" for event, _ in told)
    else:
        assert told == []
    comm.leave()


def dies_at(argument: dict[str, Any]) -> None:
    """Save step 1; while step 2 is saved, one rank is killed at a point."""
    comm = joined()

    def reach(point: str, step: int) -> None:
        if (step, point, comm.rank) == (2, argument["point"], argument["rank"]):
            os.kill(os.getpid(), signal.SIGKILL)

    checkpointer = TorchCheckpointer(Path(argument["folder"]), comm, keep=1, reach=reach)
    checkpointer.save(1, state(1), own(1, comm.rank), About(), blocking=True)
    try:
        checkpointer.save(2, state(2), own(2, comm.rank), About(), blocking=argument["blocking"])
        checkpointer.wait()
    except PeerLost:
        os._exit(0)


def saves_for_ever(argument: dict[str, Any]) -> None:
    """Load, tell what came; then save all the time, and tell what stands. Until it is killed."""
    with open(argument["pipe"], "wb", buffering=0) as pipe:

        def tell(event: str, **values: Any) -> None:
            pipe.write(f"{event} {values['step']} {values.get('problems', '')}\n".encode())

        comm = joined()
        folder = Path(argument["folder"])
        checkpointer = TorchCheckpointer(
            folder, comm, keep=2, attempt=argument["attempt"], report=tell
        )
        loaded = checkpointer.load([folder])
        step = loaded.step if loaded else 0
        if loaded is not None:
            check(loaded, comm.rank, has_own=True)
        if comm.rank == 0:
            tell("loaded", step=step)
        common, ours = state(step), own(step, comm.rank)
        try:
            while True:
                step += 1
                _train(common, ours, step)
                checkpointer.save(step, common, ours, About(), blocking=argument["blocking"])
        except PeerLost:
            os._exit(0)


def _train(common: dict[str, Any], ours: dict[str, Any], step: int) -> None:
    """The next state, in place: the tensors that a thread may be saving change under it."""
    fresh, rank = state(step), ours["rank"]
    for name, tensor in common["model"].items():
        tensor.copy_(fresh["model"][name])
    common.update({name: value for name, value in fresh.items() if name != "model"})
    ours["random"].copy_(own(step, rank)["random"])


def on_a_full_disk(argument: dict[str, Any]) -> None:
    """Two ranks on a disk with room for one checkpoint and a half: this process and its child."""
    os.makedirs(argument["folder"], exist_ok=True)
    small_disk(argument["folder"], "size=640k")
    child = os.fork()
    os.environ |= {"RANK": "0" if child else "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "ALLRANKS_STORE": argument["store"]}
    if child:
        _fill_the_disk(Path(argument["folder"]))
        assert os.waitpid(child, 0)[1] == 0
    else:
        _exit_with(lambda: _fill_the_disk(Path(argument["folder"])))


def _exit_with(run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)


def _fill_the_disk(folder: Path) -> None:
    comm = joined()
    told: list[tuple[str, dict[str, Any]]] = []
    checkpointer = TorchCheckpointer(
        folder / "checkpoints", comm, report=lambda event, **values: told.append((event, values))
    )

    def save(step: int, count: int) -> bool:
        mine = torch.full((count,), step, dtype=torch.uint8)
        checkpointer.save(step, {}, {"mine": mine}, About())
        return checkpointer.wait()

    assert save(1, 200_000)
    assert not save(2, 200_000)
    assert not save(3, 200_000)
    loaded = checkpointer.load([folder / "checkpoints"])
    assert (
        loaded is not None and loaded.step == 1 and int(loaded.rank_state["mine"].sum()) == 200_000
    )
    assert len(list((folder / "checkpoints").iterdir())) == 1, "what did not fit is gone"
    assert save(4, 2_000), "training went on, and there is room for less"
    failures = [values for event, values in told if event == "checkpoint_failed"]
    assert len(failures) == (2 if comm.rank == 0 else 0)
    assert all("No space left on device" in values["error"] for values in failures), failures
    comm.leave()
