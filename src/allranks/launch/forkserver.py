"""The fork server: a process that has imported the framework once and forks every rank from there.

    python -P -m allranks.launch.forkserver SOCKET-FD MODULE…

Importing a framework costs seconds of processor time; a fork costs milliseconds. The server takes
requests from one socket (JSON, with the files for standard output and error passed along), forks,
and reports every exit in the order in which the kernel shows it. It runs no operation of the
framework itself: a fork is safe only before the first one. When the socket closes, because the
supervisor is done or dead, it kills every process it started and everything that these started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from allranks.launch.linux import adopt_orphans, children_of_this_process, die_with_parent

MESSAGE_LIMIT = 1 << 17  # the kernel's default for a socket is 208 KiB


def serve(control: socket.socket) -> None:
    """Fork as asked until the other end of `control` closes; then leave nothing behind."""
    adopt_orphans()
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (ticket, pid)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    try:
        while True:
            ready = [fd for fd, _ in poller.poll()]
            for pidfd in (fd for fd in ready if fd in running):
                poller.unregister(pidfd)
                _report_exit(control, *running.pop(pidfd), pidfd)
            if not running:
                _end_orphans()
            if control.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(control, MESSAGE_LIMIT, 2)
                if not message:
                    return
                request = json.loads(message)
                if request["do"] == "spawn":
                    pid = _fork(control, request, fds)
                    pidfd = os.pidfd_open(pid)
                    running[pidfd] = request["ticket"], pid
                    poller.register(pidfd, select.POLLIN)
                for ticket, pid in running.values():
                    if request["do"] == "signal" and request["ticket"] == ticket:
                        _signal_group(pid, request["signal"])
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        for _, pid in running.values():
            _signal_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        _end_orphans()


def _report_exit(control: socket.socket, ticket: int, pid: int, pidfd: int) -> None:
    """Tell how `pid` ended. What is left of its group goes first, while the id is still its own."""
    now = time.monotonic()
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    _signal_group(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(status)
    control.send(json.dumps({"exited": ticket, "code": code, "monotonic": now}).encode())


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _end_orphans() -> None:
    """Kill and reap processes that ranks left behind; they were handed to this process.

    Whoever dies hands over its own children, so it takes as many rounds as there are generations.
    """
    out_of_reach: set[int] = set()
    while orphans := set(children_of_this_process()) - out_of_reach:
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (PermissionError, ProcessLookupError, ChildProcessError):
                out_of_reach.add(pid)


def _fork(control: socket.socket, request: dict[str, Any], fds: list[int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(server, control, request, fds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)
    for fd in fds:
        os.close(fd)
    return pid


def _become(
    server: int, control: socket.socket, request: dict[str, Any], fds: list[int]
) -> NoReturn:
    """In the child: be the process that was asked for, and end with the exit code of its target."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != server:
            os._exit(1)
        control.close()
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.enable()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        module, _, name = request["target"].partition(":")
        code = int(getattr(importlib.import_module(module), name)(request["argument"]) or 0)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Import what was asked, then serve. Run as a process of its own by `ForkServer`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    serve(control)


if __name__ == "__main__":
    main()
