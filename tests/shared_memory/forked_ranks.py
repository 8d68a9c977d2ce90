"""Ranks as forked processes that inherit the memory they share: the C library, without torch.

`memory` is mapped before the fork, so that an address is the same in all ranks. Nothing has a name.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import allranks

PAGE = 4096
STOPPED_S = 0.5  # who is stopped for so long is lost
LITTLE = 64  # bytes of cache: nearly all that is large or small outgrows it


def library() -> ModuleType:
    """`_collectives` without the package around it, whose import takes torch and seconds."""
    folder = Path(next(iter(allranks.__path__))) / "torch" / "shared_memory"
    built = sorted(folder.glob("_collectives*.so"))
    assert built, f"{folder} has no compiled library: pip install -e ."
    return loaded(built[0])


def loaded(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_collectives", str(path))
    spec = importlib.util.spec_from_file_location("_collectives", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def memory(nbytes: int) -> tuple[mmap.mmap, int]:
    """Zeros that forked processes share, and their address."""
    made = mmap.mmap(-1, nbytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    return made, ctypes.addressof(ctypes.c_char.from_buffer(made))


def descriptors() -> set[str]:
    """Those of this process."""
    return set(os.listdir("/proc/self/fd"))


def names() -> set[str]:
    """Those in /dev/shm, without what torch and Python name in tests that run beside."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("torch_", "sem."))}


class World:
    """The shared memory of `size` ranks and of groups of them, made before they are forked."""

    def __init__(
        self,
        size: int,
        groups: Sequence[Sequence[int]],
        core: ModuleType,
        stopped_s: float = STOPPED_S,
    ) -> None:
        self.size, self.members, self.core = size, [tuple(group) for group in groups], core
        self.stopped_s = stopped_s
        self._kept: list[mmap.mmap] = []
        self.bells = [self.shared(PAGE) for _ in range(size)]
        self.segments = [self.shared(core.segment_bytes(len(group))) for group in self.members]
        self._pids = self.shared(PAGE)
        self.rank, self.engine = -1, None

    def shared(self, nbytes: int) -> int:
        made, address = memory(nbytes)
        self._kept.append(made)
        return address

    def free(self) -> None:
        """Give the memory back; nobody may use it any more."""
        sizes = [len(made) for made in self._kept]
        munmap = ctypes.CDLL(None).munmap
        munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        for made, nbytes in zip(self._kept, sizes, strict=True):
            munmap(ctypes.addressof(ctypes.c_char.from_buffer(made)), nbytes)

    def attach(self, rank: int) -> None:
        """In the forked rank: an engine, once all ranks have said who they are."""
        self.rank = rank
        (ctypes.c_int64 * self.size).from_address(self._pids)[rank] = os.getpid()
        self.await_all()
        self.held = descriptors()
        self.engine = self.core.Engine(self.bells[rank], self.stopped_s, rank % 2 * LITTLE)

    def await_all(self) -> None:
        """Until all ranks have said who they are: before that none can be missed."""
        pids = (ctypes.c_int64 * self.size).from_address(self._pids)
        while not all(pids):
            time.sleep(0.001)
        self.pids = tuple(pids)

    def group(self, number: int, merges: bytes, crowded: bool) -> Any:
        """This rank as a member of a group."""
        members = self.members[number]
        return self.core.Group(
            self.engine,
            self.segments[number],
            members.index(self.rank),
            len(members),
            tuple(self.bells[rank] for rank in members),
            tuple(self.pids[rank] for rank in members),
            merges,
            crowded,
        )


def forked(world: World, target: Callable[[World], None]) -> list[int]:
    """Start every rank; `target` is called once it is attached. The ids of their processes."""
    started = []
    sys.stdout.flush()
    for rank in range(world.size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                world.attach(rank)
                target(world)
                code = 0
            except BaseException:
                sys.stderr.write(f"rank {rank} of {world.size}:\n{traceback.format_exc()}")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        started.append(pid)
    return started


def ended(pids: Sequence[int]) -> list[int]:
    """Wait for all of them: what they exited with."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
