"""Room on a disk: taken before it is needed, and where to go when there is none.

A job whose disk is full goes on, and what it computed is kept. Two things see to that. Files of
events hold blocks beyond their end, so that the last words of a job are never those that do not
fit. And what the run folder has no room for is written into a folder among the temporary ones,
which has a name that says whose it is, and which only this user can read. A job whose disk is full
before it starts does not start: `take` raises then.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: the file does not grow, only its blocks are there


def reserve(fd: int, room_bytes: int) -> int:
    """Give a file this much room beyond its end, which nobody else can take.

    Returns 0, or the `errno`: the disk may be full, and not every file system can do this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    end = ctypes.c_int64(os.fstat(fd).st_size)
    failed = libc.fallocate(fd, KEEP_SIZE, end, ctypes.c_int64(room_bytes))
    return ctypes.get_errno() if failed else 0


def take(path: Path, room_bytes: int) -> None:
    """Make the file `path` if it is not there, and give it this much room beyond its end.

    Raises the `OSError` of a disk that has no room for it. Where a file system cannot reserve, this
    only tries whether there is room.
    """
    with open(path, "ab", buffering=0) as file:
        error = reserve(file.fileno(), room_bytes)
        if error in FULL:
            raise OSError(error, os.strerror(error), str(path))
        if error:
            _try_to_write(file, room_bytes)


def _try_to_write(file: FileIO, room_bytes: int) -> None:
    end, missing = os.fstat(file.fileno()).st_size, room_bytes
    try:
        while missing:
            missing -= file.write(bytes(missing))
        os.fsync(file.fileno())  # a file system of the network says only here that it is full
    finally:
        os.ftruncate(file.fileno(), end)


def give_back(fd: int) -> None:
    """Let go of what is reserved beyond the end of a file."""
    with suppress(OSError):
        os.ftruncate(fd, os.fstat(fd).st_size)


class Elsewhere:
    """Where the files go that a run folder has no room for: `TMPDIR`, then the system's own.

    The folder is `allranks-<run>-<pid>`, made with the first file that needs it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._name = f"allranks-{run_dir.resolve().name}-{os.getpid()}"
        self._made: set[Path] = set()

    def places(self, name: str) -> Iterator[Path]:
        """Paths for the file `name`, to be tried in this order; a folder left empty is removed."""
        given = (os.environ.get("TMPDIR"), tempfile.gettempdir())
        for base in dict.fromkeys(os.path.realpath(path) for path in given if path):
            folder = Path(base) / self._name
            try:
                if folder not in self._made:
                    folder.mkdir(mode=0o700)  # one that is there already is somebody else's
                    self._made.add(folder)
            except OSError:
                continue
            yield folder / name
            if not any(folder.iterdir()):  # it had no room either
                folder.rmdir()
                self._made.remove(folder)
