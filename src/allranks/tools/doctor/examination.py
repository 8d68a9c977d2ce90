"""The limits of a node, beyond `facts`: memory, files, the folder of runs. Plain data.

A process in the place of a rank examines them, so that the limits are those of ranks. A folder is
tested with the operations of a job: write, fsync, rename, lock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from allranks.launcher.nodes.facts import interfaces
from allranks.launcher.processes.linux import control_groups

WORKS = "works"
SHARED_MEMORY = Path("/dev/shm")
NO_LIMIT = 1 << 60  # version 1 of control groups writes a number near 2**63 for no limit
SEEN, SEEN_LOCK = "seen", "lock_across"


@dataclass(frozen=True)
class Mark:
    """A file that the command has written to a folder and locked, for the nodes to find.

    An empty `name`: the command could not write it.
    """

    folder: str
    name: str
    content: str


@dataclass(frozen=True)
class Folder:
    """The parent of run folders, as one node sees it. Unknown is `None`.

    `tried` has the result of each test: "works", or what went wrong.
    """

    path: str
    kind: str | None
    free_bytes: int | None
    free_files: int | None
    tried: dict[str, str]


@dataclass(frozen=True)
class Examination:
    """The limits and the folder of one node, as a rank would find them. Unknown is `None`.

    `cpu_quota` is the processor time of its control group, in cores. `speed_mbit` is the link speed
    of each interface, if its driver reports one.
    """

    cores: int | None
    cores_allowed: int
    cpu_quota: float | None
    memory_available_bytes: int
    memory_limit_bytes: int | None
    shared_memory_bytes: int | None
    shared_memory_free_bytes: int | None
    open_files: int
    open_files_hard: int
    speed_mbit: dict[str, int | None]
    folder: Folder

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Examination:
        return cls(**{**data, "folder": Folder(**data["folder"])})


def examine(mark: Mark) -> Examination:
    """Examine this node, and test the folder with the mark; leaves no file there."""
    files, files_hard = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    shared = _space(SHARED_MEMORY)
    return Examination(
        cores=os.cpu_count(),
        cores_allowed=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        memory_available_bytes=psutil.virtual_memory().available,
        memory_limit_bytes=_memory_limit(),
        shared_memory_bytes=shared and shared.f_blocks * shared.f_frsize,
        shared_memory_free_bytes=shared and shared.f_bavail * shared.f_frsize,
        open_files=files,
        open_files_hard=files_hard,
        speed_mbit={interface.name: interface.speed_mbit for interface in interfaces()},
        folder=examine_folder(mark),
    )


def examine_folder(mark: Mark) -> Folder:
    """Test the operations of a job: read a file of another node, write, fsync, rename, lock."""
    path = Path(mark.folder)
    space = _space(path)
    return Folder(
        path=str(path),
        kind=_kind(path),
        free_bytes=space and space.f_bavail * space.f_frsize,
        free_files=space and space.f_favail,
        tried=_try(path, mark),
    )


def _try(folder: Path, mark: Mark) -> dict[str, str]:
    """The result of each operation, by name. Without a file to write, the others are not tried."""
    marked, probe_file = folder / mark.name, folder / f".allranks-probe-{secrets.token_hex(8)}"
    trials: dict[str, tuple[Callable[[], bool], str]] = {}
    if mark.name:
        trials[SEEN] = (
            lambda: marked.read_text() == mark.content,
            "it holds something else here",
        )
        trials[SEEN_LOCK] = (
            lambda: _is_locked(marked),
            "a lock that another node holds is not seen here",
        )
    trials["write"] = lambda: _writes(probe_file), "what was written is not read again"
    trials["fsync"] = lambda: _syncs(probe_file), ""
    trials["rename"] = lambda: _renames(probe_file), "the old file is still there"
    trials["lock"] = lambda: _locks(probe_file), "a lock does not exclude another process"
    tried: dict[str, str] = {}
    for name, (works, problem) in trials.items():
        try:
            tried[name] = WORKS if works() else problem
        except OSError as error:
            tried[name] = error.strerror or str(error)
        if name == "write" and tried[name] != WORKS:
            break
    with suppress(OSError):
        probe_file.unlink()
    return tried


def _is_locked(file: Path) -> bool:
    with file.open("r+") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _writes(file: Path) -> bool:
    file.write_text("allranks")
    return file.read_text() == "allranks"


def _syncs(file: Path) -> bool:
    for path in (file, file.parent):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return True


def _renames(file: Path) -> bool:
    """Rename over an existing file, as a manifest is replaced."""
    replacement = file.with_name(f"{file.name}.new")
    replacement.write_text("new")
    try:
        replacement.rename(file)
    finally:
        replacement.unlink(missing_ok=True)
    return file.read_text() == "new"


def _locks(file: Path) -> bool:
    """A second open of the file cannot lock it."""
    with file.open("r+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _is_locked(file)


def _space(path: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(path)
    except OSError:
        return None


def _kind(path: Path) -> str | None:
    """The kind of the file system that a folder is on: ext4, nfs4, lustre, tmpfs."""
    kinds = {}  # a later mount at the same place hides the earlier
    with suppress(OSError):
        kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    real = path.resolve()
    return next((kinds[place] for place in (real, *real.parents) if place in kinds), None)


def _memory_limit() -> int | None:
    """The smallest limit of this process's control group and its parents."""
    limits = _in_groups("", "memory.max") + _in_groups("memory", "memory.limit_in_bytes")
    numbers = [int(text) for text in limits if text.isdecimal()]
    return min((number for number in numbers if number < NO_LIMIT), default=None)


def _cpu_quota() -> float | None:
    """The CPU quota of the control group in cores, from version 1 or 2 of control groups."""
    pairs = [text.split() for text in _in_groups("", "cpu.max")]
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    pairs += map(list, zip(*(_in_groups("cpu", name) for name in names), strict=False))
    quotas = [int(quota) / int(period) for quota, period in pairs if quota.isdecimal()]
    return min(quotas, default=None)


def _in_groups(kind: str, name: str) -> list[str]:
    """The content of a file of the control group and of each of its parents."""
    texts = []
    for _, folder in control_groups({kind}):
        with suppress(OSError):
            texts.append((folder / name).read_text().strip())
    return texts
