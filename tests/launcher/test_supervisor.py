"""The supervisor owns its ranks: however one of them, it or the fork server ends, none is left."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.errors import PlaceError, RequestError
from allranks.launcher.fault_report import first_fault, user_error
from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Exit, Process, ProcessState
from allranks.launcher.supervisor import Ended, RankWatch, WatchPolicy, supervise
from allranks.strategies.resolve import strategy_spec
from launch_workers import read_pid, write_pid

PATIENCE_S = 120
SOON_S = 30  # on a loaded machine; what is left behind would stay for ten minutes
SUPERVISOR = """
import json, signal, sys
from pathlib import Path
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise
folder, targets = sys.argv[1], sys.argv[2:]
signal.signal(signal.SIGINT, signal.SIG_IGN)  # given back after supervising: no race with its end
with ForkServer(("launch_workers",)) as server:
    ended = supervise(server, [
        Process(rank, f"launch_workers:{target}", folder, {"RANK": str(rank)},
                Path(folder, f"{rank}.log"))
        for rank, target in enumerate(targets)
    ])
codes = {rank: exit_.code for rank, exit_ in ended.exits.items()}
print(json.dumps([codes, sorted(ended.stopped), ended.interrupted]))
"""


@pytest.fixture
def ranks_server() -> Iterator[ForkServer]:
    """A fork server without a framework: it starts in no time."""
    with ForkServer(("launch_workers",)) as server:
        yield server


def processes(folder: Path, *targets: str) -> list[Process]:
    return [
        Process(
            rank,
            f"launch_workers:{target}",
            str(folder),
            {"RANK": str(rank)},
            folder / f"{rank}.log",
        )
        for rank, target in enumerate(targets)
    ]


def codes(ended: Ended) -> dict[int, int]:
    return {rank: exit_.code for rank, exit_ in ended.exits.items()}


def is_alive(pid: int) -> bool:
    """Whether the process runs: one that is dead and waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(*pids: int) -> None:
    deadline = time.monotonic() + SOON_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"left behind: {alive} of {pids}")
        time.sleep(0.01)


# --- how ranks end --------------------------------------------------------------------------


def test_ranks_that_end_well(ranks_server: ForkServer, tmp_path: Path) -> None:
    ended = supervise(ranks_server, processes(tmp_path, "ends_well", "prints_who_it_is"))
    assert codes(ended) == {0: 0, 1: 0}
    assert (ended.stopped, ended.interrupted) == (frozenset(), False)
    lines = (tmp_path / "1.log").read_bytes().splitlines()
    assert sorted(lines) == sorted(
        [f"1 {os.getcwd()} SIG_DFL".encode(), b"to standard error", b"raw \xff"]
    )


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("target", "code"), [("raises", 1), ("is_killed", -signal.SIGKILL), ("leaves_with_three", 3)]
)
def test_a_rank_that_fails_stops_the_others(
    ranks_server: ForkServer, tmp_path: Path, target: str, code: int
) -> None:
    ended = supervise(ranks_server, processes(tmp_path, "waits", "waits", target))
    assert codes(ended) == {0: -signal.SIGTERM, 1: -signal.SIGTERM, 2: code}
    assert ended.stopped == {0, 1} and not ended.interrupted
    first, last = ended.exits[2].monotonic, max(e.monotonic for e in ended.exits.values())
    assert first <= last < first + SOON_S
    assert_gone(*pids_of(tmp_path, "waiting-0", "waiting-1"))
    if target == "raises":
        assert "ValueError: on purpose" in (tmp_path / "2.log").read_text()


def test_a_rank_that_ignores_terminate_is_killed(ranks_server: ForkServer, tmp_path: Path) -> None:
    ended = supervise(ranks_server, processes(tmp_path, "ignores_terminate", "raises"))
    assert codes(ended) == {0: -signal.SIGKILL, 1: 1}


def test_a_rank_that_stands_still_is_ended_too(ranks_server: ForkServer, tmp_path: Path) -> None:
    ended = supervise(ranks_server, processes(tmp_path, "stands_still", "raises"))
    assert codes(ended)[1] == 1 and ended.stopped == {0}
    assert_gone(read_pid(tmp_path, "waiting-0"))


def test_what_is_left_of_a_dead_ranks_group_is_gone_before_the_others_are(
    ranks_server: ForkServer, tmp_path: Path
) -> None:
    """A loader worker of a dead rank would hold its memory and its files while the rest goes on."""
    for process in processes(tmp_path, "leaves_a_child", "ends_when_told"):
        ranks_server.spawn(process)
    first = None
    while first is None:
        first = next(iter(ranks_server.exits(PATIENCE_S)), None)
    assert (first.ticket, first.code) == (0, 0)
    child, waiting = read_pid(tmp_path, "child"), read_pid(tmp_path, "waiting-1")
    try:
        assert_gone(child)
        assert is_alive(waiting)
    finally:
        write_pid(str(tmp_path), "go", waiting)
    while not ranks_server.exits(PATIENCE_S):
        pass


# --- processes with roles -------------------------------------------------------------------


def test_one_that_can_be_spared_stops_nobody_and_servants_end_with_their_leader(
    ranks_server: ForkServer, tmp_path: Path
) -> None:
    """Rank 1 is killed and done without; rank 2 would wait for ever, but only serves rank 0."""
    heard = []

    def on_lost(rank: int, exit_: Exit) -> None:
        heard.append((rank, exit_.code))
        write_pid(str(tmp_path), "go", 0)

    with closing(HeartbeatTable(3)) as heartbeats:
        policy = WatchPolicy(
            heartbeats,
            ended_well=lambda rank: rank == 0,
            may_lose=lambda rank, left: rank == 1 and left == {0, 2},
            on_lost=on_lost,
            helpers=frozenset({1, 2}),
        )
        targets = ("ends_when_told", "is_killed", "waits")
        ended = supervise(ranks_server, processes(tmp_path, *targets), policy=policy)
    assert heard == [(1, -signal.SIGKILL)] and ended.spared == {1}
    assert codes(ended) == {0: 0, 1: -signal.SIGKILL, 2: -signal.SIGKILL}
    assert ended.stopped == {2}
    (tmp_path / "events-0.jsonl").write_text('{"event": "done"}\n')
    assert first_fault(ended, tmp_path, must_say_so=True) is None


def test_the_last_of_its_role_is_a_fault_that_is_called_by_its_name(
    ranks_server: ForkServer, tmp_path: Path
) -> None:
    process_set = strategy_spec("parameter-server", 1).process_set
    named = [
        dataclasses.replace(process, name=process_set.name_of(process.rank))
        for process in processes(tmp_path, "waits", "is_killed", "waits")
    ]
    with closing(HeartbeatTable(3)) as heartbeats:
        policy = WatchPolicy(
            heartbeats, may_lose=process_set.survives_loss_of, helpers=process_set.helpers
        )
        ended = supervise(ranks_server, named, policy=policy)
    assert ended.spared == frozenset() and ended.stopped == {0, 2}
    (tmp_path / "logs").mkdir()
    fault = first_fault(ended, tmp_path, must_say_so=True)
    assert fault is not None
    assert str(user_error(fault, ended, tmp_path)).startswith("worker (rank 1) on ")


@dataclasses.dataclass
class LostNode:
    """Owns processes of which rank 1 is on a node that is lost at once;
    the others end when told."""

    alive: list[int] = dataclasses.field(default_factory=list)
    ended: list[Exit] = dataclasses.field(default_factory=list)

    def spawn(self, process: Process, heartbeats: HeartbeatTable | None = None) -> int:
        self.alive.append(process.rank)
        if process.rank == 1:
            self._end(1, lost="no word of it")
        return process.rank

    def _end(self, rank: int, lost: str = "") -> None:
        self.ended.append(Exit(rank, -signal.SIGKILL, time.monotonic(), lost=lost))

    def exits(self, timeout_s: float) -> list[Exit]:
        ended, self.ended = self.ended, []
        return ended

    def signal(self, ticket: int, number: int) -> None:
        if number == signal.SIGKILL:
            self._end(ticket)

    def started(self, ticket: int) -> bool:
        return True

    def stands(self, tickets: Mapping[int, int]) -> dict[int, ProcessState]:
        return {}

    def wake(self) -> None:
        pass

    def is_silent(self) -> bool:
        return False

    def messages(self) -> list[int]:
        return []

    def stop_reason(self) -> str:
        return ""


def test_a_process_that_has_just_begun_does_not_stand_still(tmp_path: Path) -> None:
    """It has not beaten yet, and the one that had its number before did so long ago."""
    (process,) = processes(tmp_path, "waits")
    with closing(HeartbeatTable(1)) as heartbeats:
        watch = RankWatch(LostNode(), WatchPolicy(heartbeats, hang_timeout_s=60))
        watch.awake_since -= 1000
        row = heartbeats.row(0)
        heartbeats.put_row(0, row, clock_ahead_s=500)
        watch.start(process)
        watch.look_for_a_hang()
        assert watch.hang is None
        heartbeats.put_row(0, row, clock_ahead_s=500)
        watch.look_for_a_hang()
        assert watch.hang is not None


def test_who_is_lost_with_its_node_is_not_spared(tmp_path: Path) -> None:
    """The others would wait for its answer: nobody tells them that none will come."""
    with closing(HeartbeatTable(3)) as heartbeats:
        policy = WatchPolicy(heartbeats, may_lose=lambda rank, remaining: True)
        ended = supervise(LostNode(), processes(tmp_path, "waits", "waits", "waits"), policy=policy)
    assert ended.spared == frozenset() and ended.stopped == {0, 2}


def test_a_leader_that_leaves_without_a_word_leaves_no_servants(
    ranks_server: ForkServer, tmp_path: Path
) -> None:
    write_pid(str(tmp_path), "go", 0)
    with closing(HeartbeatTable(2)) as heartbeats:
        policy = WatchPolicy(heartbeats, helpers=frozenset({1}))
        ended = supervise(
            ranks_server, processes(tmp_path, "ends_when_told", "waits"), policy=policy
        )
    assert codes(ended) == {0: 0, 1: -signal.SIGKILL}
    fault = first_fault(ended, tmp_path, must_say_so=True)
    assert fault is not None and fault.rank == 0


# --- nothing is left ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["leaves_a_child", "leaves_a_session"])
def test_what_a_rank_left_behind_is_ended(
    ranks_server: ForkServer, tmp_path: Path, target: str
) -> None:
    ended = supervise(ranks_server, processes(tmp_path, target))
    assert not Path(f"/proc/{read_pid(tmp_path, 'child')}").exists(), "nor a zombie, at once"
    assert codes(ended) == {0: 0}


def test_what_the_orphans_left_behind_is_ended(ranks_server: ForkServer, tmp_path: Path) -> None:
    supervise(ranks_server, processes(tmp_path, "leaves_a_chain"))
    for name in ("outer", "inner"):
        assert not Path(f"/proc/{read_pid(tmp_path, name)}").exists(), "nor a zombie, at once"


def test_an_error_of_the_watcher_leaves_no_rank(ranks_server: ForkServer, tmp_path: Path) -> None:
    """Who shows the progress may fail, as when standard error was closed."""

    def fails() -> None:
        read_pid(tmp_path, "waiting-0")
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        supervise(ranks_server, processes(tmp_path, "waits"), fails)
    assert_gone(read_pid(tmp_path, "waiting-0"))


# --- the end of the fork server -------------------------------------------------------------


def test_the_fork_server_is_killed(ranks_server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="the fork server ended with code -9"):
        supervise(ranks_server, processes(tmp_path, "waits", "kills_the_server"))
    assert_gone(*(read_pid(tmp_path, name) for name in ("waiting-0", "killer", "server")))


def test_a_module_that_does_not_import(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        ForkServer(("nowhere_at_all",)) as server,
        pytest.raises(PlaceError, match="the fork server ended with code 1: its own message"),
    ):
        supervise(server, processes(tmp_path, "ends_well"))
    assert "No module named 'nowhere_at_all'" in capfd.readouterr().err


def test_the_fork_server_takes_nothing_apart_when_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework needs more than a second for that, and whoever waits for it too.

    A name that cannot be imported from a user's file is left to the ranks.
    """
    (tmp_path / "does_not_leave.py").write_text(
        "import atexit, os\natexit.register(os.kill, os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    names = "nowhere_at_all:Name", "launch_workers:no_such_name"
    with ForkServer(("launch_workers", *names, "does_not_leave")) as server:
        assert codes(supervise(server, processes(tmp_path, "ends_well"))) == {0: 0}
    assert server._process.returncode == 0


def test_a_module_of_the_ranks_that_does_not_import(
    ranks_server: ForkServer, tmp_path: Path
) -> None:
    process = Process(0, "nowhere_at_all:main", None, {}, tmp_path / "0.log")
    assert codes(supervise(ranks_server, [process])) == {0: 1}
    assert "No module named 'nowhere_at_all'" in (tmp_path / "0.log").read_text()


def test_closing_ends_what_runs_and_what_it_started(tmp_path: Path) -> None:
    with ForkServer(("launch_workers",)) as server:
        (process,) = processes(tmp_path, "waits_with_a_chain")
        server.spawn(process)
        names = ("waiting-0", "server", "outer", "inner")
        pids = [read_pid(tmp_path, name) for name in names]
    assert_gone(*pids)


def test_a_job_that_is_too_large_to_send_is_refused_and_the_server_goes_on(
    ranks_server: ForkServer, tmp_path: Path
) -> None:
    large = Process(0, "launch_workers:counts", "x" * 2**20, {}, tmp_path / "0.log")
    with pytest.raises(RequestError):
        supervise(ranks_server, [large])
    assert codes(supervise(ranks_server, processes(tmp_path, "ends_well"))) == {0: 0}


# --- the end of the supervisor --------------------------------------------------------------


@contextmanager
def supervisor(folder: Path, *targets: str) -> Iterator[subprocess.Popen[str]]:
    """A supervisor in a process group of its own."""
    command = [sys.executable, "-c", SUPERVISOR, str(folder), *targets]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def pids_of(folder: Path, *names: str) -> list[int]:
    return [read_pid(folder, name) for name in names]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupt_stops_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    with supervisor(tmp_path, "waits", "waits") as process:
        pids = pids_of(tmp_path, "waiting-0", "waiting-1", "server")
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out) == [{"0": -15, "1": -15}, [0, 1], True]
    assert_gone(*pids)


@pytest.mark.slow
def test_an_impatient_user_stops_every_rank_too(tmp_path: Path) -> None:
    """Ctrl-C again and again, while ranks are being stopped: none is forgotten, none is left."""
    with supervisor(tmp_path, "waits", "ignores_terminate", "waits") as process:
        pids = pids_of(tmp_path, "waiting-0", "waiting-1", "waiting-2", "server")
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.0005)
        process.kill()
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out) == [{"0": -15, "1": -9, "2": -15}, [0, 1, 2], True]
    assert_gone(*pids)


def test_a_supervisor_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with supervisor(tmp_path, "waits_with_a_chain", "ignores_terminate") as process:
        pids = pids_of(tmp_path, "waiting-0", "waiting-1", "server", "outer", "inner")
        assert all(is_alive(pid) for pid in pids)
        process.kill()
    assert_gone(*pids)


def test_the_others_go_on_without_a_rank_that_dies_if_the_job_can_lose_it() -> None:
    """Of those that die one has ended well, and the error of another would come again."""
    remaining = set[frozenset[int]]()

    def may_lose(rank: int, ranks: Collection[int]) -> bool:
        remaining.add(frozenset(ranks))
        return rank != 3

    server: Any = SimpleNamespace(dying=lambda: {10, 12, 13, 14, 99})
    lost = list[int]()
    policy = WatchPolicy(
        ended_well=lambda rank: rank == 2,
        may_lose=may_lose,
        on_lost=lambda rank, exit_: lost.append(rank),
    )
    watch = RankWatch(server, policy)
    watch.alive = {10: 0, 11: 1, 12: 2, 13: 3, 14: 4}
    assert not watch.look_for_the_dying({1})
    assert watch.look_for_the_dying({0, 1, 2, 3}) == watch.dying == {0}
    assert remaining == {frozenset({1})} and not watch.look_for_the_dying({0})
    watch.stopped = frozenset({0, 1, 4})  # as another has failed since
    assert not watch.look_for_the_dying({4})
    assert watch.stops_others_after_s(0, Exit(10, -9, 0.0)) == float("inf")
    assert (lost, watch.spared, watch.dying) == ([0], {0}, set())
