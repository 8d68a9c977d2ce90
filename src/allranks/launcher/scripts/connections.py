"""Whether the ranks of a script were ever connected to each other, read from `/proc`.

A torch script that makes no process group (`Accelerator()` on a CPU, without `cpu=True`) trains N
independent copies, and ends well without any message. A process group holds TCP sockets as long as
it lives: those of torch's store, of Gloo and of NCCL. So the processes of the ranks are searched
for such a socket from time to time, until one is found. Scripts that may use something else (MPI,
JAX, TensorFlow) get no note.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 0.2
LEAST_LOOKS = 10  # with torch loaded; scripts that end sooner get no note
TORCH = "libtorch_cpu.so"
OTHERS = ("libmpi", "jaxlib", "libtensorflow", "mpi4py", "libmxnet")


@dataclass
class Connections:
    """The sockets of the ranks of one attempt, all of them on this machine."""

    has_met: bool = False
    looks: int = 0  # at ranks that had torch, none of which had a socket
    _next: float = 0.0
    _with_torch: set[int] = field(default_factory=set)

    def look(self, pids: Iterable[int], ranks: int) -> None:
        """Search for sockets if it is time; `pids` are the living ranks."""
        now = time.monotonic()
        if self.has_met or now < self._next:
            return
        self._next = now + EVERY_S
        alive = [pid for pid in pids if pid]
        family = [process for pid in alive for process in (pid, *_descendants(pid))]
        self.has_met = any(_has_tcp_socket(pid) for pid in family) or not self._torch_alone(alive)
        self.looks += len(self._with_torch) == ranks == len(alive)

    def _torch_alone(self, pids: list[int]) -> bool:
        """Note which ranks have loaded torch; false if one has loaded another framework."""
        for pid in pids:
            maps = _text(Path(f"/proc/{pid}/maps"))
            if any(name in maps for name in OTHERS):
                return False
            if TORCH in maps:
                self._with_torch.add(pid)
        return True

    def note(self, ranks: int) -> str:
        """The note for the end of the job; "" if it is not certain that no rank was connected."""
        if self.has_met or ranks < 2 or self.looks < LEAST_LOOKS:
            return ""
        return (
            f"note: no rank was ever seen connected to another: the {ranks} of them may have "
            "trained apart, each a copy of its own. A script has to make a process group: "
            "Accelerator(cpu=True) on a processor, init_process_group, or a launcher's strategy"
        )


def _descendants(pid: int) -> list[int]:
    descendants: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _text(task).split()):
            descendants += [child, *_descendants(child)]
    return descendants


def _has_tcp_socket(pid: int) -> bool:
    sockets = set()
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = str(file.readlink())
                if name.startswith("socket:["):
                    sockets.add(name[len("socket:[") : -1])
    if not sockets:
        return False
    rows = [_text(Path(f"/proc/{pid}/net/{table}")).splitlines()[1:] for table in ("tcp", "tcp6")]
    return any(row.split()[9] in sockets for table in rows for row in table)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
