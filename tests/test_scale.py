"""Ranks join and leave a job that runs, as a request in its folder says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from allranks.cli import runs
from allranks.cli.display.following import scaled_in_words
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import JsonLines, RunFolder, rank_events_path, read_rows
from allranks.job.scaling import (
    ANSWERS,
    READ,
    REQUEST,
    Bounds,
    ScaleRequest,
    joiners_of,
    leavers_of,
    next_request,
    post,
    withdraw,
)
from allranks.launcher.heartbeat import Group, Heartbeat, HeartbeatTable, Stream
from allranks.launcher.plan import RankPlan
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Exit, Process
from allranks.launcher.scaling import MOST_AGAIN, READY_S, Scaling
from allranks.launcher.start import JobWatcher, Result, run_job
from allranks.launcher.world import World
from allranks.tools.report.records import read_run
from allranks.tools.report.timeline import TRAINING, timeline_of
from allranks.torch import state_stream

TASKS = Path(__file__).parent / "tasks"
BOUNDS = Bounds(2, 4)


# --- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "members", "size", "leavers", "joiners"),
    [
        ({"ranks": 4}, (0, 1), 4, (), (2, 3)),
        ({"ranks": 3}, (0, 2), 3, (), (1,)),  # the lowest number that is free
        ({"ranks": 2}, (0, 1, 3), 2, (3,), ()),  # the highest numbers leave
        ({"ranks": 2}, (1, 3), 2, (), ()),
        ({"join": 1}, (1, 2, 3), 4, (), (0,)),
        ({"leave": (0,)}, (0, 1, 2), 2, (0,), ()),  # also the leader
        ({"leave": (3, 0, 3)}, (0, 1, 2, 3), 2, (0, 3), ()),
    ],
)
def test_who_joins_and_who_leaves(
    words: dict[str, Any],
    members: tuple[int, ...],
    size: int,
    leavers: tuple[int, ...],
    joiners: tuple[int, ...],
) -> None:
    request = ScaleRequest.new(**words)
    assert request.size_after(members, BOUNDS) == size
    assert leavers_of(request, members, size) == leavers
    assert joiners_of(members, members, size) == joiners


@pytest.mark.parametrize(
    ("words", "members", "says"),
    [
        ({"ranks": 5}, (0, 1), "scale --ranks 5\nfound: 5 ranks would train, under --elastic 2:4"),
        ({"ranks": 1}, (0, 1), "elastic 2:4"),
        ({"join": 1}, (0, 1, 2, 3), "join\nfound: 5 ranks would train"),
        ({"leave": (1,)}, (0, 1), "scale --leave 1\nfound: 1 rank would"),
        ({"ranks": 5}, (), "elastic 2:4\n"),
        ({"leave": (0, 2)}, (0, 1, 3), "ranks 0, 1, 3 train"),
    ],
)
def test_outside_of_the_bounds_is_refused(
    words: dict[str, Any], members: tuple[int, ...], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        ScaleRequest.new(**words).size_after(members, BOUNDS)


def test_a_request_is_read_once_and_replaces_no_other(tmp_path: Path) -> None:
    first, second = ScaleRequest.new(ranks=3), ScaleRequest.new(join=1)
    assert next_request(tmp_path) is None and not withdraw(tmp_path, first)
    post(tmp_path, first)
    with pytest.raises(RequestError, match="another request"):
        post(tmp_path, second)
    assert next_request(tmp_path) == first and next_request(tmp_path) is None
    post(tmp_path, second)
    assert not withdraw(tmp_path, first), "of another command"
    assert withdraw(tmp_path, second) and next_request(tmp_path) is None
    assert not list(tmp_path.iterdir())


NUMBERS = {"number": "1", "by": "", "ranks": 0, "join": 0, "leave": []}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 4000,
        "3",
        json.dumps({**NUMBERS, "ranks": 3, "more": 1}),
        json.dumps({**NUMBERS, "ranks": "3"}),
        json.dumps({**NUMBERS, "ranks": 3, "join": 1}),
        json.dumps(NUMBERS),
        json.dumps({**NUMBERS, "by": "x" * 5000, "ranks": 3}),
    ],
    ids=range(9),
)
def test_what_is_no_request_is_removed(tmp_path: Path, content: str) -> None:
    (tmp_path / REQUEST).write_text(content)
    assert next_request(tmp_path) is None and not (tmp_path / REQUEST).exists()


def test_the_launcher_waits_for_no_pipe_and_follows_no_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({**NUMBERS, "ranks": 3}))
    (tmp_path / REQUEST).symlink_to(secret)
    assert next_request(tmp_path) is None and secret.exists()
    os.mkfifo(tmp_path / REQUEST)
    assert next_request(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_folder_in_the_place_of_a_request_harms_no_job(tmp_path: Path) -> None:
    (tmp_path / REQUEST).mkdir()
    request = ScaleRequest.new(ranks=3)
    assert next_request(tmp_path) is None and not withdraw(tmp_path, request)
    with pytest.raises(RequestError, match="another request"):
        post(tmp_path, request)


def test_rows_of_nobody_are_in_no_group() -> None:
    with closing(HeartbeatTable(4, begin=2)) as table:
        rank = Heartbeat(table.fd, 1)
        rank.at_step(7)
        rank.enter("compute")
        assert table.group.members == rank.group().members == (0, 1)
        group = table.form_group((0, 3), from_step=9)
        assert table.group.members == rank.group().members == (0, 3) and group.number == 1
        table.clear(1)
        assert (rank.step, table.read()[1].beats) == (-1, 0)
        assert table.group.members == (0, 3)


# --- the launcher --------------------------------------------------------------------------------


@dataclass
class FakeWatch:
    """The processes that run, and those that were killed."""

    alive: dict[int, int]
    ends: str = ""
    asked_to_stop: str = ""
    dismissed: list[int] = field(default_factory=list)
    dies: frozenset[int] = frozenset()

    def look_for_the_dying(self, ranks: Iterable[int]) -> frozenset[int]:
        dying, self.dies = self.dies.intersection(ranks), self.dies.difference(ranks)
        return dying

    def start(self, process: Process) -> None:
        self.alive[process.rank] = process.rank

    def dismiss(self, ranks: Iterable[int]) -> None:
        self.dismissed += ranks
        for rank in ranks:
            del self.alive[rank]


@dataclass
class Launch:
    """The launcher of two ranks that train, of which four may."""

    folder: RunFolder
    table: HeartbeatTable
    watch: Any
    scaling: Scaling

    def ask(self, **words: Any) -> None:
        post(self.folder.path, ScaleRequest.new(**words))
        self.tick()

    def tick(self) -> None:
        self.scaling.steer(self.watch)

    def write(self, rank: int, *names: str, **values: Any) -> None:
        """Events of a rank."""
        with JsonLines(rank_events_path(self.folder.path, rank), attempt=0) as events:
            for name in names:
                events.event(name, **values)

    @property
    def answer(self) -> dict[str, Any]:
        """The last answer of the launcher; empty before the first."""
        rows = read_rows(self.folder.path / "events.jsonl")
        return [{}, *(row for row in rows if row["event"] in ANSWERS)][-1]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with (
        closing(RunFolder(tmp_path / "run")) as folder,
        closing(HeartbeatTable(4, begin=2)) as table,
    ):
        plan = {rank: RankPlan(World(rank, 4), {}) for rank in range(4)}

        def make(planned: RankPlan) -> Process:
            assert planned.world.group == -1 and planned.world.number == planned.world.rank
            return Process(planned.world.rank, "", None, {}, tmp_path / "log")

        scaling = Scaling(
            Bounds(1, 4),
            folder,
            0,
            table,
            plan_for=lambda ranks, new: plan,
            make=make,
            edited=lambda: "",
            differs=lambda ready: "",
        )
        for rank in range(2):
            Heartbeat(table.fd, rank).at_step(5 + rank)
        yield Launch(folder, table, FakeWatch({0: 0, 1: 1}), scaling)


def test_a_group_forms_when_every_new_rank_waits_for_it(launch: Launch) -> None:
    launch.write(2, "joining")  # of a process that had the number before
    launch.ask(ranks=4)
    assert set(launch.watch.alive.values()) == {0, 1, 2, 3}
    launch.write(3, "joins", "ready", "joining")
    launch.tick()
    assert launch.table.group.members == (0, 1) and not launch.answer
    launch.write(2, "joins", "ready", "joining")
    launch.tick()
    group = launch.table.group
    assert (group.members, group.from_step) == ((0, 1, 2, 3), 8), "two after the furthest"
    launch.tick()
    assert not launch.answer
    for rank in (2, 3):
        heartbeat = Heartbeat(launch.table.fd, rank)
        heartbeat.enter_group(1)
        heartbeat.at_step(8)
    launch.tick()
    assert launch.answer["event"] == "scaled" and launch.answer["joined"] == [2, 3]
    assert not launch.watch.dismissed


@pytest.mark.parametrize(
    ("has_nodes", "steps_per_s", "is_sent"),
    [(True, 1.9, False), (True, 2.1, True), (False, 2.1, False)],
)
def test_a_state_that_takes_longer_than_a_step_is_sent_before(
    launch: Launch, has_nodes: bool, steps_per_s: float, is_sent: bool
) -> None:
    """Here half a second between nodes."""
    launch.scaling.has_nodes = has_nodes
    launch.scaling._pace.append((time.monotonic() - 100, round(6 - 100 * steps_per_s)))
    launch.ask(ranks=4)
    for rank in (2, 3):
        launch.write(rank, "joins", "ready", "joining", state_bytes=5e7)
    launch.tick()
    assert (launch.table.group.number == 0) == is_sent
    if not is_sent:
        assert launch.table.stream.number == 0
        return
    with closing(HeartbeatTable(4, begin=0)) as node:
        node.put_orders(launch.table.orders)
        assert Heartbeat(node.fd, 3).stream() == launch.table.stream == Stream(1, 0, (2, 3))
    launch.write(2, "streamed", cause="")
    launch.tick()
    assert launch.table.group.number == 0
    launch.write(3, "streamed", cause="the connection broke")
    launch.tick()
    assert launch.table.group.members == (0, 1, 2, 3)


def test_on_nodes_a_group_begins_a_second_later_and_not_many_slow_steps(launch: Launch) -> None:
    launch.scaling.has_nodes = True
    now = time.monotonic()
    launch.scaling._pace.extend([(now - 100, 0), (now, 5)])  # rank 1 has begun step 6 since
    launch.ask(leave=(0,))
    assert launch.table.group == Group(1, 6 + 2 + 1, (1,))


@pytest.mark.parametrize("uptime_s", [1.0, 1e9])
def test_a_new_rank_may_be_on_a_host_with_another_uptime(launch: Launch, uptime_s: float) -> None:
    """Clocks that count from the start of a host are not compared, nor are older events taken."""
    launch.write(2, "joins", "ready", "joining", monotonic=1e12)  # it has left since
    launch.ask(join=1)
    launch.tick()
    assert launch.table.group.number == 0
    launch.write(2, "joins", "ready", "joining", monotonic=uptime_s)
    launch.tick()
    assert launch.table.group.members == (0, 1, 2)


def test_one_change_at_a_time(launch: Launch) -> None:
    launch.ask(join=1)
    launch.ask(ranks=4)
    assert launch.answer["request"]["found"] == "a change that is not done yet"
    assert launch.scaling.change is not None and launch.scaling.change.request.join == 1


def test_new_ranks_are_ended_where_none_is_needed(launch: Launch) -> None:
    """The job is over, or is asked to stop, or another new rank has failed."""
    launch.ask(ranks=4)
    launch.watch.alive.pop(3)
    launch.scaling.lost(3, Exit(3, 1, 0.0))
    report = f"rank 3 ended before it had joined: see {launch.folder.path}/logs/rank-003.log"
    assert launch.answer["report"] == f"{report}; the other ranks train on"
    launch.tick()
    assert launch.watch.dismissed == [2]
    launch.ask(join=1)
    launch.watch.ends = "the job was asked to stop (SIGTERM)"
    launch.tick()
    assert launch.answer["report"] == "the job was asked to stop (SIGTERM)"
    assert launch.watch.dismissed == [2, 2] and launch.table.group.number == 0


def test_a_planned_group_that_the_job_did_not_live_to_see(launch: Launch) -> None:
    launch.ask(ranks=3)
    launch.write(2, "joins", "ready", "joining")
    launch.tick()
    assert launch.table.group.members == (0, 1, 2)
    launch.watch.ends = "stopped"  # the others may come to its first step yet
    launch.tick()
    assert not launch.answer and not launch.watch.dismissed
    launch.watch.alive = {2: 2}
    launch.tick()
    assert launch.answer["event"] == "not_scaled" and launch.watch.dismissed == [2]


def test_a_change_that_was_made_before_the_last_step_is_done(launch: Launch) -> None:
    """The last beats of other nodes come with the ends of their ranks."""
    launch.ask(leave=(1,))
    Heartbeat(launch.table.fd, 0).enter_group(1)
    launch.watch.alive = {}
    launch.tick()
    assert launch.answer["event"] == "scaled" and launch.answer["left"] == [1]


def test_a_rank_can_be_lost_before_all_have_said_that_they_began(launch: Launch) -> None:
    """Beats of other nodes come late; where one has ended a step, all had begun it."""
    launch.table.clear(1)
    Heartbeat(launch.table.fd, 0).at_step(5)
    assert not launch.scaling.may_lose(0, {1}), "rank 1 may still load its data"
    launch.table.clear(0)
    rank = Heartbeat(launch.table.fd, 0)
    rank.at_step(5)
    rank.at_step(6)
    assert launch.scaling.may_lose(0, {1})


def test_the_same_ranks_form_a_group_again_where_a_connection_broke(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.launcher.scaling.LOST_S", 0.0)
    rank = Heartbeat(launch.table.fd, 0)
    for number in range(MOST_AGAIN + 2):
        rank.report_broken(number)
        launch.tick()
    assert launch.table.group == Group(MOST_AGAIN, -1, (0, 1)), "no step lay between them"
    rank.at_step(60)
    launch.tick()
    assert launch.table.group.number == MOST_AGAIN
    rank.report_broken(MOST_AGAIN)
    launch.tick()
    assert launch.table.group.number == MOST_AGAIN + 1


def test_ranks_that_broke_before_a_planned_group_come_to_no_step_with_which_it_begins(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.launcher.scaling.LOST_S", 0.0)
    rank = Heartbeat(launch.table.fd, 0)
    launch.ask(join=1)
    launch.write(2, "joins", "ready", "joining")
    launch.tick()
    assert launch.table.group.from_step == 8
    rank.report_broken(0)
    launch.tick()
    assert launch.table.group == Group(2, -1, (0, 1, 2))
    launch.tick()
    assert launch.table.group.number == 2, "they are about to enter it"


def test_a_state_that_does_not_come_is_not_waited_for_without_end(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new rank was stopped while it received the state."""
    monkeypatch.setattr(Scaling, "_takes_long", lambda self, size: True)
    launch.ask(join=1)
    launch.write(2, "joins", "ready", "joining", state_bytes=1)
    launch.tick()
    assert not launch.answer
    monkeypatch.setattr("allranks.launcher.scaling.READY_S", -1.0)
    launch.tick()
    assert "the state was not sent within" in launch.answer["report"]
    assert launch.watch.dismissed == [2] and launch.table.group.number == 0


def test_a_new_rank_with_another_file_or_too_late_is_ended(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.ask(join=1)
    launch.scaling.differs = lambda ready: "helpers.py"
    launch.write(2, "joins", "ready", "joining")
    launch.tick()
    assert "another helpers.py than the others" in launch.answer["report"]
    assert launch.watch.dismissed == [2] and launch.table.group.number == 0
    launch.ask(join=1)
    monkeypatch.setattr("allranks.launcher.scaling.READY_S", -1.0)
    launch.tick()
    assert "rank 2 was not ready" in launch.answer["report"] and READY_S > 0
    assert launch.watch.dismissed == [2, 2]


def test_a_new_rank_with_other_data_is_ended(launch: Launch) -> None:
    def write(rank: int, event: str, samples: int) -> None:
        facts = {"kind": "tensors", "samples": samples, "digest": "a"}
        with JsonLines(rank_events_path(launch.folder.path, rank), attempt=0) as events:
            events.event(event, data={"train_data": facts, "draws": {"digest": ""}})

    write(0, "data", 90)
    launch.write(0, "joins")  # the leader was lost, and is another process now
    launch.ask(join=1)
    write(2, "joining", 96)
    launch.tick()
    assert "rank 2 has other data than the others (train_data: 96" in launch.answer["report"]
    assert launch.watch.dismissed == [2] and launch.table.group.members == (0, 1)
    launch.ask(join=1)
    launch.write(2, "joins")
    write(2, "joining", 90)
    launch.tick()
    assert launch.table.group.members == (0, 1, 2)


def test_a_group_that_nobody_has_entered_is_not_replaced(launch: Launch) -> None:
    """Ranks whose collective broke wait for it; one that begins some steps later is no help."""
    launch.scaling.lost(1, Exit(1, -9, 0.0))
    launch.watch.alive.pop(1)
    launch.ask(join=1)
    launch.write(1, "joins", "ready", "joining")
    launch.tick()
    assert launch.table.group.from_step == -1 and launch.table.group.members == (0,)
    Heartbeat(launch.table.fd, 0).enter_group(1)
    launch.tick()
    assert launch.table.group.members == (0, 1) and launch.table.group.from_step >= 0


def test_whom_the_job_can_lose_meanwhile(launch: Launch) -> None:
    launch.ask(leave=(1,))
    assert launch.table.group.members == (0,) and not launch.answer
    assert launch.scaling.may_lose(1, {0}) and not launch.scaling.may_lose(0, {1})
    launch.scaling.lost(1, Exit(1, -9, 0.0))  # before it left: in the middle of a step
    launch.watch.alive.pop(1)
    launch.tick()
    assert (launch.table.group.members, launch.table.group.from_step) == ((0,), -1)
    assert not launch.answer, "rank 0 may be done before it trains alone"
    Heartbeat(launch.table.fd, 0).enter_group(2)
    launch.tick()
    assert launch.answer["event"] == "scaled" and launch.answer["left"] == [1]


def test_a_rank_that_dies_is_left_out_before_its_exit_is_told(launch: Launch) -> None:
    """One group forms for it."""
    launch.watch.dies = frozenset({1})
    launch.tick()
    launch.tick()
    assert (launch.table.group.number, launch.table.group.members) == (1, (0,))
    launch.ask(ranks=2)
    assert launch.answer["request"]["found"].startswith("rank 1 is lost, and its process has not")
    assert launch.scaling.may_lose(1, {0})
    launch.scaling.lost(1, Exit(1, -9, 0.0))
    launch.watch.alive.pop(1)
    launch.tick()
    assert launch.table.group.number == 1 and not launch.scaling._dying


def test_a_rank_that_dies_before_it_leaves_is_not_waited_for(launch: Launch) -> None:
    launch.ask(leave=(1,))
    assert launch.table.group.from_step >= 0
    launch.watch.dies = frozenset({1})
    launch.tick()
    assert (launch.table.group.members, launch.table.group.from_step) == ((0,), -1)
    Heartbeat(launch.table.fd, 0).enter_group(2)
    launch.tick()
    assert not launch.answer, "its process has not ended"
    launch.scaling.lost(1, Exit(1, -9, 0.0))
    launch.watch.alive.pop(1)
    launch.tick()
    assert launch.table.group.number == 2 and launch.answer["left"] == [1]


def test_nobody_joins_one_that_dies(launch: Launch) -> None:
    """The last rank that trained has ended meanwhile: the job is over."""
    launch.ask(join=1)
    launch.watch.dies = frozenset({1})
    launch.tick()
    launch.watch.alive.pop(0)
    launch.write(2, "joins", "ready", "joining")
    launch.tick()
    assert launch.watch.dismissed == [2] and launch.answer["report"] == "the job was done first"


def test_a_new_rank_that_dies_in_its_first_group_is_lost_alone(launch: Launch) -> None:
    launch.ask(ranks=4)
    for rank in (2, 3):
        launch.write(rank, "joins", "ready", "joining")
    launch.tick()
    launch.watch.dies = frozenset({3})
    launch.tick()
    assert launch.table.group.members == (0, 1, 2)
    for rank in range(3):
        heartbeat = Heartbeat(launch.table.fd, rank)
        heartbeat.enter_group(2)
        heartbeat.at_step(8)
    launch.tick()
    assert launch.answer["joined"] == [2] and "rank 3 ended before" in launch.answer["lost"][0]
    launch.tick()
    assert not launch.watch.dismissed, "the job says how it ended"
    launch.scaling.lost(3, Exit(3, -9, 0.0))
    launch.watch.alive.pop(3)
    launch.tick()
    assert launch.table.group.members == (0, 1, 2) and launch.table.group.number == 2


def test_the_ranks_of_a_node_that_gets_a_signal_leave_together(launch: Launch) -> None:
    """A change under way is given up for it; if too few ranks are left, the job stops."""
    launch.ask(join=1)
    launch.scaling.drained = lambda: ("SIGTERM", frozenset({0, 2}))
    launch.tick()
    assert "ranks [0, 2] leave first (SIGTERM)" in launch.answer["report"]
    assert launch.watch.dismissed == [2] and launch.table.group.number == 0
    launch.tick()
    assert launch.table.group.members == (1,) and not launch.watch.asked_to_stop
    Heartbeat(launch.table.fd, 1).enter_group(1)
    launch.watch.alive.pop(0)
    launch.tick()
    assert launch.answer["left"] == [0] and launch.answer["by"] == "SIGTERM"
    launch.scaling.drained = lambda: ("SIGUSR1", frozenset({1}))
    launch.tick()
    assert launch.watch.asked_to_stop == "SIGUSR1" and launch.table.group.number == 1


def test_the_ranks_of_a_drained_node_wait_for_a_group_that_forms(launch: Launch) -> None:
    """They leave once all ranks are in their group; meanwhile nothing is given up."""
    launch.table.form_group({0, 1})
    launch.scaling.drained = lambda: ("SIGTERM", frozenset({0}))
    for _ in range(4):
        launch.tick()
    assert not launch.answer and launch.table.group.number == 1
    for rank in (0, 1):
        Heartbeat(launch.table.fd, rank).enter_group(1)
    launch.tick()
    assert launch.table.group.members == (1,) and not launch.answer


def test_who_leaves_a_job_that_is_done_has_not_left(launch: Launch) -> None:
    launch.ask(leave=(0,))
    launch.watch.alive = {1: 1}
    launch.tick()
    assert not launch.answer
    launch.watch.alive = {}
    launch.tick()
    assert launch.answer["report"] == "the job was done first"


def test_an_answer_says_what_was_asked(launch: Launch) -> None:
    """The new rank trains, but another one was lost meanwhile."""
    launch.ask(ranks=3)
    launch.write(2, "joins", "ready", "joining")
    launch.tick()
    launch.scaling.lost(1, Exit(1, -9, 0.0))
    launch.watch.alive.pop(1)
    for rank in (0, 2):
        heartbeat = Heartbeat(launch.table.fd, rank)
        heartbeat.enter_group(2)
        heartbeat.at_step(8)
    launch.tick()
    assert (launch.answer["ranks"], launch.answer["wanted"]) == (2, 3)
    words = "2 ranks train from step 8 on, not 3, as another rank was lost: rank 2 joined"
    assert scaled_in_words(launch.answer) == words


def test_what_a_new_rank_says_is_quoted(launch: Launch) -> None:
    launch.ask(ranks=3)
    with JsonLines(rank_events_path(launch.folder.path, 2), attempt=0) as events:
        events.event("failed", kind="OSError", message="no such file: data.txt\nat line 3")
    launch.scaling.lost(2, Exit(2, 1, 0.0))
    assert ": OSError: no such file: data.txt; the other" in launch.answer["report"]


def test_a_new_rank_that_is_lost_in_its_first_group_has_not_joined(launch: Launch) -> None:
    launch.ask(ranks=3)
    launch.write(2, "joins", "ready", "joining")
    launch.tick()
    Heartbeat(launch.table.fd, 0).enter_group(1)
    with JsonLines(rank_events_path(launch.folder.path, 2), attempt=0) as events:
        events.event("failed", kind="ReplicasDiffer", message="another state")
    launch.scaling.lost(2, Exit(2, 1, 0.0))
    launch.watch.alive.pop(2)
    launch.tick()
    report = "rank 2 ended before it had joined: ReplicasDiffer: another state"
    assert launch.answer["report"] == f"{report}; the other ranks train on"
    assert (launch.table.group.members, launch.table.group.from_step) == ((0, 1), -1)


# --- a job that runs -----------------------------------------------------------------------------

STEPS = 300


@dataclass
class Changing:
    """A job of two ranks, and the commands that change it, one when the one before is answered."""

    server: ForkServer
    folder: Path
    program: Path
    commands: list[tuple[str, ...]]
    job: dict[str, Any]
    fields: tuple[str, ...] = ()
    answers: list[tuple[int, str, str]] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    _process: subprocess.Popen[str] | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def run(self) -> Result:
        """Train to the end; its steps hurry once all commands are answered."""
        hurry = self.folder / "hurry"
        flags = {"strategy": "ddp", "ranks": 2, "elastic": "1:4", "bitwise": True, "steps": STEPS}
        flags |= {"run_dir": str(self.run_dir), "first_check": "off", **self.job}
        try:
            return run_job(
                resolve(str(self.program), flags, (f"hurry={hurry}", *self.fields)),
                self.server,
                JobWatcher(tick=self._tick),
            )
        finally:
            if self._process is not None:
                self._process.communicate()

    def _tick(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            out, err = self._process.communicate()
            self.answers.append((self._process.returncode, out, err))
            self._process = None
        if not self.commands:
            (self.folder / "hurry").touch()
        elif len(list(read_rows(self.run_dir / "metrics.jsonl"))) > 3:
            self.before()
            verb, *words = self.commands.pop(0)
            command = [sys.executable, "-m", "allranks.cli.main", verb, str(self.run_dir), *words]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Those of this name of all processes, in order of time."""
        files = self.run_dir.glob("events*.jsonl")
        rows = [row for file in files for row in read_rows(file) if row["event"] == name]
        return sorted(rows, key=lambda row: float(row["time"]))


Change = Callable[..., Changing]


@pytest.fixture
def changing(server: ForkServer, tmp_path: Path) -> Change:
    """`changing(command, …, **job)`: a job that these commands change while it runs."""
    program = tmp_path / "scale_tasks.py"
    shutil.copy(TASKS / "scale_tasks.py", program)

    def make(*commands: tuple[str, ...], **job: Any) -> Changing:
        return Changing(server, tmp_path, program, list(commands), job)

    return make


@pytest.fixture(scope="module")
def alone(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same training in one process."""
    flags = {"run_dir": str(tmp_path_factory.mktemp("alone") / "run"), "bitwise": True}
    job = resolve(str(TASKS / "scale_tasks.py"), {**flags, "steps": STEPS}, ())
    return str(run_job(job, server).summary["weights_sha256"])


def check_undisturbed(job: Changing, result: Result, alone: str) -> None:
    """The same bits, each step recorded once, and nothing left in the folder."""
    assert result.summary["weights_sha256"] == alone
    assert [row["step"] for row in read_rows(job.run_dir / "metrics.jsonl")] == [*range(STEPS)]
    hidden = {path.name for path in job.run_dir.glob(".*")}
    assert hidden == {".lock"}


@pytest.mark.slow
def test_ranks_join_and_leave_while_a_job_trains(changing: Change, alone: str) -> None:
    """2 ranks, 4, 3, where the leader leaves, and 4 again, by a process in its place."""
    job = changing(("scale", "--ranks", "4"), ("scale", "--leave", "0"), ("join", "--json"))
    job.job |= {"checkpoint_every": 7, "eval_every": "10"}
    result = job.run()
    assert [(code, err) for code, _, err in job.answers] == [(0, "")] * 3, job.answers
    assert job.answers[0][1].endswith(" on: ranks 2, 3 joined\n")
    assert job.answers[1][1].startswith("3 ranks train from step ")
    assert json.loads(job.answers[2][1])["members"] == [0, 1, 2, 3]
    check_undisturbed(job, result, alone)
    assert [row["step"] for row in job.events("evaluated")] == [*range(10, STEPS + 1, 10)]
    groups = [(row["members"], row["joined"]) for row in job.events("group")]
    assert groups == [([0, 1, 2, 3], [2, 3]), ([1, 2, 3], []), ([0, 1, 2, 3], [0])]
    assert len(job.events("left")) == 1 and len(job.events("joins")) == 3
    assert not job.events("worker_lost") and result.summary["world_size"] == 4
    timeline = timeline_of(read_run(job.run_dir, "run"))
    trained = [span for span in timeline.spans if span.phase == TRAINING]
    lanes = {rank: [s for s in trained if s.rank == rank] for rank in range(4)}
    assert [len(lane) for lane in lanes.values()] == [2, 1, 1, 1]
    (first, again), (whole,), (later, _) = lanes[0], lanes[1], (*lanes[2], *lanes[3])
    assert whole.start_s < later.start_s < first.end_s < again.start_s < whole.end_s
    assert read_run(job.run_dir, "run").summary["weights_sha256"] == alone


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_parts_of_the_state_are_saved_before_ranks_join_and_leave(
    changing: Change, alone: str, dies: bool
) -> None:
    """No step is made again, unless a rank dies in that save: then those since the last one."""
    inject = "kill@rank=1,at=save:half,step=-1" if dies else ""
    commands = [("scale", "--ranks", "3"), *([] if dies else [("scale", "--leave", "0")])]
    job = changing(*commands, strategy="zero2", checkpoint_every=STEPS, inject=inject)
    result = job.run()
    check_undisturbed(job, result, alone)
    groups = [(row["members"], row["steps_again"] > 0) for row in job.events("group")]
    assert groups == ([([0, 2], True)] if dies else [([0, 1, 2], False), ([1, 2], False)])
    assert (result.summary["steps_again"] > 0) == dies


@pytest.mark.slow
@pytest.mark.parametrize(("at", "ranks"), [("start", 2), ("regroup", 3)])
def test_a_new_rank_that_dies_harms_nobody(
    changing: Change, alone: str, at: str, ranks: int
) -> None:
    """Before it is ready nothing happens to the others; as the group forms, they form another."""
    job = changing(("scale", "--ranks", "4"), inject=f"kill@rank=3,at={at}")
    result = job.run()
    ((code, out, err),) = job.answers
    check_undisturbed(job, result, alone)
    assert result.summary["world_size"] == ranks
    if at == "start":
        assert code == 1 and "rank 3 ended before it had joined: see " in err
        assert not job.events("group") and not job.events("scaled")
    else:
        assert (code, out) == (1, "") and "3 ranks train from step " in err
        assert " on, not 4, as rank 3 ended before it had joined: see " in err
        assert err.endswith(": rank 2 joined\n")
    assert [row["rank"] for row in job.events("worker_lost")] == [3]


@pytest.mark.slow
def test_the_others_train_while_a_rank_dies(
    changing: Change, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write its core for minutes; here it is stopped, and ends when the others train."""
    job, ticket = changing(), list[int]()
    monkeypatch.setattr(job.server, "dying", lambda: set(ticket))

    def tick() -> None:
        pids = job.server._pids
        if not ticket and len(list(read_rows(job.run_dir / "metrics.jsonl"))) > 3:
            ticket.append(max(pids))
            os.kill(pids[ticket[0]], signal.SIGSTOP)
        elif job.events("group") and not job.events("worker_lost"):
            (job.folder / "hurry").touch()
            os.kill(pids[ticket[0]], signal.SIGKILL)

    monkeypatch.setattr(job, "_tick", tick)
    check_undisturbed(job, job.run(), alone)
    assert [row["members"] for row in job.events("group")] == [[0]]
    assert [(row["rank"], row["exit"]) for row in job.events("worker_lost")] == [(1, -9)]


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher takes it that any state takes longer than a step."""
    monkeypatch.setattr(Scaling, "_takes_long", lambda self, size: size > 0)


@pytest.mark.parametrize("carries_all", [True, False])
def test_a_stream_ends_where_the_link_carries_gradients_alone(
    monkeypatch: pytest.MonkeyPatch, carries_all: bool
) -> None:
    """Such a link sends one packet while a step waits, and never comes to send another part."""
    model, said = nn.Linear(2, 2), list[str]()
    state = {"model": model.state_dict(), "optimizer": {"state": {}}}
    step = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=1), before_update=None)
    strategy: Any = SimpleNamespace(model=model, step=step, state=lambda: state)
    thread = SimpleNamespace(Thread=lambda **arguments: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(state_stream, "threading", thread)
    monkeypatch.setattr(state_stream, "LEAST_BYTES", 1)
    say: Any = lambda event, cause: said.append(cause)  # noqa: E731
    sending = state_stream.Sending(strategy, World(0, 2), "", Stream(1, 0, (2,)), say)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda s: sending._packets.task_done())
    monkeypatch.setattr(state_stream, "time", clock)
    sending._at, sending._is_connected = 0.0, True
    for number in range(10 * state_stream.MOST_STEPS):
        sending._before_update()
        sending.after_step(number)
        while carries_all and sending._packets.unfinished_tasks:
            sending._packets.task_done()
    if carries_all:
        assert sending._next == 2 and not said
    else:
        assert sending._next < 2 and said == ["the link is slower than the steps"]


@pytest.mark.slow
@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_state_is_sent_while_the_others_train(changing: Change, alone: str, ranks: int) -> None:
    job = changing(("scale", "--ranks", str(ranks)), ("scale", "--leave", "0"), ("join",))
    job.fields = ("ema=0.9",)
    result = job.run()
    assert [(code, err) for code, _, err in job.answers] == [(0, "")] * 3, job.answers
    check_undisturbed(job, result, alone)
    assert [row["cause"] for row in job.events("streamed")] == [""] * (ranks - 1)
    streamed = [(row["joined"], row.get("streamed", False)) for row in job.events("group")]
    assert streamed == [([*range(2, ranks)], True), ([], False), ([0], True)]


@pytest.mark.slow
@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("fault", ["sends", "receives", "of all"])
def test_where_a_stream_breaks_all_of_the_state_is_sent_at_the_boundary(
    changing: Change, server: ForkServer, alone: str, fault: str
) -> None:
    """One of its two ranks dies; or the updates of some parameters alone are others."""
    job = changing(("join",))
    job.fields = (f"fault={fault}",)
    result = job.run()
    ((code, _, err),) = job.answers
    if fault == "of all":
        flags = {"run_dir": str(job.folder / "alone"), "bitwise": True, "steps": STEPS}
        flags |= {"first_check": "off"}
        alone = str(
            run_job(resolve(str(job.program), flags, job.fields), server).summary["weights_sha256"]
        )
    check_undisturbed(job, result, alone)
    causes = [row["cause"] for row in job.events("streamed")]
    assert not any(row.get("streamed") for row in job.events("group"))
    if fault == "receives":
        assert code == 1 and "rank 2 ended before it had joined" in err and not causes
    else:
        assert code == (1 if fault == "sends" else 0) and err.count("rank 2 joined") == code, err
        says = {"sends": "", "of all": "the updates of this rank came to another state"}[fault]
        assert says in causes[-1] and causes[-1]
        assert job.events("group")[-1]["joined"] == [2]


OTHER = "ReplicasDiffer: this rank holds another state than it was sent; first in "
FAULTS = {
    "a moment": ("ddp", False, "moment", f"{OTHER}exp_avg of 0.weight, in the optimizer"),
    "a buffer": ("zero1", True, "buffer", f"{OTHER}1.running_mean"),
    "an error, from a checkpoint": ("zero2", False, "raises", "ProgramError: its state cannot be"),
    "a refusal": ("ddp", False, "refuses", "another one"),
    "its end": ("ddp", False, "dies", "see "),
    "its counter": ("ddp", False, "counts", "its attribute steps, which each step changes"),
}


@pytest.mark.slow(most=2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_new_rank_that_goes_wrong_leaves_alone(changing: Change, alone: str, name: str) -> None:
    """The others go on from that boundary; no step is made again."""
    strategy, has_copies, fault, says = FAULTS[name]
    job = changing(("join",), strategy=strategy, spare_state=has_copies)
    job.fields = (f"fault={fault}",)
    result = job.run()
    ((code, out, err),) = job.answers
    assert (code, out) == (1, "") and f"rank 2 ended before it had joined: {says}" in err
    check_undisturbed(job, result, alone)
    assert result.summary["world_size"] == 2 and len(job.events("not_scaled")) == 1
    assert [row["rank"] for row in job.events("worker_lost")] == [2]
    groups = [(row["members"], row["joined"], row["steps_again"]) for row in job.events("group")]
    assert groups == ([] if fault == "counts" else [([0, 1], [], 0)])


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("odd", [0, 3])
def test_a_sound_rank_stays_and_a_refused_one_may_be_the_first(
    changing: Change, alone: str, odd: int
) -> None:
    """Rank 0 has left, and would lead; rank 3 joins with rank 2, which is as it was sent."""
    leaves = [("scale", "--leave", "0")] if odd == 0 else []
    job = changing(*leaves, ("scale", "--ranks", "2" if odd == 0 else "4"))
    job.fields = ("fault=moment", f"odd={odd}")
    result = job.run()
    code, _, err = job.answers[-1]
    assert code == 1 and f"rank {odd} ended before it had joined: {OTHER}" in err
    check_undisturbed(job, result, alone)
    members = job.events("group")[-1]["members"]
    assert members == ([1] if odd == 0 else [0, 1, 2])
    assert job.events("group")[-1]["joined"] == ([] if odd == 0 else [2])
    if odd == 3:
        assert err.endswith("in the optimizer: rank 2 joined\n"), err


@pytest.mark.slow
def test_a_new_rank_of_another_program_is_refused(changing: Change, alone: str) -> None:
    job = changing(("join",))

    def edit() -> None:
        with open(job.program, "a") as file:
            file.write("# another program\n")

    job.before = edit
    result = job.run()
    ((code, _, err),) = job.answers
    assert code == 2 and f"found: {job.program} is not as the ranks have loaded it" in err
    assert all(part in err for part in ("asked: ", "why:   ", "do:    "))
    check_undisturbed(job, result, alone)
    assert result.summary["world_size"] == 2 and not job.events("joins")


@pytest.mark.parametrize(
    ("job", "last", "words", "says"),
    [
        (None, "", ["--ranks", "3"], "no job.toml in it"),
        ("", "attempt", ["--ranks", "3"], "RUN --elastic 1:8"),
        ("2:4", "done", ["--ranks", "3"], "a run that is over: done"),
        ("2:4", "done", ["--ranks", "3"], "start another job with --elastic"),
        ("2:4", "stopped", ["--ranks", "3"], "start another job with --elastic"),
        ("2:4", "attempt", ["--ranks", "5"], "--elastic 2:4"),
        ("2:4", "attempt", ["--ranks", "1"], "--elastic 2:4"),
        ("2:4", "attempt", ["--ranks", "3"], "a launcher that does not answer"),
        ("2:4", "attempt", [], "neither --ranks nor --leave"),
        ("2:4", "attempt", ["--ranks", "3", "--leave", "0"], "both --ranks and --leave"),
    ],
)
def test_bad_requests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str | None,
    last: str,
    words: list[str],
    says: str,
) -> None:
    run = tmp_path / "run"
    with closing(RunFolder(run)) as folder:
        if job is not None:
            (run / "job.toml").write_text(f'program = "digits"\nranks = 2\nelastic = "{job}"\n')
        if last:
            folder.events.event(last)
    monkeypatch.setattr(runs, "NOTICE_S", 0.0)
    result = CliRunner().invoke(runs.scale, [str(run), *words])
    says = says.replace("RUN", str(run))
    assert isinstance(result.exception, RequestError) and says in str(result.exception)
    assert not list(run.glob(".scale*"))


def test_only_what_can_be_resumed_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is done has no steps left, with a checkpoint or without."""
    monkeypatch.setattr(runs, "how_to_resume", lambda run: "its last checkpoint is that of step 2")
    for last, says in (("stopped", "resume it on M ranks"), ("done", "start another job")):
        run = tmp_path / last
        with closing(RunFolder(run)) as folder:
            (run / "job.toml").write_text('program = "digits"\nranks = 2\nelastic = "2:4"\n')
            folder.events.event(last)
        result = CliRunner().invoke(runs.scale, [str(run), "--ranks", "3"])
        assert f"do:    {says}" in str(result.exception)


def test_a_request_that_is_gone_is_answered_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that has read it says so, and is waited for."""
    monkeypatch.setattr(runs, "NOTICE_S", 0.05)
    monkeypatch.setattr(runs, "POLL_S", 0.01)
    request = ScaleRequest.new(ranks=3)
    with pytest.raises(RequestError, match="the request is no longer there"):
        runs._wait(tmp_path, request)
    with JsonLines(tmp_path / "events.jsonl") as events:
        events.event(READ, number=request.number)
        later = threading.Timer(0.3, events.event, ("scaled",), {"number": request.number})
        later.start()
        assert runs._wait(tmp_path, request)["event"] == "scaled"
        later.join()
