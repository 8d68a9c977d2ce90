"""Whether the ranks of a script were ever connected to each other, as the kernel shows it.

Scripts of torch that find no reason to make a process group (`Accelerator()` on a processor,
without `cpu=True`) train N times the same, alone, and end well. Nothing of theirs tells it. A
process group holds TCP sockets as long as it lives: those of torch's store, of Gloo and of NCCL. So
from time to time it is looked whether any process of the ranks has one; after the first it is
looked no more. Scripts in which something else may join the ranks (MPI, JAX, TensorFlow)
are never spoken of.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 0.2
LEAST_LOOKS = 10  # with torch loaded: one that ends sooner is not spoken of
TORCH = "libtorch_cpu.so"
OTHERS = ("libmpi", "jaxlib", "libtensorflow", "mpi4py", "libmxnet")


@dataclass
class Connections:
    """What was seen of the ranks of one attempt, all of them on this machine."""

    has_met: bool = False
    looks: int = 0  # at ranks that had torch, none of which had a socket
    _next: float = 0.0
    _with_torch: set[int] = field(default_factory=set)

    def look(self, pids: Iterable[int], ranks: int) -> None:
        """Take a look if it is time; `pids` are the ranks that live."""
        now = time.monotonic()
        if self.has_met or now < self._next:
            return
        self._next = now + EVERY_S
        own = [pid for pid in pids if pid]
        family = [one for pid in own for one in (pid, *_descendants(pid))]
        self.has_met = any(_has_tcp_socket(pid) for pid in family) or not self._torch_alone(own)
        self.looks += len(self._with_torch) == ranks == len(own)

    def _torch_alone(self, pids: list[int]) -> bool:
        """Note who has loaded torch; false if anybody has loaded what may join ranks by itself."""
        for pid in pids:
            maps = _text(Path(f"/proc/{pid}/maps"))
            if any(name in maps for name in OTHERS):
                return False
            if TORCH in maps:
                self._with_torch.add(pid)
        return True

    def told(self, ranks: int) -> str:
        """What to say at the end; "" where there is nothing to say for certain."""
        if self.has_met or ranks < 2 or self.looks < LEAST_LOOKS:
            return ""
        return (
            f"note: no rank was ever seen connected to another: the {ranks} of them may have "
            "trained apart, each a copy of its own. A script has to make a process group: "
            "Accelerator(cpu=True) on a processor, init_process_group, or a launcher's strategy"
        )


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _text(task).split()):
            found += [child, *_descendants(child)]
    return found


def _has_tcp_socket(pid: int) -> bool:
    held = set()
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = str(file.readlink())
                if name.startswith("socket:["):
                    held.add(name[len("socket:[") : -1])
    if not held:
        return False
    rows = [_text(Path(f"/proc/{pid}/net/{table}")).splitlines()[1:] for table in ("tcp", "tcp6")]
    return any(row.split()[9] in held for table in rows for row in table)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
