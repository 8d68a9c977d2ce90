"""Kills: at every named point of a save, and at random times. What was committed is never lost."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.folder import committed, uncommitted
from allranks.checkpoint.format import About
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise
from allranks.torch.checkpoint.saving import TorchCheckpointer
from allranks.torch.comm.comm import Comm
from checkpoint_workers import LEADER_POINTS, POINTS, check, own, state

WATCHED_S = 0.03
PATIENCE_S = 200


@pytest.fixture(scope="module")
def savers() -> Iterator[ForkServer]:
    """A fork server that has imported the workers too: a kill costs tens of milliseconds."""
    with ForkServer(("checkpoint_workers", "allranks.torch.preload")) as running:
        yield running


def processes(ranks: int, name: str, argument: Any, folder: Path, store: str) -> list[Process]:
    found = []
    for rank in range(ranks):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "ALLRANKS_STORE": str(folder / store) if ranks > 1 else "",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        target = f"checkpoint_workers:{name}"
        found.append(Process(rank, target, argument, variables, folder / f"{rank}.log"))
    return found


@pytest.mark.slow(but=1, most=7)
@pytest.mark.thinned(
    1,
    ("blocking", [True, False]),
    (
        "point,rank",
        [*((point, rank) for point in POINTS for rank in (0, 1)), *((p, 0) for p in LEADER_POINTS)],
    ),
)
def test_a_kill_at_any_point(
    savers: ForkServer, tmp_path: Path, point: str, rank: int, blocking: bool
) -> None:
    folder = tmp_path / "checkpoints"
    argument = {"folder": str(folder), "point": point, "rank": rank, "blocking": blocking}
    ended = supervise(savers, processes(2, "dies_at", argument, tmp_path, "store"))
    assert ended.exits[rank].code == -signal.SIGKILL
    assert ended.exits[1 - rank].code == 0, (tmp_path / f"{1 - rank}.log").read_text()
    told: list[str] = []
    again = TorchCheckpointer(
        folder, Comm(), attempt=1, report=lambda event, **values: told.append(event)
    )
    loaded = again.load([folder])
    assert loaded is not None
    assert loaded.step == (2 if point in ("save:committed", "save:prune") else 1)
    check(loaded, 0, has_own=False)
    assert told == [], "a kill makes no checkpoint bad"
    assert uncommitted(folder) == [], "what was begun is swept away"
    again.save(3, state(3), own(3, 0), About(), blocking=True)
    assert again.wait() and len(committed(folder)) == len(list(folder.iterdir()))


class Life:
    """Processes that save all the time, killed and started again; `stands` is the last told."""

    def __init__(self, server: ForkServer, folder: Path, ranks: int, blocking: bool) -> None:
        self.server, self.folder, self.ranks, self.blocking = server, folder, ranks, blocking
        self.stands = 0
        self.loads: list[int] = []
        self.saves = 0
        os.mkfifo(folder / "pipe")
        self._pipe = os.open(folder / "pipe", os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""

    def start(self, attempt: int) -> list[int]:
        argument = {
            "folder": str(self.folder / "checkpoints"),
            "pipe": str(self.folder / "pipe"),
            "attempt": attempt,
            "blocking": self.blocking,
        }
        started = processes(self.ranks, "saves_for_ever", argument, self.folder, f"store-{attempt}")
        return [self.server.spawn(process) for process in started]

    def hear(self, timeout_s: float) -> None:
        """What the processes told until now; waits for the first word."""
        if not select.select([self._pipe], [], [], timeout_s)[0]:
            return
        *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 16)).split(b"\n")
        for event, step, *problems in (line.decode().split(" ", 2) for line in lines):
            assert event in ("loaded", "checkpoint"), (event, step, problems)
            if event == "loaded":
                assert int(step) >= self.stands, "a committed checkpoint was lost"
                self.loads.append(int(step))
            self.saves += event == "checkpoint"
            self.stands = int(step)

    def until_saved(self, saves: int) -> None:
        """Until the processes have loaded what was there, and told of some checkpoints."""
        loads, saves = len(self.loads) + 1, self.saves + saves
        deadline = time.monotonic() + PATIENCE_S
        while len(self.loads) < loads or self.saves < saves:
            assert time.monotonic() < deadline, self.logs()
            self.hear(0.1)

    def kill(self, tickets: list[int], ranks: list[int], after_s: float) -> None:
        """Kill some ranks after a time; the others find out. Returns when all are gone."""
        codes: dict[int, int] = {}
        until = time.monotonic() + after_s
        while (left := until - time.monotonic()) > 0:
            self.hear(left)
        for rank in ranks:
            self.server.signal(tickets[rank], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while len(codes) < len(tickets):
            assert time.monotonic() < deadline, self.logs()
            codes |= {ended.ticket: ended.code for ended in self.server.exits(1.0)}
        self.hear(0.0)
        found = [codes[ticket] for ticket in tickets]
        assert -signal.SIGKILL in found and set(found) <= {-signal.SIGKILL, 0}, self.logs()

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def close(self) -> None:
        os.close(self._pipe)
        shutil.rmtree(self.folder)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_at_random_times(
    savers: ForkServer, tmp_path: Path, ranks: int, exhaustive: bool
) -> None:
    """After each kill the newest that was told to stand, or a newer one, is loaded whole.

    One in ten is killed while it starts, loads and clears up. Half of all save without waiting.
    """
    count, chance = (60 if exhaustive else 16), random.Random()
    for blocking in (False, True):
        place = tmp_path / f"blocking-{blocking}"
        place.mkdir()
        life = Life(savers, place, ranks, blocking)
        everyone = list(range(ranks))
        for attempt in range(count // 2):
            tickets = life.start(attempt)
            early = attempt % 10 == 9
            if not early:
                life.until_saved(chance.choice([0, 0, 1, 2]))
            some = everyone if early else chance.choice([everyone, [chance.choice(everyone)]])
            life.kill(tickets, some, chance.uniform(0.0, WATCHED_S))
        tickets = life.start(count)
        life.until_saved(0)
        life.kill(tickets, everyone, 0.0)
        assert life.stands > 0 and len(life.loads) >= 0.8 * count / 2
        print(f"{ranks} ranks, blocking {blocking}: {len(life.loads)} loads, {life.saves} saves")
        life.close()
