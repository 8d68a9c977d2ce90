"""The supervisor's end of the fork server: ask for a process, hear of its end, send it a signal."""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from allranks.errors import PlaceError, RequestError
from allranks.launch.forkserver import MESSAGE_LIMIT

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Exit:
    """How a process ended: `code` < 0 is minus the signal; `monotonic` is this host's clock."""

    ticket: int
    code: int
    monotonic: float


class ForkServer:
    """A running fork server that has imported `modules`. Closing it ends all that it started."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "allranks.launch.forkserver", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [*command, *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        self._tickets = itertools.count()

    def spawn(self, target: str, argument: Any, environment: dict[str, str], output: Path) -> int:
        """Ask for a process that calls `target` (module:function) with `argument`; never waits.

        Returns the ticket by which its exit is told and signals are sent. Its standard output and
        error are appended to the file `output`, raw.
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
            self._send(request, [file.fileno(), file.fileno()])
        return ticket

    def exits(self, timeout_s: float) -> list[Exit]:
        """The processes that ended, in order; waits up to `timeout_s` for the first."""
        ended: list[Exit] = []
        while self._readable(0.0 if ended else timeout_s):
            ended.append(self._receive())
        return ended

    def signal(self, ticket: int, number: int) -> None:
        """Send a signal to a process and all of its group; one that has ended is left alone."""
        self._send({"do": "signal", "ticket": ticket, "signal": int(number)}, [])

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

    def _receive(self) -> Exit:
        try:
            received = self._control.recv(MESSAGE_LIMIT)
        except OSError as error:
            raise self._gone() from error
        if not received:
            raise self._gone()
        message = json.loads(received)
        return Exit(message["exited"], message["code"], message["monotonic"])

    def _gone(self) -> PlaceError:
        code = self._process.wait(CLOSE_TIMEOUT_S)
        return PlaceError(
            f"the fork server ended with code {code}: its own message stands above. "
            "Is torch installed in this environment? `python -c 'import torch'` must work."
        )

    def close(self) -> None:
        """End the server and every process that it started, and wait until they are gone."""
        self._control.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
