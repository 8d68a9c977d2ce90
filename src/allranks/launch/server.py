"""The supervisor's end of the fork server: ask for a process, hear of its end, send it a signal."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from allranks.errors import PlaceError
from allranks.launch.forkserver import MESSAGE_LIMIT

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Exit:
    """How one process ended: `code` < 0 is minus the signal; `monotonic` is this host's clock."""

    pid: int
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
        self._exits: list[Exit] = []

    def spawn(self, target: str, argument: Any, environment: dict[str, str], output: Path) -> int:
        """Start a process that calls `target` (module:function) with `argument`; returns its id.

        Its standard output and error are appended to the file `output`, raw.
        """
        request = {
            "do": "spawn",
            "target": target,
            "argument": argument,
            "environment": environment,
            "cwd": os.getcwd(),
        }
        with open(output, "ab") as file:
            self._send(request, [file.fileno(), file.fileno()])
        while True:
            message = self._receive()
            if "spawned" in message:
                return int(message["spawned"])

    def exits(self, timeout_s: float) -> list[Exit]:
        """The processes that ended, in order; waits up to `timeout_s` for the first."""
        deadline = time.monotonic() + timeout_s
        while not self._exits or self._readable(0):
            if not self._readable(max(0.0, deadline - time.monotonic())):
                break
            self._receive()
        ended, self._exits = self._exits, []
        return ended

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process and all of its group; one that has ended is left alone."""
        self._send({"do": "signal", "pid": pid, "signal": int(number)}, [])

    def _readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._control], [], [], timeout_s)[0])

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
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
        if "exited" in message:
            self._exits.append(Exit(message["exited"], message["code"], message["monotonic"]))
        return message

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
