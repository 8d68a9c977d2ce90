"""A trainer leaves the other ranks: nothing of it stays,
and nobody waits for a rank that failed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import contract_tasks
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.comm import counting_group as counting
from allranks.torch.comm import join as joining
from allranks.torch.comm import subgroups as lent
from allranks.torch.comm.comm import CPU, TIMEOUT, Comm
from allranks.torch.model.layers import Swapped

OnRanks = Callable[..., Any]

THREADS_AFTER_LEAVING = """
import os, time
import allranks.torch.comm.comm
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
dist.destroy_process_group()
until = time.monotonic() + 60  # one that was joined is listed for a moment
names = ["gloo"]
while "gloo" in " ".join(names) and time.monotonic() < until:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(open(f"/proc/self/task/{task}/comm").read().strip())
        except FileNotFoundError:
            pass
print(*names)
"""


@pytest.mark.slow
def test_the_threads_of_a_group_are_gone_with_it() -> None:
    """One that is left may drop a tensor while the interpreter ends: SIGABRT after a good training.

    The first optimizer of a process imports modules of torch whose
    defaults keep the group there is.
    """
    told = subprocess.run(
        [sys.executable, "-c", THREADS_AFTER_LEAVING], capture_output=True, text=True, check=True
    ).stdout
    assert "gloo" not in told, told


def test_a_group_within_a_job_on_nccl_is_made_at_once_and_split_from_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL would ask ranks for a split that are not in the group, and never come."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world: Any = dist.group.WORLD
    device, made = torch.device("cuda", 0), list[Any]()

    def note(ranks: list[int], **more: Any) -> object:
        made.append((world.bound_device_id, more.get("device_id")))
        return type("Group", (), {})()

    try:
        world.bound_device_id = device
        monkeypatch.setattr(dist, "new_group", note)
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        lent.borrow((0,), TIMEOUT)
        lent.borrow((0,), TIMEOUT, "gloo")
        assert made == [(None, device), (None, None)] and world.bound_device_id == device
    finally:
        world.bound_device_id = None
        monkeypatch.undo()
        dist.destroy_process_group()


def test_a_group_has_one_name_on_all_its_ranks_however_many_others_each_is_in() -> None:
    """They find each other by it, and would wait for ever."""
    everybody, ends, middle = (0, 1, 2, 3), ((0, 1), (2, 3)), (1, 2)

    def names(rank: int) -> dict[Any, list[str]]:
        made: dict[Any, list[str]] = {}
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            for ranks in (*ends, middle, everybody, middle):
                if rank in ranks:
                    of_some = lent.borrow(ranks, TIMEOUT)
                    watch: Any = SimpleNamespace()
                    counting_one = counting.counting_group(of_some, list(ranks), watch, TIMEOUT)
                    of_all = [lent.new_group(ranks, TIMEOUT)] if ranks == everybody else []
                    groups = (of_some, counting_one, *of_all)
                    made.setdefault(ranks, []).extend(group.group_name for group in groups)
        finally:
            dist.destroy_process_group()
        return made

    of_ranks = [names(rank) for rank in range(4)]
    assert of_ranks[1][middle] == of_ranks[2][middle]
    assert all(one[everybody] == of_ranks[0][everybody] for one in of_ranks)
    made = [name for names in of_ranks[1].values() for name in names]
    assert len(made) == len(set(made)) == 9  # 2 of an end, 4 of the middle, 3 of all


def test_a_counting_group_within_a_job_on_nccl_is_asked_for_no_device() -> None:
    """Torch would ask it, a group of Python, for its part of the device of the job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world: Any = dist.group.WORLD
    try:
        world.bound_device_id = torch.device("cuda", 0)
        watch: Any = SimpleNamespace(begin=lambda sent, meets: None)
        group = counting.counting_group(world, [0], watch, TIMEOUT)
        assert dist.get_backend(group) == counting.BACKEND
        assert world.bound_device_id == torch.device("cuda", 0)
        counting.leave_counting_group(group)
    finally:
        world.bound_device_id = None
        dist.destroy_process_group()


def test_a_rank_of_nccl_says_on_which_device_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(joining, "check_own_device", lambda *asked: None)
    given: dict[str, Any] = {}

    def note(backend: str, **more: Any) -> None:
        given.update(more, backend=backend)
        raise RuntimeError("far enough")

    monkeypatch.setattr(dist, "init_process_group", note)
    world, device = World(0, 2, store=str(tmp_path / "store")), torch.device("cuda", 0)
    for where, bound in ((device, device), (CPU, None)):
        with pytest.raises(RuntimeError, match="far enough"):
            joining.join(world, where)
        assert given["device_id"] == bound
    assert given["backend"] == "shared_memory"


def test_a_rank_whose_peers_never_come_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "PATIENCE_S", 0.01)
    told, until = "", time.monotonic() + 30
    with joining._waiting(World(rank=0, size=2), "127.0.0.1:29533"):
        while "rank 0 waits at 127.0.0.1:29533" not in told and time.monotonic() < until:
            time.sleep(0.01)
            told += capfd.readouterr().err
    assert "WORLD_SIZE say that there are 2" in told


def test_trainers_one_after_the_other_meet_at_one_store(on_ranks: OnRanks) -> None:
    """As under torchrun: a quick rank does not join at the store that rank 0 is about to close."""
    with Reservation(1) as reserved:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.ports[0])}
        on_ranks(2, "leaving_workers:one_after_the_other", where)


def test_a_store_in_a_file_outlasts_a_training(on_ranks: OnRanks, tmp_path: Path) -> None:
    """torch removes the file with the last store of it, even as another rank joins anew."""
    on_ranks(2, "leaving_workers:all_leave_before_any_joins_again", str(tmp_path))


def test_a_rank_that_failed_waits_for_no_checkpoint(on_ranks: OnRanks, tmp_path: Path) -> None:
    argument = {"run_dir": str(tmp_path / "run"), "strategy": "ddp"}
    on_ranks(2, "leaving_workers:fail_during_a_save", argument)


def test_connections_of_each_group_have_linear_timeouts(on_ranks: OnRanks) -> None:
    """Else ranks wait longer after a link was cut."""
    on_ranks(2, "leaving_workers:timeouts_are_linear", None)


class Group:
    """Of some of the ranks."""


@pytest.mark.parametrize(("failed", "wanted"), [(True, "aborted"), (False, "destroyed")])
def test_a_rank_that_failed_aborts_what_nccl_waits_for(
    failed: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(
        dist, "destroy_process_group", lambda group: did.append(("destroyed", group))
    )
    monkeypatch.setattr(c10d, "_abort_process_group", lambda group: did.append(("aborted", group)))
    own = Group()  # of some of the ranks: the process may be in others that are not ours
    Comm(size=2, owns_group=True, group=own).leave(failed=failed)
    assert did == [(wanted, own)]


class Broken:
    """Batches that cannot be closed."""

    def close(self) -> None:
        raise ZeroDivisionError


def is_swapped(model: nn.Module) -> bool:
    return any(isinstance(layer, Swapped) for layer in model.modules())


def test_all_is_given_back_whatever_one_of_it_raises() -> None:
    trainer = Trainer(contract_tasks.Images())
    model = trainer.strategy.model
    assert is_swapped(model)
    trainer.task_data._batches = Broken()  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        trainer.close()
    assert not is_swapped(model)


def test_a_trainer_that_cannot_be_made_leaves_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    left, models = [], []

    def notes_on(model: nn.Module, task: Any, *_: Any) -> list[str]:
        models.append(model)
        raise ZeroDivisionError

    group = SimpleNamespace(leave=lambda *, failed: left.append(failed))
    monkeypatch.setattr("allranks.torch.trainer.whole_norm", lambda *_: group)
    monkeypatch.setattr("allranks.torch.trainer.notes_on", notes_on)
    with pytest.raises(ZeroDivisionError):
        Trainer(contract_tasks.Images())
    assert left == [True] and not is_swapped(*models)


def test_a_message_that_a_lost_rank_broke_off_is_not_waited_for(on_ranks: OnRanks) -> None:
    on_ranks(2, "leaving_workers:lost_in_a_message", None)


def test_a_state_is_not_handed_on_where_others_form_a_group(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    """A rank whose node is cut off neither takes it nor ends."""
    on_ranks(2, "leaving_workers:hand_to_nobody", str(tmp_path))
