"""The limits of a node, beyond `facts`: memory, files, the folder of runs. Plain data.

A process in the place of a rank examines them, so that the limits are those of ranks. A folder is
tested with the operations of a job: write, fsync, rename, lock.
"""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
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

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Examination:
        return cls(**{**data, "folder": Folder(**data["folder"])})


def examine(mark: Mark) -> Examination:
    """Examine this node, and test the folder with the mark; leaves no file there."""
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = _usage(SHARED_MEMORY)
    return Examination(
        cores=os.cpu_count(),
        cores_allowed=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        memory_available_bytes=psutil.virtual_memory().available,
        memory_limit_bytes=_memory_limit(),
        shared_memory_bytes=None if shared is None else shared[0],
        shared_memory_free_bytes=None if shared is None else shared[1],
        open_files=files,
        open_files_hard=files_hard,
        speed_mbit={interface.name: interface.speed_mbit for interface in interfaces()},
        folder=examine_folder(mark),
    )


def examine_folder(mark: Mark) -> Folder:
    """Test the operations of a job: read a file of another node, write, fsync, rename, lock."""
    path = Path(mark.folder)
    usage = _usage(path)
    probe_file = path / f".allranks-probe-{secrets.token_hex(8)}"
    trials: dict[str, Callable[[], str]] = {}
    if mark.name:
        trials[SEEN] = lambda: _reads(path / mark.name, mark.content)
        trials[SEEN_LOCK] = lambda: _is_locked_out(path / mark.name)
    trials |= {
        "write": lambda: _writes(probe_file),
        "fsync": lambda: _syncs(probe_file),
        "rename": lambda: _renames(probe_file),
        "lock": lambda: _locks(probe_file),
    }
    tried = {}
    try:
        for name, trial in trials.items():
            try:
                tried[name] = trial() or WORKS
            except OSError as error:
                tried[name] = error.strerror or str(error)
            if name == "write" and tried[name] != WORKS:
                break  # the other tests need it
    finally:
        with suppress(OSError):
            probe_file.unlink()
    return Folder(
        path=str(path),
        kind=_kind(path),
        free_bytes=None if usage is None else usage[1],
        free_files=None if usage is None else os.statvfs(path).f_favail,
        tried=tried,
    )


def _reads(file: Path, content: str) -> str:
    return "" if file.read_text() == content else "it holds something else here"


def _is_locked_out(file: Path) -> str:
    """The command holds a lock on the file, so that taking it here must fail."""
    with file.open("r+") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
    return "a lock that another node holds is not seen here"


def _writes(file: Path) -> str:
    file.write_text("allranks")
    return "" if file.read_text() == "allranks" else "what was written is not read again"


def _syncs(file: Path) -> str:
    for path in (file, file.parent):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return ""


def _renames(file: Path) -> str:
    """Rename over an existing file, as a manifest is replaced."""
    replacement = file.with_name(f"{file.name}.new")
    replacement.write_text("new")
    try:
        replacement.rename(file)
    finally:
        replacement.unlink(missing_ok=True)
    return "" if file.read_text() == "new" else "the old file is still there"


def _locks(file: Path) -> str:
    """A second open of the file cannot lock it."""
    with file.open("r+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "" if not _is_locked_out(file) else "a lock does not exclude another process"


def _usage(path: Path) -> tuple[int, int] | None:
    """(all bytes, free bytes) of a file system."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _kind(path: Path) -> str | None:
    """The kind of the file system that a folder is on: ext4, nfs4, lustre, tmpfs."""
    kinds = {}  # a later mount at the same place hides the earlier
    with suppress(OSError):
        kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    real = path.resolve()
    return next((kinds[place] for place in (real, *real.parents) if place in kinds), None)


def _memory_limit() -> int | None:
    """The smallest limit of this process's control group and its parents."""
    names = {"memory": "memory.limit_in_bytes", "": "memory.max"}
    limits = [int(text) for text in _in_groups(names) if text.strip().isdecimal()]
    return min((limit for limit in limits if limit < NO_LIMIT), default=None)


def _cpu_quota() -> float | None:
    """The CPU quota of the control group in cores, from version 1 or 2 of control groups."""
    quotas = []
    for text in _in_groups({"": "cpu.max"}):
        quota, _, period = text.strip().partition(" ")
        quotas += [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []
    pairs = zip(
        _in_groups({"cpu": "cpu.cfs_quota_us"}),
        _in_groups({"cpu": "cpu.cfs_period_us"}),
        strict=False,
    )
    quotas += [int(quota) / int(period) for quota, period in pairs if int(quota) > 0]
    return min(quotas, default=None)


def _in_groups(names: dict[str, str]) -> Iterator[str]:
    """The content of a file of the control group and of each of its parents, by controller."""
    for kind, folder in control_groups(names):
        with suppress(OSError):
            yield (folder / names[kind]).read_text()
