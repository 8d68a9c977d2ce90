"""Warm ranks for many trainings: a team of each size, whose members are never started anew.

Forking, joining the supervisor and importing cost ten times what six steps of a small model do.
A team leaves that out, and nothing else: the processes are real, and so are their groups. What it
finds is held once more by the command (`hold.py`), which decides.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from signal import SIGKILL
from typing import Any, Self

from member import BROKEN, Answer

from allranks.job.job import Job
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.world import World

PATIENCE_S = 120.0
"""For all ranks to answer: a team that is silent for longer hangs."""
LAST_WORDS_S = 5.0
"""For the other ranks, when one has failed."""
MOST_TRAININGS = 400
"""Of a team, whose file of keys grows with each."""


@dataclass
class Team:
    """So many ranks in processes of their own; `close` ends them."""

    size: int
    server: ForkServer
    folder: Path
    trainings: int = 0

    def __post_init__(self) -> None:
        address = str(self.folder / "line")
        self.lines: list[Connection[Any, Any]] = [None] * self.size  # type: ignore[list-item]
        with Listener(address, "AF_UNIX", backlog=self.size) as listener:
            self.tickets = [
                self.server.spawn(
                    Process(
                        rank,
                        "member:main",
                        {"address": address, "rank": rank},
                        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                        self.folder / f"{rank}.log",
                    )
                )
                for rank in range(self.size)
            ]
            for _ in range(self.size):
                line = listener.accept()
                self.lines[line.recv()] = line

    def train(self, job: Job) -> list[Answer]:
        """The answers of all ranks, in order; one that is silent or dead is broken."""
        self.trainings += 1
        store = str(self.folder / "store")
        for rank, line in enumerate(self.lines):
            world = World(rank, self.size, rank, self.size, on_machine=self.size, store=store)
            with suppress(OSError):  # one that is gone is heard of below
                line.send((job, world if self.size > 1 else World()))
        answers: list[Answer | None] = [None] * self.size
        patience_s = PATIENCE_S
        while missing := [rank for rank, answer in enumerate(answers) if answer is None]:
            ready = wait([self.lines[rank] for rank in missing], patience_s)
            if not ready:
                break
            for rank in missing:
                if self.lines[rank] in ready:
                    answers[rank] = self._heard(rank)
            if any(one is not None and one.what == BROKEN for one in answers):
                patience_s = LAST_WORDS_S
        return [one or Answer(BROKEN, "a rank that is silent") for one in answers]

    def _heard(self, rank: int) -> Answer:
        try:
            found: Answer = self.lines[rank].recv()
        except (EOFError, OSError):
            return Answer(BROKEN, f"the process of rank {rank} is gone")
        return found

    def close(self, *, failed: bool = False) -> None:
        """End its processes: they leave when nobody asks any more, or are killed."""
        for line in self.lines:
            line.close()
        if failed:
            for ticket in self.tickets:
                self.server.signal(ticket, SIGKILL)


class Teams:
    """A team of each size that is asked for, started when it is; a context."""

    def __init__(self, server: ForkServer) -> None:
        self._server, self._teams = server, dict[int, Team]()
        self._stack = ExitStack()

    def train(self, job: Job) -> list[Answer]:
        """By as many warm ranks as the job has."""
        team = self._teams.get(job.ranks)
        if team is None or team.trainings >= MOST_TRAININGS:
            self._end(job.ranks)
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            team = self._teams[job.ranks] = Team(job.ranks, self._server, folder)
        alone = dataclasses.replace(job, program="")
        answers = team.train(alone)
        if not _agree(answers):
            self._end(job.ranks, failed=True)
        return answers

    def _end(self, ranks: int, *, failed: bool = False) -> None:
        with suppress(KeyError):
            self._teams.pop(ranks).close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in list(self._teams):
            self._end(ranks)
        self._stack.close()


def _agree(answers: Sequence[Answer]) -> bool:
    """Whether all ranks ended alike, so that they can go on together."""
    return answers[0].what != BROKEN and len({one.what for one in answers}) == 1
