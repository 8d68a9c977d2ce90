"""This machine as a place: the plan of a job, whole, and what it refuses or remarks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.launcher.plan import LaunchPlan, Seat, Shape, plan_of
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise
from allranks.launcher.world import Visible

ALL = Visible()

GOLDEN = """\
What is trained:
  program = digits
  engine = torch
  steps = 3
  seed = 7
  micro_batch = None
  micro_batch_trial = False
  steps_per_call = 1
  loader_workers = 0
  prefetch = 2
  eval_every = 
  early_stop = 
  until = 
  patience = 3
  optimizer = 
  schedule = 

Where:
  strategy = ddp
  ranks = 2
  nodes = 1
  place = local
  device = cpu
  devices = 
  share_device = False
  backend = 
  share = 
  threads = 1

Numbers:
  precision = fp32
  bitwise = False
  loss_scale = dynamic
  channels_last = False
  compile = 
  activation_checkpointing = False

Safety:
  checkpoint_every = None
  keep = 3
  best = 
  resume = 
  max_restarts = 0
  hang_timeout = 1800.0
  elastic = 
  spare_state = False
  time_limit = None
  on_bad_step = stop
  spike = None
  verify_every = None
  digest_every = 500
  witness = warn
  audit = 
  audit_every = None
  first_check = auto
  inject = 

Looking:
  run_dir = /somewhere/run
  log = 
  profile = False

Fields of the task:
  batch_size = 256
  lr = 0.1

rank 0: RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 \
ALLRANKS_STORE=/somewhere/run/.store ALLRANKS_ATTEMPT=0 ALLRANKS_RESTARTS=0 ALLRANKS_HEARTBEAT=-1 \
ALLRANKS_SEGMENT=-1 ALLRANKS_RENDEZVOUS= ALLRANKS_LISTENER=-1 ALLRANKS_ON_MACHINE=2 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 KERAS_BACKEND=torch

rank 1: RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 \
ALLRANKS_STORE=/somewhere/run/.store ALLRANKS_ATTEMPT=0 ALLRANKS_RESTARTS=0 ALLRANKS_HEARTBEAT=-1 \
ALLRANKS_SEGMENT=-1 ALLRANKS_RENDEZVOUS= ALLRANKS_LISTENER=-1 ALLRANKS_ON_MACHINE=2 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 KERAS_BACKEND=torch
"""


def plan_for(shards: int = 8, visible: Visible = ALL, **values: Any) -> LaunchPlan:
    values = {"strategy": "ddp", **values}
    job = Job(program="digits", run_dir="/somewhere/run", threads=1, **values)
    return plan_of(job, Shape({"batch_size": 256, "lr": 0.1}, 256, shards), visible)


def test_the_whole_plan_of_a_small_job() -> None:
    assert str(plan_for(ranks=2, seed=7, steps=3)) == GOLDEN


def test_a_plan_with_roles_has_a_process_for_each() -> None:
    """More workers than shards: each takes whole batches."""
    made = plan_for(strategy="parameter-server:servers=2", ranks=9, shards=8)
    worlds = [rank.world for rank in made.ranks]
    assert [(w.role, w.role_index) for w in worlds] == [
        ("chief", 0),
        *(("worker", index) for index in range(9)),
        ("server", 0),
        ("server", 1),
    ]
    assert {(w.size, w.local_size) for w in worlds} == {(12, 12)}
    assert made.ranks[11].environment["ALLRANKS_ROLE_INDEX"] == "1"
    assert made.job.ranks == 9 and made.notes == ("processes: 1 chief, 9 workers, 2 servers",)
    assert "\nserver 1 (rank 11): RANK=11 WORLD_SIZE=12 " in str(made)


def test_a_plan_is_the_same_each_time_and_plain_data() -> None:
    assert plan_for(ranks=3) == plan_for(ranks=3)
    data = json.loads(json.dumps(plan_for(ranks=3).to_data()))
    assert [rank["world"]["rank"] for rank in data["ranks"]] == [0, 1, 2]
    assert data["job"]["ranks"] == 3 and data["shape"]["shards"] == 8


def test_one_rank_needs_no_store() -> None:
    (only,) = plan_for(ranks=1).ranks
    assert only.world.store == only.environment["ALLRANKS_STORE"] == ""


def test_ranks_that_are_idle_for_a_while_are_remarked() -> None:
    (note,) = plan_for(ranks=6).notes
    assert note == (
        "6 ranks on 8 shards: ranks are busy 67% of the time; "
        "--set shards=12 would keep all busy, as another job"
    )
    assert str(plan_for(ranks=6)).endswith(f"\nnote: {note}")
    assert [plan_for(ranks=ranks).notes for ranks in (1, 2, 4, 8)] == [()] * 4


def test_more_ranks_than_shards_are_refused_with_the_number_to_set() -> None:
    with pytest.raises(RequestError) as refused:
        plan_for(ranks=9)
    assert refused.value.asked == "--ranks 9"
    assert refused.value.found == "the task cuts its batch into shards = 8"
    assert refused.value.do.startswith("--ranks 8, or --set shards=9 ")
    assert len(plan_for(ranks=9, shards=9).ranks) == 9


@pytest.mark.parametrize("strategy", ["ps", "decoupled", "ps:backup=1"])
def test_workers_own_whole_shards_as_ranks_do(strategy: str) -> None:
    spare = "backup" in strategy
    with pytest.raises(RequestError) as refused:
        plan_for(ranks=9 + spare, strategy=strategy)
    assert refused.value.found == "the task cuts its batch into shards = 8"
    assert plan_for(ranks=8 + spare, strategy=strategy).notes[0].startswith("processes: ")
    assert plan_for(ranks=9, strategy="ps:mode=async").job.ranks == 9  # each reads whole batches


def test_kernels_that_vary_are_ruled_out_on_a_gpu_under_bitwise_only() -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    assert plan_for(bitwise=True, device="cuda").ranks[0].defaults[name] == ":4096:8"
    assert not plan_for(bitwise=True).ranks[0].defaults
    assert name not in plan_for(device="cuda").ranks[0].defaults


def test_the_cards_of_nccl_are_lo_here_and_else_those_that_a_node_names(
    server: ForkServer, tmp_path: Path
) -> None:
    name, local = "NCCL_SOCKET_IFNAME", plan_for(ranks=2, device="cuda").ranks[0]
    assert local.environment[name] == "lo" and name not in local.defaults
    job = Job(program="digits", ranks=2, nodes=2, strategy="ddp", device="cuda", run_dir="/r")
    seats = [Seat(node, f"n{node}", "eth7") for node in range(2)]
    far = plan_of(job, Shape({}, 8, 8), ALL, seats).ranks[1]
    assert far.defaults[name] == "eth7" and name not in far.environment
    own, told = {"HOME": "ours"}, {"HOME": "a default", name: "eth7"}
    target, path = "places_workers:says_home_and_card", tmp_path / "said"
    process = Process(0, target, str(path), {}, tmp_path / "log", defaults=told)
    assert supervise(server, [process]).exits[0].code == 0
    process = Process(0, target, str(path), own, tmp_path / "log", defaults=told)
    assert supervise(server, [process]).exits[0].code == 0
    there = os.environ["HOME"]
    assert path.read_text() == f"{there} eth7\nours eth7\n", "what is there goes before a default"


# --- which devices -------------------------------------------------------------------------------

MASK = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [
        (None, "", None),
        (None, "0,1,4,5", "0,1,4,5"),
        ("7,5,3,1", "", None),  # as it is inherited
        ("7,5,3,1", "3,0", "1,7"),
        ("GPU-8932f937, GPU-11aa", "1,0", "GPU-11aa,GPU-8932f937"),
    ],
)
def test_every_rank_sees_the_devices_of_the_job_and_no_other(
    visible: str | None, devices: str, seen: str | None
) -> None:
    environment = {} if visible is None else {MASK: visible}
    found = plan_for(
        ranks=2, device="cuda", devices=devices, visible=Visible.from_environment(environment)
    )
    assert [rank.environment.get(MASK) for rank in found.ranks] == [seen, seen]
    assert [rank.world.local_rank for rank in found.ranks] == [0, 1], "renumbered"
    assert str(found).count(f" {MASK}=") == (2 if seen else 0)


@pytest.mark.parametrize(("visible", "is_refused"), [("GPU-aa,GPU-bb", True), ("4,5", False)])
def test_names_of_devices_of_one_machine_go_to_no_other(visible: str, is_refused: bool) -> None:
    seats = [Seat(node, f"n{node}", "eth7", machine=node) for node in range(2)]
    job = Job(strategy="ddp", ranks=2, nodes=2, device="cuda", devices="0,1")
    there = Visible.from_environment({MASK: visible})
    if not is_refused:
        plan = plan_of(job, Shape({}, 4, 4), there, seats)
        assert {rank.environment[MASK] for rank in plan.ranks} == {visible}
        return
    with pytest.raises(RequestError, match="GPU-aa is a device of one machine"):
        plan_of(job, Shape({}, 4, 4), there, seats)


def test_the_mask_reaches_the_processes(server: ForkServer, tmp_path: Path) -> None:
    found = plan_for(ranks=2, device="cuda", devices="2,0", visible=Visible(("4", "5", "6")))
    processes = [
        Process(
            rank.world.rank,
            "places_workers:says_its_devices",
            str(tmp_path / f"rank-{rank.world.rank}"),
            rank.environment,
            tmp_path / "log",
        )
        for rank in found.ranks
    ]
    assert {exit_.code for exit_ in supervise(server, processes).exits.values()} == {0}
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["6,4", "6,4"]


@pytest.mark.parametrize(
    ("visible", "devices", "do"),
    [
        ("4,5", "0,2", "--devices 0,1, or unset CUDA_VISIBLE_DEVICES"),
        ("", "0", "unset CUDA_VISIBLE_DEVICES"),
        ("3,-1,4", "1", "--devices 0, or unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_device_beyond_those_that_are_visible_is_refused(
    visible: str, devices: str, do: str
) -> None:
    with pytest.raises(RequestError) as refused:
        plan_for(device="cuda", devices=devices, visible=Visible.from_environment({MASK: visible}))
    assert refused.value.do == do


@pytest.mark.parametrize(
    ("strategy", "ranks", "enough", "do"),
    [
        ("ddp", 3, "0,1,2", "--ranks 2, or name 3 devices"),
        ("dp:replicas=4", 1, "0,1,4,5", "replicas=2, or name 4 devices"),
    ],
)
def test_fewer_devices_than_ranks_or_replicas_are_refused(
    strategy: str, ranks: int, enough: str, do: str
) -> None:
    flags = {"strategy": strategy, "ranks": ranks, "device": "cuda"}
    assert resolve("digits", {**flags, "devices": enough}).job.devices == enough
    with pytest.raises(RequestError) as refused:
        resolve("digits", {**flags, "devices": "0,1"})
    assert refused.value.do == do


def test_replicas_own_whole_shards_as_ranks_do() -> None:
    (note,) = plan_for(strategy="dp:replicas=3").notes
    assert note.startswith("3 replicas on 8 shards: replicas are busy 89% of the time; ")
    assert plan_for(strategy="dp:replicas=4").notes == ()
    with pytest.raises(RequestError) as refused:
        plan_for(strategy="dp:replicas=9")
    assert refused.value.do.startswith("--strategy dp:replicas=8, or --set shards=9 ")
