"""Whole launches in numbers: `allranks WORDS`, each in processes of its own, without its imports.

A host imports torch once and forks a launch for every line that it is told: command line,
supervisor, fork server and ranks are real processes, and what they do is the product's own code.
Three things stand in for what starting a program does: the fork server is forked from the
supervisor, the jobs of a sweep from the sweep, and the mark of an owner is written over a place
kept free for it in the environment block of the process, where the kernel shows it.

A launch may be of a copy of the engine, in the folder `source`: all of allranks is imported anew
from there, and only the framework is not.

    python -P launch_host.py        launches as JSON lines on stdin, what came of them on stdout
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import allranks.launcher.nodes.agent
import allranks.launcher.start
import allranks.tools.sweep
from allranks.cli import main as door
from allranks.job.engines import preload_for
from allranks.job.program import remember_modules
from allranks.job.run_folder import read_rows
from allranks.launcher.processes import fork_server, fork_server_client, leftovers
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.linux import die_with_parent, started_at, state_of
from allranks.launcher.supervisor import Signals

PLACE = "x" * 80
PATIENCE_S = 200
NOTHING_LEFT_S = 30  # what really stays would stay for ten minutes, or for ever


# --- inside the host ----------------------------------------------------------------------------


class Forked:
    """A forked process with the few methods of `subprocess.Popen` that `ForkServer` uses."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedServer(ForkServer):
    """A fork server that inherits its imports from the supervisor, which had them from the host."""

    def _started(self, control: socket.socket, environment: dict[str, str]) -> Any:
        pid = os.fork()
        if pid:
            return Forked(pid)
        try:
            os.setsid()
            for number in fork_server.ASKING:
                signal.signal(number, signal.SIG_IGN)
            wear(environment[leftovers.VARIABLE])
            os.environ.update(environment)
            fd = os.dup2(control.detach(), 3)
            os.closerange(4, 4096)
            fork_server.serve(socket.socket(fileno=fd))
            os._exit(0)
        finally:
            os._exit(1)


def start_forked(
    words: Any, cores: Any, log: Path, verb: str = "train", environment: Any = None
) -> Any:
    """A job of a sweep or a bench: a launch of its own, which inherits its imports."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return Forked(pid)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if cores:
        os.sched_setaffinity(0, cores)
    for number in (*Signals.STOP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    files = dict.fromkeys(("out", "err", "ready"), str(log))
    be_launched(
        {
            "words": [verb, *words],
            "cwd": os.getcwd(),
            "groups": [],
            "environment": dict(environment or {}),
            **files,
        }
    )


def wear(mark: str) -> None:
    """Show `mark` in /proc/self/environ, as a program that was started with it would."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    kept = f"{leftovers.VARIABLE}={PLACE}".encode()
    block = ctypes.string_at(begin, end - begin)
    start = begin + block.index(f"{leftovers.VARIABLE}=".encode())
    ctypes.memset(start, 0, len(kept))
    text = f"{leftovers.VARIABLE}={mark}".encode()
    ctypes.memmove(start, text, len(text))


def be_launched(request: dict[str, Any]) -> NoReturn:
    """In the child: be the command line, until it leaves."""
    code: Any = 70
    try:
        os.setsid()
        os.chdir(request["cwd"])
        for group in request["groups"]:
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
        for number, name in enumerate((os.devnull, request["out"], request["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        os.closerange(3, 4096)
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
        os.environ.update(request["environment"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, door._interrupt)
        for module in (fork_server_client, allranks.launcher.start, allranks.launcher.nodes.agent):
            module.ForkServer = ForkedServer  # type: ignore[attr-defined,misc]
        allranks.tools.sweep.start_command = start_forked
        sys.argv = ["allranks", *request["words"]]
        code = 0
        Path(request["ready"]).touch()
        door.main()
    except SystemExit as left:
        code = left.code or 0
    except BaseException as error:
        code = 1
        with contextlib.suppress(OSError):
            print(f"Traceback of the launch: {error!r}", file=sys.stderr)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(int(code))


def be_launched_from(source: str, request: dict[str, Any]) -> NoReturn:
    """In the child: the same with the copy of allranks in `source` in the place of the host's."""
    try:
        keys = sys.modules["allranks.torch.random.keyed_rng"]
        keys._OPERATORS._destroy()  # torch has names but once
        for name in [name for name in sys.modules if name.partition(".")[0] == "allranks"]:
            del sys.modules[name]
        sys.path.insert(0, source)
        copy = importlib.import_module("launch_host")
        assert Path(copy.leftovers.__file__).is_relative_to(source)
        copy.warm_up()
        copy.be_launched(request)
    finally:
        os._exit(70)


def warm_up() -> None:
    """Import what ranks need."""
    for module in preload_for("digits"):
        importlib.import_module(module)
    remember_modules()
    gc.freeze()


def host() -> NoReturn:
    """Fork launches as they are asked for, and tell how each ended, until stdin is closed."""
    warm_up()
    running: dict[int, int] = {}  # pidfd -> pid
    rest = b""
    tell({"ready": True})
    while True:
        ready, _, _ = select.select([0, *running], [], [])
        for fd in set(ready) - {0}:
            pid = running.pop(fd)
            os.close(fd)
            tell({"pid": pid, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    request = json.loads(line)
                    if request["source"]:
                        be_launched_from(request["source"], request)
                    be_launched(request)
                running[os.pidfd_open(pid)] = pid
                tell({"launched": pid})
    for pid in running.values():
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def tell(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


# --- in a test ----------------------------------------------------------------------------------


class Host:
    """The host, seen from a test."""

    def __init__(self) -> None:
        environment = {**os.environ, leftovers.VARIABLE: PLACE, "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.codes: dict[int, int] = {}
        self._rest = b""
        self._launched: list[int] = []
        self._count = 0
        assert self._hear(PATIENCE_S) == {"ready": True}

    def launch(self, folder: Path, *words: str, err: str = "", **more: Any) -> Launch:
        """Start `allranks WORDS` in `folder`; `err` is a file (or terminal) for standard error."""
        self._count += 1
        out, ready = folder / f".out-{self._count}", folder / f".ready-{self._count}"
        err = err or str(folder / f".err-{self._count}")
        request = {
            "words": [str(word) for word in words],
            "cwd": str(folder),
            "out": str(out),
            "err": err,
            "ready": str(ready),
            "groups": [],
            "source": "",
            "environment": {},
            **more,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while not self._launched:
            self._hear(PATIENCE_S)
        launch = Launch(self, self._launched.pop(0), folder, out, Path(err))
        until(lambda: ready.exists() or launch.code is not None, "the launch to begin")
        return launch

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                return {}
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, "the host is dead"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "code" in message:
            self.codes[message["pid"]] = message["code"]
        if "launched" in message:
            self.codes.pop(message["launched"], None)  # of an earlier launch with the same id
            self._launched.append(message["launched"])
        return message

    def listen(self) -> None:
        while self._hear(0.0):
            pass

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()


def until(claim: Any, what: str, within_s: float = PATIENCE_S) -> Any:
    """Wait until `claim()` is true, and return it."""
    deadline = time.monotonic() + within_s
    while not (found := claim()):
        assert time.monotonic() < deadline, f"in vain for {within_s} s: {what}"
        time.sleep(0.005)
    return found


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Launch:
    """One launch: its supervisor is process `pid`; `code` is None while it runs."""

    def __init__(self, host: Host, pid: int, folder: Path, out: Path, err: Path) -> None:
        self.host, self.pid, self.folder = host, pid, folder
        self._out, self._err = out, err
        self.owner = f"{pid}.{started_at(pid)}."

    @property
    def code(self) -> int | None:
        self.host.listen()
        return self.host.codes.get(self.pid)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Its exit code, once it has ended."""
        try:
            until(lambda: self.code is not None, "the end of the launch", within_s)
        except AssertionError as error:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"{error}\n{self.err}") from None
        return self.host.codes[self.pid]

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.is_file() else ""

    def summary(self) -> dict[str, Any]:
        """What it printed last: launch it with --json."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def server(self) -> int | None:
        """The process of its fork server, once there is one."""
        return next(iter(children_of(self.pid)), None)

    @property
    def ranks(self) -> list[int]:
        """The living processes that its fork server has forked."""
        return [pid for pid in children_of(self.server or 0) if state_of(pid) not in ("", "Z")]

    @property
    def workers(self) -> list[int]:
        """The living children of its ranks: loader workers."""
        found = [child for rank in self.ranks for child in children_of(rank)]
        return [pid for pid in found if state_of(pid) not in ("", "Z")]

    def left(self) -> list[int]:
        """The living processes that carry its mark."""
        return [pid for pid, mark in leftovers._marked() if mark.startswith(self.owner)]

    def assert_nothing_left(self) -> None:
        try:
            until(lambda: not self.left(), "no process is left", NOTHING_LEFT_S)
        except AssertionError:
            names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.left()]
            raise AssertionError(f"left behind: {self.left()} {names}") from None


def events(run: Path, name: str) -> Iterator[dict[str, Any]]:
    """The events of that name that the supervisor wrote."""
    return (row for row in read_rows(run / "events.jsonl") if row["event"] == name)


if __name__ == "__main__":
    host()
