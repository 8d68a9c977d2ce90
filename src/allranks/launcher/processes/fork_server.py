"""The fork server: a process that has imported the framework once and forks every rank from there.

    python -P -m allranks.launcher.processes.fork_server SOCKET-FD MODULE…

Importing a framework costs seconds of processor time; a fork costs milliseconds. The server takes
requests from one socket (JSON, with the files of the process passed along), forks, and reports
every start, and every exit in the order in which the kernel shows it. It runs no operation of the
framework itself: a fork is safe only before the first one. When the socket closes, because the
supervisor is done or dead, it kills every process it started and everything that these started.

A process gets standard output, standard error, a file for its stacks, which it writes at
`STACKS_SIGNAL` from wherever it stands, and, if it has one, the memory of its heartbeat as
`HEARTBEAT_FD`, with it the memory in which the ranks of this node exchange tensors, `SEGMENT_FD`,
and as `LISTENER_FD` the socket at which the ranks of all nodes meet.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
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

from allranks.job.program import remember_modules
from allranks.launcher.processes.leftovers import (
    name_folder_of_sockets,
    remove_loader_files,
    remove_shared_memory,
)
from allranks.launcher.processes.linux import (
    adopt_orphans,
    children_of_this_process,
    die_with_parent,
    outlive_parent,
)

MESSAGE_LIMIT = 1 << 17  # the kernel's default for a socket is 208 KiB
STACKS_SIGNAL = signal.SIGRTMIN + 1
STACKS_FD, HEARTBEAT_FD, SEGMENT_FD, LISTENER_FD = 3, 4, 5, 6
MOST_FILES = 6
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PATIENCE_S = 2.0


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
                ticket, pid = running.pop(pidfd)
                _report_exit(control, ticket, pid, pidfd, is_last=not running)
            if control.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(control, MESSAGE_LIMIT, MOST_FILES)
                if not message:
                    return
                request = json.loads(message)
                if request["do"] == "spawn":
                    pid = _fork(control, request, fds)
                    pidfd = os.pidfd_open(pid)
                    running[pidfd] = request["ticket"], pid
                    poller.register(pidfd, select.POLLIN)
                    _tell(control, started=request["ticket"], pid=pid)
                for ticket, pid in running.values():
                    if request["do"] == "signal" and request["ticket"] == ticket:
                        _signal_group(pid, request["signal"])
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        for _, pid in running.values():
            _signal_group(pid, signal.SIGKILL)
        for _, pid in running.values():  # their memory is freed at the same time
            os.waitpid(pid, 0)
        _end_orphans()  # one that is not dead yet may write into the folder of its rank
        for _, pid in running.values():
            remove_loader_files(pid)


def _report_exit(
    control: socket.socket, ticket: int, pid: int, pidfd: int, *, is_last: bool
) -> None:
    """Tell how `pid` ended. What is left of its group goes first, while the id is still its own.

    Whoever hears of the last exit finds nothing left: the orphans go before it is told.
    """
    now = time.monotonic()
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    _signal_group(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    os.close(pidfd)
    if is_last:
        _end_orphans()
    remove_loader_files(pid)
    code = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss * 1024
    _tell(control, exited=ticket, code=code, monotonic=now, peak_bytes=peak)


def _tell(control: socket.socket, **message: Any) -> None:
    control.send(json.dumps(message).encode())


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _end_orphans() -> None:
    """Kill and reap processes that ranks left behind; they were handed to this process.

    Whoever dies hands over its own children, so it takes as many rounds as there are generations.
    One that does not die, because it waits for a disk, is not waited for without end.
    """
    out_of_reach: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while orphans := set(children_of_this_process()) - out_of_reach:
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                if os.waitpid(pid, os.WNOHANG)[0]:
                    remove_shared_memory(pid)
            except (PermissionError, ProcessLookupError, ChildProcessError):
                out_of_reach.add(pid)
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)


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
        _take_files(fds)
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        if len(fds) > STACKS_FD:  # at once: with the default action for a moment, one could kill it
            _leave_signals_to_the_supervisor()
        else:
            _default_signals()
        faulthandler.enable()
        faulthandler.register(STACKS_SIGNAL, file=STACKS_FD, all_threads=True)
        name_folder_of_sockets()
        os.environ.update({**request["defaults"], **os.environ, **request["environment"]})
        os.chdir(request["cwd"])
        module, _, name = request["target"].partition(":")
        code = int(getattr(importlib.import_module(module), name)(request["argument"]) or 0)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _take_files(fds: list[int]) -> None:
    """The files of this process as 1, 2, 3 and so on; all others are closed."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, len(fds) + 1) for fd in fds]
    for number, fd in enumerate(high, start=1):
        os.dup2(fd, number, inheritable=number <= 2)
    os.closerange(len(fds) + 1, os.sysconf("SC_OPEN_MAX"))


def _default_signals() -> None:
    for number in ASKING:
        signal.signal(number, signal.SIG_DFL)


def _leave_signals_to_the_supervisor() -> None:
    """A rank with a heartbeat gets requests to stop or to save through it.

    Schedulers and systemd send such signals to all processes of a job at once; a rank that died of
    one could not commit its checkpoint. Its own children get the default actions back.
    """
    for number in ASKING:
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=_default_signals)


def _is_closed(control: socket.socket) -> bool:
    """Whether the other end was gone before this process asked to hear of it."""
    try:
        return not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def main() -> NoReturn:
    """Import what was asked, then serve. Run as a process of its own by `ForkServer`.

    `MODULE:NAME` is what a user's file imports: if that fails, the ranks say so.
    It leaves at once: to take the framework apart would need a second or more, in which this
    process were left behind by a supervisor that was killed, and every other one waited for it.
    """
    code = 1
    try:
        for number in ASKING:
            signal.signal(number, signal.SIG_IGN)
        control = socket.socket(fileno=int(sys.argv[1]))
        die_with_parent()  # an import that takes seconds reads no socket
        if _is_closed(control):
            os._exit(0)
        gc.disable()  # to look through modules while they come is a fifth of the time of torch's
        for text in sys.argv[2:]:
            module, _, name = text.partition(":")
            with contextlib.suppress(Exception) if name else contextlib.nullcontext():
                getattr(importlib.import_module(module), name or "__name__")
        remember_modules()
        gc.freeze()  # a rank that looks through what was imported would copy all of it
        gc.enable()
        outlive_parent()  # from here on the end of the socket says it, and nothing is left behind
        serve(control)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main()
