"""The supervisor's end of the fork server: ask for a process, hear of its end, send it a signal."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from allranks.errors import PlaceError, RequestError
from allranks.launch import leftovers
from allranks.launch.forkserver import MESSAGE_LIMIT

CLOSE_TIMEOUT_S = 10.0
_servers = itertools.count(1)


@dataclass(frozen=True)
class Exit:
    """How a process ended: `code` < 0 is minus the signal; `monotonic` is this host's clock.

    `peak_bytes` is the most memory that it, or a process that it waited for, held at once.
    """

    ticket: int
    code: int
    monotonic: float
    peak_bytes: int = 0


class ForkServer:
    """A running fork server that has imported `modules`. Closing it ends all that it started.

    What it started ends also when it is killed, or its owner: then whoever is left, or the next
    one that starts, finds the processes by the mark that they carry.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        leftovers.sweep()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mark = f"{leftovers.owner()}/{next(_servers)}"
        environment = {"OPENBLAS_NUM_THREADS": "1", leftovers.VARIABLE: self._mark}
        self._process = self._started(modules, theirs, environment)
        theirs.close()
        self._tickets = itertools.count()
        self._pids: dict[int, int] = {}

    def _started(
        self, modules: tuple[str, ...], control: socket.socket, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """The process of the server, in a session of its own: Ctrl-C is for the supervisor."""
        command = [sys.executable, "-P", "-m", "allranks.launch.forkserver", str(control.fileno())]
        return subprocess.Popen(
            [*command, *modules],
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **environment},
        )

    def spawn(
        self,
        target: str,
        argument: Any,
        environment: dict[str, str],
        output: Path,
        stacks: int | None = None,
        pulse: int | None = None,
    ) -> int:
        """Ask for a process that calls `target` (module:function) with `argument`; never waits.

        Returns the ticket by which its exit is told and signals are sent. Its standard output and
        error are appended to the file `output`, raw; `stacks` and `pulse` are file descriptors:
        where it writes its stacks when it is asked to, and the memory of its pulse.
        """
        ticket = next(self._tickets)
        request = {
            "do": "spawn",
            "ticket": ticket,
            "target": target,
            "argument": argument,
            "environment": environment,
            "cwd": os.getcwd(),
        }
        with open(output, "ab") as file:
            files = [file.fileno(), file.fileno(), file.fileno() if stacks is None else stacks]
            self._send(request, files if pulse is None else [*files, pulse])
        return ticket

    def pid(self, ticket: int) -> int | None:
        """The process of a ticket, once the server has told it."""
        return self._pids.get(ticket)

    def exits(self, timeout_s: float) -> list[Exit]:
        """The processes that ended, in order; waits up to `timeout_s` for the first."""
        ended: list[Exit] = []
        while self._readable(0.0 if ended else timeout_s):
            message = self._receive()
            if "exited" in message:
                self._pids.pop(message["exited"], None)
                code, when = message["code"], message["monotonic"]
                ended.append(Exit(message["exited"], code, when, message["peak_bytes"]))
            else:
                self._pids[message["started"]] = message["pid"]
        return ended

    def signal(self, ticket: int, number: int) -> None:
        """Send a signal to a process and all of its group; one that has ended is left alone."""
        self._send({"do": "signal", "ticket": ticket, "signal": int(number)}, [])

    def wake(self) -> None:
        """Let the server go on if somebody has stopped it: it alone hears of exits and passes signals."""
        self._process.send_signal(signal.SIGCONT)

    def _readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._control], [], [], timeout_s)[0])

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_LIMIT:
            raise RequestError(
                asked="to start a rank with this job",
                found=f"{len(data)} bytes of values",
                why=f"a job is handed to its ranks in one message of {MESSAGE_LIMIT} bytes",
                do="put large values into a file, and set its name",
            )
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
        return PlaceError(
            f"the fork server ended with code {code}: its own message stands above. "
            "Is torch installed in this environment? `python -c 'import torch'` must work."
        )

    def close(self) -> None:
        """End the server and every process that it started, and wait until they are gone."""
        self._control.close()
        self.wake()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:
            leftovers.end_processes_of(self._mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
