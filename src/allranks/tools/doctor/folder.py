"""Does a node see the folder of runs, and can it write and lock files there?"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

WORKS = "works"
SEEN, WRITE, LOCK = "seen", "write", "lock"
TEXT = "allranks"


@dataclass(frozen=True)
class Mark:
    """A file that the command has written to a folder, for the nodes to find.

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
    tried: dict[str, str]


@contextmanager
def marked(folder: Path) -> Iterator[Mark]:
    """A locked file in the folder, for all nodes to see; if it cannot be written, they say why."""
    content, path = secrets.token_hex(8), _new_file(folder)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("w"))
            stack.callback(path.unlink)
            file.write(content)
            file.flush()
        except OSError:
            yield Mark(str(folder), "", "")
            return
        with suppress(OSError):  # of a folder without locks `examine` says so
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Mark(str(folder), path.name, content)


def examine(mark: Mark) -> Folder:
    """Test the operations of a job in the folder, and leave no file there."""
    path = Path(mark.folder)
    probe_file, free = _new_file(path), None
    tried: dict[str, str] = {}

    def sees() -> bool:
        return tried.get(SEEN) == WORKS

    trials: dict[str, Callable[[], str]] = {
        SEEN: lambda: _finds(mark),
        WRITE: lambda: _writes(probe_file),
        LOCK: lambda: _locks(probe_file) or (_is_locked_out(mark) if sees() else ""),
    }
    for name in trials if mark.name else (WRITE, LOCK):
        try:
            tried[name] = trials[name]() or WORKS
        except OSError as error:
            tried[name] = error.strerror or str(error)
        if name == WRITE and tried[name] != WORKS:
            break
    with suppress(OSError):
        probe_file.unlink()
    with suppress(OSError):
        free = shutil.disk_usage(path).free
    return Folder(str(path), _kind(path), free, tried)


def _new_file(folder: Path) -> Path:
    return folder / f".allranks-probe-{secrets.token_hex(8)}"


def _finds(mark: Mark) -> str:
    text = Path(mark.folder, mark.name).read_text()
    return "" if text == mark.content else "it holds something else here"


def _writes(file: Path) -> str:
    """Write, sync and rename a file, as a checkpoint is committed."""
    with file.open("w") as new:
        new.write(TEXT)
        new.flush()
        os.fsync(new.fileno())
    os.replace(file, renamed := file.with_suffix(".renamed"))
    os.replace(renamed, file)
    return "" if file.read_text() == TEXT else "what was written is not read again"


def _locks(file: Path) -> str:
    """Lock the file, which a second open of it must not be able to do."""
    with file.open("r+") as first:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "" if _is_locked(file) else "a lock does not exclude another process"


def _is_locked_out(mark: Mark) -> str:
    """The command that asks holds a lock of the mark, perhaps on another node."""
    locked = _is_locked(Path(mark.folder, mark.name))
    return "" if locked else "a lock holds on its own node only"


def _is_locked(file: Path) -> bool:
    with file.open("r+") as again:
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _kind(path: Path) -> str | None:
    """The kind of the file system that a folder is on: ext4, nfs4, lustre, tmpfs."""
    kinds = {}  # a later mount at the same place hides the earlier
    with suppress(OSError):
        kinds = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    real = path.resolve()
    return next((kinds[place] for place in (real, *real.parents) if place in kinds), None)
