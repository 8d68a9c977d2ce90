"""The process group of shared memory: it gives what Gloo does, and hears of a lost rank."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.processes.fork_server import SEGMENT_FD
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import WatchPolicy, supervise
from allranks.launcher.world import World
from allranks.torch.shared_memory.operands import PostedCall


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_gives_what_gloo_gives(on_ranks: Callable[..., Any], ranks: int) -> None:
    on_ranks(ranks, "shared_memory_workers:every_collective", None)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("what", ["every_form", "overlapping", "what_torch_asks"])
def test_torch_calls_it_as_it_calls_gloo(on_ranks: Callable[..., Any], what: str) -> None:
    on_ranks(2, f"shared_memory_workers:{what}", None)


@pytest.mark.slow
def test_a_monitored_barrier_says_who_did_not_come_as_gloo_says_it(
    on_ranks: Callable[..., Any],
) -> None:
    on_ranks(3, "shared_memory_workers:barriers_that_fail", None)


@pytest.mark.slow
def test_a_rank_may_end_its_program_as_soon_as_it_has_a_group(on_ranks: Callable[..., Any]) -> None:
    """As Accelerate's `test_ops` does where it takes each rank for a program of its own."""
    with closing(socket.create_server(("localhost", 0))) as server:
        port = server.getsockname()[1]
    on_ranks(2, "shared_memory_workers:rank_0_ends_at_once", port)


@pytest.mark.slow
def test_a_compiled_model_calls_it_untraced(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "shared_memory_workers:compiled", None)


@pytest.mark.slow
def test_two_threads_call_at_once(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "shared_memory_workers:two_threads", None)


def test_what_torch_trains_by_itself_runs_on_it(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "shared_memory_workers:training_of_torch", None)


def test_a_wait_ends_when_its_time_is_up_and_the_collective_goes_on(
    on_ranks: Callable[..., Any],
) -> None:
    on_ranks(2, "shared_memory_workers:a_wait_ends", None)


@pytest.mark.slow
def test_a_rank_that_is_stopped_may_be_continued(on_ranks: Callable[..., Any]) -> None:
    on_ranks(3, "shared_memory_workers:a_rank_is_stopped_and_goes_on", None)


def test_a_wait_for_memory_of_all_is_seen_and_broken_as_any_other(
    on_ranks: Callable[..., Any],
) -> None:
    on_ranks(2, "shared_memory_workers:a_rank_comes_for_no_memory", None)


def test_nothing_is_left_of_groups(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, "shared_memory_workers:nothing_is_left", None)


@pytest.mark.slow
def test_the_launcher_hands_the_memory_to_the_ranks(server: ForkServer, tmp_path: Path) -> None:
    with closing(HeartbeatTable(3)) as heartbeats:
        processes = [
            Process(
                rank,
                "shared_memory_workers:memory_of_the_launcher",
                None,
                World(rank, 3, store=str(tmp_path / "store"), segment=SEGMENT_FD).variables(),
                tmp_path / f"worker-{rank}.log",
            )
            for rank in range(3)
        ]
        ended = supervise(server, processes, policy=WatchPolicy(heartbeats))
    logs = "".join((tmp_path / f"worker-{rank}.log").read_text() for rank in range(3))
    assert [exit_.code for exit_ in ended.exits.values()] == [0] * 3, logs


@pytest.mark.slow
def test_ranks_of_several_hosts_meet_in_two_levels(on_ranks: Callable[..., Any]) -> None:
    on_ranks(3, "shared_memory_workers:several_hosts", None)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("why", ["hosts", "not built", "refused"])
def test_where_one_cannot_share_memory_all_use_gloo(on_ranks: Callable[..., Any], why: str) -> None:
    on_ranks(2, "shared_memory_workers:no_memory", why)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "exit", "leave"])
def test_the_others_say_which_rank_is_lost(server: ForkServer, tmp_path: Path, how: str) -> None:
    """Nobody ends them: they hear of it by themselves."""
    tickets = {}
    for rank in range(3):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "ALLRANKS_STORE": str(tmp_path / "store"),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        process = Process(
            rank,
            "shared_memory_workers:a_rank_is_lost",
            how,
            variables,
            tmp_path / f"worker-{rank}.log",
        )
        tickets[server.spawn(process)] = rank
    codes: dict[int, int] = {}
    deadline = time.monotonic() + 60
    waited_for = {0, 2} if how == "stop" else {0, 1, 2}
    while not waited_for <= codes.keys() and time.monotonic() < deadline:
        codes |= {tickets[ended.ticket]: ended.code for ended in server.exits(0.2)}
    for ticket, rank in tickets.items():
        if rank not in codes:
            server.signal(ticket, signal.SIGKILL)
    while len(codes) < 3:
        codes |= {tickets[ended.ticket]: ended.code for ended in server.exits(0.2)}
    logs = "".join((tmp_path / f"worker-{rank}.log").read_text() for rank in range(3))
    assert (codes[0], codes[2]) == (0, 0), logs


@pytest.mark.parametrize(
    "take", [PostedCall().source, PostedCall().target, lambda t: PostedCall().joint_source([t])]
)
def test_a_tensor_without_memory_is_refused(take: Callable[[torch.Tensor], object]) -> None:
    """A DTensor stands for others in the same way: at its address a process would end."""
    with pytest.raises(TypeError, match="no memory of its own"):
        take(torch.empty(3, device="meta"))
