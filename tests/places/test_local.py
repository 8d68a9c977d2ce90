"""This machine as a place: the plan of a job, whole, and what it refuses or remarks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.job import Job
from allranks.places.base import Plan, Shape
from allranks.places.local import plan

GOLDEN = """\
program = digits
strategy = ddp
ranks = 2
nodes = 1
place = local
device = cpu
precision = fp32
bitwise = False
micro_batch = None
seed = 7
steps = 3
threads = 1
loader_workers = 0
checkpoint_every = None
keep = 3
best = 
resume = 
max_restarts = 0
hang_timeout = 1800.0
time_limit = None
on_bad_step = stop
spike = None
verify_every = None
inject = 
run_dir = /somewhere/run
trace = False
replay = 

task:
  batch_size = 256
  lr = 0.1

rank 0: RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 \
ALLRANKS_STORE=/somewhere/run/.store ALLRANKS_ATTEMPT=0 ALLRANKS_RESTARTS=0 ALLRANKS_PULSE=-1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

rank 1: RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 \
ALLRANKS_STORE=/somewhere/run/.store ALLRANKS_ATTEMPT=0 ALLRANKS_RESTARTS=0 ALLRANKS_PULSE=-1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
"""


def plan_for(shards: int = 8, **values: Any) -> Plan:
    job = Job(program="digits", strategy="ddp", run_dir="/somewhere/run", threads=1, **values)
    return plan(job, Shape({"batch_size": 256, "lr": 0.1}, 256, shards))


def test_the_whole_plan_of_a_small_job() -> None:
    assert str(plan_for(ranks=2, seed=7, steps=3)) == GOLDEN


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
        "6 ranks on 8 shards: ranks are busy 67% of the time; --set shards=12 would keep all busy, as another job"
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


def test_kernels_that_vary_are_ruled_out_on_a_gpu_under_bitwise_only() -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    assert plan_for(bitwise=True, device="cuda").ranks[0].environment[name] == ":4096:8"
    assert name not in plan_for(bitwise=True).ranks[0].environment
    assert name not in plan_for(device="cuda").ranks[0].environment
