"""The machine under a training: which devices a job asks for, where, and a bit that flips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.job.run_folder import rank_events_path, read_rows
from allranks.launcher.nodes.rendezvous import Rendezvous
from allranks.launcher.start import plan_only
from allranks.torch import worker
from allranks.torch.machine import check_devices, flip_one_bit


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


def test_an_accelerator_that_this_torch_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(RequestError) as refused:
        check_devices(Job(program="digits", device="npu"), 1)
    assert (refused.value.asked, refused.value.do) == (
        "--device npu",
        "did you mean 'xpu'? known: cpu, cuda, xpu",
    )
    with pytest.raises(RequestError, match="0 XPU devices"):
        check_devices(Job(program="digits", device="xpu"), 1)


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
