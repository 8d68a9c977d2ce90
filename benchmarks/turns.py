"""Sets of processes that take turns: while one set is timed, the ranks of all others sleep.

The benchmark itself asks (`Meeting`, `RankSet`), a rank answers (`answer_asked`). A rank that was
not asked waits in a read of its socket, so that even a library whose ranks spin while they wait for
each other takes nothing from the one that is timed. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

START_S = 180.0  # until every rank of a set is there
ANSWER_S = 120.0  # until every rank has answered
SETTLE_S = 0.005  # after a turn: threads that still spin for a while go to sleep
END_S = 20.0

Process = BaseProcess | subprocess.Popen[bytes]


class RankSet:
    """The ranks of one contender, or of several that live in the same processes."""

    def __init__(self, name: str, processes: Sequence[Process], ranks: list[socket.socket]) -> None:
        self.name, self._processes, self._ranks = name, processes, ranks
        self._readers = [rank.makefile("r", encoding="utf-8") for rank in ranks]

    def ask(self, *question: Any) -> list[Any]:
        """What each rank answers, in the order of ranks; they begin at the same moment."""
        line = (json.dumps(question) + "\n").encode()
        for rank in self._ranks:
            rank.sendall(line)
        answers = [reader.readline() for reader in self._readers]
        if not all(answers):
            raise SystemExit(f"{self.name}: rank {answers.index('')} has ended early")
        time.sleep(SETTLE_S)
        return [json.loads(answer) for answer in answers]

    def end(self) -> None:
        """Their sockets close, and they leave together."""
        for rank in self._ranks:
            rank.shutdown(socket.SHUT_WR)
        for process in self._processes:
            if isinstance(process, BaseProcess):
                process.join(END_S)
                left = process.exitcode is None
            else:
                left = _outlasts(process)
            if left:
                process.kill()
        for rank in self._ranks:
            rank.close()


class Meeting:
    """Where ranks come to be asked: a socket in a folder that goes with this object."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="benchmark-turns-"))
        self._sets: list[RankSet] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.folder / "ask"))
        self._socket.listen(64)
        self._socket.settimeout(START_S)

    @property
    def address(self) -> str:
        return str(self.folder / "ask")

    def wait_for(self, name: str, processes: Sequence[Process], ranks: int) -> RankSet:
        """The set whose ranks these processes are, or start; nobody else may come meanwhile."""
        there: dict[int, socket.socket] = {}
        while len(there) < ranks:
            try:
                rank, _ = self._socket.accept()
            except TimeoutError:
                for process in processes:  # else nobody could leave: they wait for each other
                    process.kill()
                raise SystemExit(f"{name}: {len(there)} of {ranks} ranks have come") from None
            rank.settimeout(ANSWER_S)
            there[int.from_bytes(rank.recv(4), "little")] = rank
        made = RankSet(name, processes, [there[index] for index in range(ranks)])
        self._sets.append(made)
        return made

    def end_all(self) -> None:
        """Every set leaves; others may come."""
        while self._sets:
            self._sets.pop().end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_all()
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def answer_asked(address: str, rank: int, answer: Callable[..., Any]) -> None:
    """Answer what is asked at `address`, as `rank`, until there is nothing more to ask."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address)
        asking.sendall(rank.to_bytes(4, "little"))
        for line in asking.makefile("r", encoding="utf-8"):
            asking.sendall((json.dumps(answer(*json.loads(line))) + "\n").encode())


def slowest(per_rank: list[list[float]]) -> list[float]:
    """For each of the times that all ranks took, that of the slowest rank."""
    return [max(times) for times in zip(*per_rank, strict=True)]


def one_thread() -> None:
    """Ranks that are started from now on have one thread each."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")


def _outlasts(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        return True
    return False
