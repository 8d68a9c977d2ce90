"""The supervisor's end of the fork server: ask for a process, hear of its end, send it a signal."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from allranks.errors import PlaceError, RequestError
from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server import MESSAGE_LIMIT, STACKS_SIGNAL
from allranks.launcher.processes.linux import is_dying, state_of
from allranks.launcher.processes.process import Exit, Process, Processes, ProcessState

# --- stacks --------------------------------------------------------------------------------------
# The stacks of running ranks, written by themselves at a signal, from wherever they stand.
#
# In Python, in a kernel, or stopped: `faulthandler` writes them to a file that the launcher gave.


STACKS_WAIT_S = 3.0  # a machine that is busy with others takes its time


def stacks_of(pids: dict[int, int], files: dict[int, int]) -> dict[int, str]:
    """What each rank writes of where it stands, within `STACKS_WAIT_S`."""
    for pid in pids.values():
        for number in (STACKS_SIGNAL, signal.SIGCONT):  # a stopped one takes it as it wakes
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
    deadline, sizes = time.monotonic() + STACKS_WAIT_S, dict.fromkeys(pids, -1)
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {rank: os.fstat(files[rank]).st_size for rank in pids}
        if now == sizes and all(now.values()):
            break
        sizes = now
    return {
        rank: os.pread(files[rank], 1 << 20, 0).decode(errors="replace").strip() for rank in pids
    }


CLOSE_TIMEOUT_S = 10.0
OF_A_SCRIPT = ("ALLRANKS_IN_PLACE_OF_GLOO",)  # of a job around this one, whose scripts it changes
_servers = itertools.count(1)


def checked_size(message: dict[str, Any]) -> bytes:
    """A request as it is sent; raises `RequestError` for one that is too large."""
    data = json.dumps(message).encode()
    if len(data) > MESSAGE_LIMIT:
        raise RequestError(
            asked="to start a rank with this job",
            found=f"{len(data)} bytes of values",
            why=f"a job is handed to its ranks in one message of {MESSAGE_LIMIT} bytes",
            do="put large values into a file, and set its name",
        )
    return data


def start_module(
    module: str, control: socket.socket, words: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A process of our `module` with its socket, in a session of its own: Ctrl-C is not for it."""
    command = [sys.executable, "-P", "-m", f"allranks.launcher.{module}", str(control.fileno())]
    return subprocess.Popen(
        [*command, *words],
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )


def end_process(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait for a process to end; kill one that does not."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ForkServer(Processes):
    """A running fork server that has imported `modules`. Closing it ends all that it started.

    What it started ends also when it is killed, or its owner: then whoever is left, or the next
    one that starts, finds the processes by the mark that they carry. All that it starts have the
    hash seed `seed`; without it that of `hash_seed`.
    """

    def __init__(self, modules: tuple[str, ...], seed: str = "") -> None:
        leftovers.sweep()
        self._modules = modules
        self.hash_seed = seed or hash_seed()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mark = f"{leftovers.owner()}/{next(_servers)}"
        environment = {name: v for name, v in os.environ.items() if name not in OF_A_SCRIPT}
        environment |= {"OPENBLAS_NUM_THREADS": "1", HASH_SEED: self.hash_seed}
        environment[leftovers.VARIABLE] = self._mark
        self._process = self._started(theirs, environment)
        theirs.close()
        self._tickets = itertools.count()
        self._pids: dict[int, int] = {}
        self._stacks: dict[int, int] = {}  # ticket -> nameless file

    def _started(
        self, control: socket.socket, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        return start_module("processes.fork_server", control, self._modules, environment)

    def spawn(
        self, process: Process, heartbeats: HeartbeatTable | None = None, listener: int = -1
    ) -> int:
        """Ask for a process; never waits. Returns the ticket by which its exit is told.

        Its standard output and error are appended to its log, raw. With `heartbeats` it gets their
        memory, that for collectives, and a file for its stacks. `listener` is the file descriptor
        of a socket for it.
        """
        ticket = next(self._tickets)
        request = {
            "do": "spawn",
            "ticket": ticket,
            "target": process.target,
            "argument": process.argument,
            "environment": process.environment,
            "defaults": process.defaults,
            "cwd": os.getcwd(),
        }
        with open(process.log, "ab") as file:
            files = [file.fileno()] * 3
            if heartbeats is not None:
                self._stacks[ticket] = os.memfd_create(f"allranks-stacks-{process.rank}")
                files[2:] = [self._stacks[ticket], heartbeats.fd, heartbeats.segment_fd]
                files += [listener] if listener >= 0 else []
            self._send(request, files)
        return ticket

    def pids(self) -> list[int]:
        """The living processes whose start the server has reported."""
        return list(self._pids.values())

    def started(self, ticket: int) -> bool:
        """Whether the server has reported the start of a process, and not its end."""
        return ticket in self._pids

    def dying(self) -> set[int]:
        return {ticket for ticket, pid in self._pids.items() if is_dying(pid)}

    def stands(self, tickets: Mapping[int, int]) -> dict[int, ProcessState]:
        """Where these processes stand, rank by rank; those that beat write their stacks."""
        there = {rank: t for rank, t in tickets.items() if t in self._pids and t in self._stacks}
        pids = {rank: self._pids[ticket] for rank, ticket in there.items()}
        states = {rank: state_of(pid) for rank, pid in pids.items()}
        written = stacks_of(pids, {rank: self._stacks[ticket] for rank, ticket in there.items()})
        return {rank: ProcessState(states[rank], written[rank]) for rank in there}

    def fileno(self) -> int:
        """What becomes readable when there is an exit to tell."""
        return self._control.fileno()

    def exits(self, timeout_s: float) -> list[Exit]:
        """The processes that ended, in order; waits up to `timeout_s` for the first."""
        ended: list[Exit] = []
        while select.select([self._control], [], [], 0.0 if ended else timeout_s)[0]:
            message = self._receive()
            if "exited" in message:
                self._forget(message["exited"])
                code, when = message["code"], message["monotonic"]
                ended.append(Exit(message["exited"], code, when, message["peak_bytes"]))
            else:
                self._pids[message["started"]] = message["pid"]
        return ended

    def _forget(self, ticket: int) -> None:
        self._pids.pop(ticket, None)
        if ticket in self._stacks:
            os.close(self._stacks.pop(ticket))

    def signal(self, ticket: int, number: int) -> None:
        """Send a signal to a process and all of its group; one that has ended is left alone."""
        self._send({"do": "signal", "ticket": ticket, "signal": int(number)}, [])

    def wake(self) -> None:
        """Continue a suspended server: only it sees exits and forwards signals."""
        self._process.send_signal(signal.SIGCONT)

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        data = checked_size(message)
        try:
            socket.send_fds(self._control, [data], fds)
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> dict[str, Any]:
        try:
            received = self._control.recv(MESSAGE_LIMIT)
        except OSError as error:
            raise self._gone() from error
        if not received:
            raise self._gone()
        message: dict[str, Any] = json.loads(received)
        return message

    def _gone(self) -> PlaceError:
        code = self._process.wait(CLOSE_TIMEOUT_S)
        leftovers.end_processes_of(self._mark)
        text = f"the fork server ended with code {code}: its own message stands above."
        if code > 0 and self._modules:  # it was not killed: what ranks need could not be imported
            text += f" `python -c 'import {', '.join(self._modules)}'` must work."
        return PlaceError(text)

    def close(self) -> None:
        """End the server and every process that it started, and wait until they are gone."""
        self._control.close()
        self.wake()
        end_process(self._process, CLOSE_TIMEOUT_S)
        for ticket in list(self._stacks):
            self._forget(ticket)
        if self._process.returncode != 0:
            leftovers.end_processes_of(self._mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- hash seed -----------------------------------------------------------------------------------
# One hash seed for all processes of a job: the order of a set of texts is the same in each.
#
# Python hashes texts with a seed of its own in each process, so what is made in the order of a set
# (class numbers, layers) differs from process to process and from run to run. Every fork server, on
# whatever node, is started with the same `PYTHONHASHSEED`, and what it forks inherits it.


HASH_SEED = "PYTHONHASHSEED"
USUAL = "0"
RANDOM = "random"
SEEDS = 2**32


def hash_seed(environment: Mapping[str, str] | None = None) -> str:
    """That of a job started in this environment: its own number, or 0.

    `PYTHONHASHSEED=random` asks for another one with each call; the job still has one.
    """
    seed = (os.environ if environment is None else environment).get(HASH_SEED, "")
    if seed == RANDOM:
        return str(random.SystemRandom().randrange(1, SEEDS))
    return seed or USUAL


def check_hash_seed(wanted: str) -> None:
    """Raise `RequestError` if the environment of this node says another one than the job has."""
    seed = os.environ.get(HASH_SEED, "")
    if seed not in ("", RANDOM, wanted):
        raise RequestError(
            asked=f"{HASH_SEED}={seed} on this node",
            found=f"{HASH_SEED}={wanted} where the job was started",
            why="sets of texts would have another order on this node than on the others",
            do=f"set {HASH_SEED} to the same number on all nodes, or on none",
        )
