"""What ranks do in the tests of the supervisor: end well, badly, late, or not at all.

Each is called with a folder, where it writes its process id under a name, for the test to look for.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOREVER_S = 600
CHAIN = """
import os, subprocess, sys, time
inner = subprocess.Popen(["sleep", "600"], start_new_session=True)
for name, pid in (("outer", os.getpid()), ("inner", inner.pid)):
    with open(f"{sys.argv[1]}/.{name}", "w") as file:
        file.write(str(pid))
    os.rename(f"{sys.argv[1]}/.{name}", f"{sys.argv[1]}/{name}.pid")
time.sleep(600)
"""


def write_pid(folder: str, name: str, pid: int) -> None:
    beside = Path(folder, f".{name}-{os.getpid()}")
    beside.write_text(str(pid))
    beside.rename(Path(folder, f"{name}.pid"))


def read_pid(folder: str | Path, name: str) -> int:
    """The process that wrote its id under `name`, once it has."""
    deadline = time.monotonic() + 120
    path = Path(folder, f"{name}.pid")
    while not path.exists():
        assert time.monotonic() < deadline, f"{name} never came up"
        time.sleep(0.01)
    return int(path.read_text())


def ends_well(folder: str) -> int:
    return 0


def waits(folder: str) -> int:
    write_pid(folder, "server", os.getppid())
    write_pid(folder, f"waiting-{os.environ['RANK']}", os.getpid())
    time.sleep(FOREVER_S)
    return 0


def ends_when_told(folder: str) -> int:
    write_pid(folder, f"waiting-{os.environ['RANK']}", os.getpid())
    read_pid(folder, "go")
    return 0


def ignores_terminate(folder: str) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return waits(folder)


def stands_still(folder: str) -> int:
    write_pid(folder, f"waiting-{os.environ['RANK']}", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def until_those_before_wait(folder: str) -> None:
    """Until every rank of a lower number waits."""
    for rank in range(int(os.environ["RANK"])):
        read_pid(folder, f"waiting-{rank}")


def raises(folder: str) -> int:
    until_those_before_wait(folder)
    raise ValueError("on purpose")


def is_killed(folder: str) -> int:
    until_those_before_wait(folder)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def leaves_with_three(folder: str) -> int:
    until_those_before_wait(folder)
    sys.exit(3)


def kills_the_server(folder: str) -> int:
    read_pid(folder, "waiting-0")
    write_pid(folder, "killer", os.getpid())
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER_S)
    return 0


def leaves_a_child(folder: str) -> int:
    write_pid(folder, "child", subprocess.Popen(["sleep", "600"]).pid)
    return 0


def leaves_a_session(folder: str) -> int:
    """A child in a session of its own, out of reach of every signal to the group."""
    write_pid(folder, "child", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    return 0


def leaves_a_chain(folder: str) -> int:
    """A session that started a session: the inner one is an orphan only once the outer is dead."""
    subprocess.Popen([sys.executable, "-c", CHAIN, folder], start_new_session=True)
    read_pid(folder, "inner")
    return 0


def waits_with_a_chain(folder: str) -> int:
    leaves_a_chain(folder)
    return waits(folder)


def prints_who_it_is(folder: str) -> int:
    print(os.environ["RANK"], os.getcwd(), signal.getsignal(signal.SIGINT).name)
    print("to standard error", file=sys.stderr)
    os.write(1, b"raw \xff\n")
    return 0


def counts(text: str) -> int:
    return len(text) % 100


def keeps_sockets(argument: dict[str, Any]) -> int:
    """Make what multiprocessing passes file descriptors by, say where, and die by a signal."""
    print(multiprocessing.util.get_temp_dir(), flush=True)
    if argument["number"]:
        os.kill(os.getpid(), argument["number"])
    return 0
