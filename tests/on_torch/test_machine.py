"""The machine under a training: which devices a job asks for, where, and a bit that flips."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.job.run_folder import rank_events_path, read_rows
from allranks.launcher.places import Rendezvous
from allranks.launcher.start import plan_only
from allranks.launcher.world import World
from allranks.torch import worker
from allranks.torch.comm import join as joining
from allranks.torch.machine import (
    DECIDES_BITS,
    TRIED,
    check_devices,
    check_own_device,
    device_of,
    facts,
    flip_one_bit,
    notes_on_torch,
)
from allranks.training.engine.saved_job import differing


def test_a_torch_that_was_not_tried_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no upper bound: a release may be right, and nobody has looked yet."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    (tried,) = re.findall(r"^TORCHES := (.*)$", makefile, re.MULTILINE)
    assert {version.rpartition(".")[0] for version in tried.split()} <= set(TRIED)
    for version, said in (("2.13.0+cpu", False), ("2.16.1", True), ("3.1.0a0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        notes = notes_on_torch()
        assert bool(notes) == said and all(version in note for note in notes)


@pytest.mark.parametrize(
    ("nodes", "ranks", "found", "code"),
    [(1, 4, 4, 0), (2, 8, 4, 0), (1, 8, 4, 2), (2, 8, 0, 2)],
)
def test_a_node_is_asked_for_the_devices_of_its_own_ranks(
    nodes: int, ranks: int, found: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank looks for its own device when it starts; here one node speaks for all."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    path = rank_events_path(tmp_path, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    job = Job(
        program="contract_tasks:Plain",
        **{"ranks": ranks, "nodes": nodes, "device": "cuda", "strategy": "ddp"},
        run_dir=str(tmp_path),
    )
    assert worker.describe(job.to_data()) == code
    (row,) = read_rows(path)
    assert row["event"] == ("failed" if code else "described")


def test_where_there_are_roles_the_ranks_alone_have_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers on two devices, behind a scheduler and two servers, which compute on the host."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(accelerator, "use", lambda device: None)
    job = Job(program="digits", device="cuda", strategy="ps:servers=2", ranks=2)
    here = World(size=5, local_size=5, role="worker", local_ranks=2)
    workers = [replace(here, rank=n + 3, local_rank=n + 3, local_index=n) for n in range(2)]
    assert [device_of(job, one).index for one in workers] == [0, 1]
    assert device_of(job, replace(here, rank=1, local_rank=1, role="server")).type == "cpu"
    with pytest.raises(RequestError, match="--ranks 2"):
        device_of(job, replace(workers[0], local_ranks=3))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RequestError, match="--ranks 1"):
        device_of(job, workers[0])  # all processes see the same one


def test_an_accelerator_that_this_torch_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(RequestError) as refused:
        check_devices(Job(program="digits", device="npu"), 1)
    assert (refused.value.asked, refused.value.do) == (
        "--device npu",
        "did you mean 'xpu'? known: cpu, cuda, xpu",
    )
    with pytest.raises(RequestError, match="0 XPU devices"):
        check_devices(Job(program="digits", device="xpu"), 1)


@pytest.mark.parametrize(("visible", "taken"), [(1, 0), (4, 3), (2, None)])
def test_a_process_that_sees_one_device_takes_that(
    visible: int, taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As srun --gpus-per-task=1 starts it; fewer than all, and not one, is a mistake."""
    used: list[torch.device] = []
    monkeypatch.setattr(accelerator, "count", lambda kind: visible)
    monkeypatch.setattr(accelerator, "use", used.append)
    job, world = Job(device="cuda", strategy="ddp"), World(3, 4, local_rank=3, local_size=4)
    if taken is None:
        with pytest.raises(RequestError, match="2 CUDA devices"):
            device_of(job, world)
    else:
        assert [device_of(job, world)] == used == [torch.device("cuda", taken)]


@pytest.mark.parametrize(("visible", "taken"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1])])
def test_ranks_that_share_devices_take_turns_at_them(
    visible: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "count", lambda kind: visible)
    monkeypatch.setattr(accelerator, "use", lambda device: None)
    job = Job(device="cuda", strategy="ddp", ranks=4, share_device=True)
    worlds = [World(rank, 4, local_rank=rank, local_size=4) for rank in range(4)]
    assert [device_of(job, world).index for world in worlds] == taken
    check_devices(job, 4)
    with pytest.raises(RequestError, match=r"do: .*--share-device"):
        check_devices(replace(job, share_device=False), 4)
    monkeypatch.setattr(accelerator, "count", lambda kind: 0)
    with pytest.raises(RequestError, match="0 CUDA devices"):
        check_devices(job, 4)


@pytest.mark.parametrize(
    ("version", "asked", "found"),
    [
        ((2, 30, 4), "", "shared_device"),
        ((2, 31, 2), "", "nccl"),
        ((2, 31, 2), "gloo", "shared_device"),
        ((2, 30, 4), "nccl", "2.30.4"),
    ],
)
def test_nccl_is_asked_to_share_where_it_can(
    version: tuple[int, ...], asked: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks do what rank 0 has decided, whatever they have themselves."""
    for name in joining.SHARED_BY_NCCL:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(accelerator, "decides_bits", lambda kind: {"nccl": "2.30.4"})
    store, device = torch.distributed.HashStore(), torch.device("cuda", 0)
    if asked == "nccl" and found != "nccl":
        with pytest.raises(RequestError, match=f"found: {found}"):
            joining._backend_of_shared(device, asked, World(0, 2), store)
        return
    ranks = [joining._backend_of_shared(device, asked, World(rank, 2), store) for rank in (0, 1)]
    assert ranks == [found, found]
    told = [os.environ.get(name) for name in joining.SHARED_BY_NCCL]
    assert told == (["1", "0"] if found == "nccl" else [None, None])


@pytest.mark.parametrize(("chips", "who"), [("abc", ""), ("aba", "ranks 0 and 2|ranks 2 and 0")])
def test_ranks_that_have_one_device_together_hear_of_it(
    chips: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(accelerator, "uuid", lambda device: chips[device.index])

    def look(rank: int) -> str:
        try:
            check_own_device(torch.device("cuda", rank), World(rank, 3), store)
        except RequestError as refused:
            return refused.found
        return ""

    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(look, range(3)))
    (told,) = found
    assert told.removesuffix(" on one and the same device") in who.split("|")


def test_the_chip_and_its_libraries_decide_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    host = facts(Job())
    assert host.keys() >= set(DECIDES_BITS)
    assert not any(host[name] for name in accelerator.DECIDES_BITS)
    made = {"chip": "NVIDIA H200", "multiprocessors": 132}
    monkeypatch.setattr(accelerator, "chip_name", lambda device: made["chip"])
    monkeypatch.setattr(accelerator, "chip", lambda device: {"multi_processor_count": 132})
    there = facts(Job(device="cuda"))
    assert {name: there[name] for name in made} == made
    for was, now in ((there, {**there, "multiprocessors": 114}), (there, host), (host, there)):
        assert differing(was, now, DECIDES_BITS, bitwise=False)
        with pytest.raises(RequestError, match="--bitwise"):
            differing(was, now, DECIDES_BITS, bitwise=True)


@pytest.mark.slow
def test_a_plan_for_devices_needs_none_here() -> None:
    """On the login node of a cluster there are none."""
    resolved = resolve("contract_tasks:Plain", {"ranks": 2, "device": "cuda"}, ())
    with plan_only(resolved, Rendezvous()) as (plan, _):
        assert plan.job.device == "cuda" and plan.job.ranks == 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 2),
        torch.ones(2, 3, dtype=torch.float64).t(),
        torch.ones((), dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.ndim}",
)
def test_one_bit_of_the_first_value_flips_and_back(tensor: Tensor) -> None:
    before = tensor.clone()
    flip_one_bit(tensor)
    assert (tensor != before).flatten().nonzero().tolist() == [[0]]
    flip_one_bit(tensor)
    assert torch.equal(tensor, before)
