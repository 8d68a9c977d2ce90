"""The folder of a run's checkpoints: which are committed, whether their files hold, which may go.

Whoever removes anything here removes names that allranks gave, and no other. The manifest always
goes first, so that a kill in the midst never leaves a checkpoint that is committed and not whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from io import FileIO
from pathlib import Path

from allranks.checkpoint.files import fsync_folder
from allranks.checkpoint.format import (
    DIGEST_BYTES,
    NAME,
    RANK_FILE,
    STEP_FOLDER,
    BadCheckpoint,
    Manifest,
    read_manifest,
)

FOLDER = "checkpoints"
BLOCK_BYTES = 4 << 20
_TEMPORARY_NAME = re.compile(rf"\.{re.escape(NAME)}\.[0-9]+")
_BAD = re.compile(r"(step-[0-9]{8,})\.bad-[0-9]+")


def step_of(folder: Path) -> int:
    """The step in the name of a folder; -1 if there is none."""
    named = STEP_FOLDER.fullmatch(folder.name)
    return int(named[1]) if named else -1


def committed(checkpoints: Path) -> list[Path]:
    """The folders that hold a manifest, the newest first. They may be damaged."""
    return [folder for folder in _steps(checkpoints) if (folder / NAME).exists()]


def candidates(source: Path) -> list[Path]:
    """The checkpoints of a source, the newest first; a source may be a single checkpoint."""
    return [source] if step_of(source) >= 0 or (source / NAME).exists() else committed(source)


def _steps(checkpoints: Path) -> list[Path]:
    """The step folders of any state, the newest first; never a link to one."""
    if not checkpoints.is_dir():
        return []
    folders = [
        Path(entry) for entry in os.scandir(checkpoints) if entry.is_dir(follow_symlinks=False)
    ]
    return sorted((f for f in folders if step_of(f) >= 0), key=step_of, reverse=True)


def uncommitted(checkpoints: Path) -> list[Path]:
    """Step folders without a manifest: of a running save, or of a dead attempt."""
    return [folder for folder in _steps(checkpoints) if not (folder / NAME).exists()]


def bad(checkpoints: Path) -> list[Path]:
    """The folders of bad checkpoints, which were renamed."""
    return sorted(f for f in checkpoints.glob("step-*") if _BAD.fullmatch(f.name))


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """The problems of these files: missing, wrong length, wrong digest. Reads all of them."""
    problems = (_problem(folder / name, manifest, name) for name in names)
    return [problem for problem in problems if problem]


def _problem(path: Path, manifest: Manifest, name: str) -> str:
    wanted = manifest.files[name]
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != wanted.bytes:
                return f"{name}: {size} bytes instead of {wanted.bytes}"
            running, block = blake2b(digest_size=DIGEST_BYTES), memoryview(bytearray(BLOCK_BYTES))
            while count := file.readinto(block):
                running.update(block[:count])
    except FileNotFoundError:
        return f"{name}: missing"
    except OSError as error:
        return f"{name}: cannot be read: {error.strerror}"
    holds = running.hexdigest() == wanted.blake2b
    return "" if holds else f"{name}: its digest is not that of the manifest"


def remove(folder: Path) -> None:
    """Remove a checkpoint: its manifest, then its files, then the folder if it is empty."""
    (folder / NAME).unlink(missing_ok=True)
    fsync_folder(folder)
    for path in _ours(folder):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something is in it that is not ours
        folder.rmdir()


def _ours(folder: Path) -> list[Path]:
    """The files in a step folder that ranks and leaders write, without the manifest."""
    names = os.listdir(folder)
    return [folder / n for n in names if RANK_FILE.fullmatch(n) or _TEMPORARY_NAME.fullmatch(n)]


def remove_unnamed(folder: Path, manifest: Manifest) -> None:
    """Remove what other attempts left in the folder of a committed checkpoint."""
    for path in _ours(folder):
        if path.name not in manifest.files:
            path.unlink(missing_ok=True)


def prune(checkpoints: Path, keep: int, best: str = "") -> list[Path]:
    """Remove all but the `keep` newest and the best one; returns those removed.

    `best` is `max:metric` or `min:metric`, over the metrics of all manifests; of equals the newest.
    """
    there = committed(checkpoints)
    spared = {*there[: max(keep, 1)], *best_of(there, best)}
    gone = [folder for folder in there if folder not in spared]
    for folder in gone:
        remove(folder)
    return gone


def best_of(folders: list[Path], best: str) -> list[Path]:
    sign, _, metric = best.partition(":")
    scores = {}
    for folder in folders if metric else []:
        with contextlib.suppress(BadCheckpoint):
            score = read_manifest(folder).metrics.get(metric, math.nan)
            if not math.isnan(score):
                scores[folder] = score if sign == "max" else -score
    return [max(scores, key=lambda folder: (scores[folder], step_of(folder)))] if scores else []


def set_aside(folder: Path) -> Path:
    """Rename a bad checkpoint, so that it is never tried again and can be looked at."""
    for number in itertools.count(1):
        target = folder.with_name(f"{folder.name}.bad-{number}")
        if not os.path.lexists(target):
            folder.rename(target)
            fsync_folder(folder.parent)
            return target
    raise AssertionError("numbers do not end")


def sweep(checkpoints: Path) -> list[Path]:
    """Remove the remains of dead attempts: folders without a manifest, unnamed manifests.

    Only while no save runs there. Returns the folders that it removed.
    """
    removed = uncommitted(checkpoints)
    for folder in removed:
        remove(folder)
    for folder in committed(checkpoints):
        for path in _ours(folder):
            if _TEMPORARY_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
    return removed


# --- room ----------------------------------------------------------------------------------------
# Space on a disk: reserved before it is needed, with another folder for when there is none.
#
# A job whose disk is full goes on, and its results are saved. Files of events hold blocks beyond
# their end, so that the last events of a job always fit. Files that do not fit into the run folder
# are written to a temporary folder, whose name contains that of the run, and which only this user
# can read. A job whose disk is full before it starts does not start: `take` raises then.


FULL = (errno.ENOSPC, errno.EDQUOT)
KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: the file does not grow, only its blocks are there


def reserve(fd: int, room_bytes: int) -> int:
    """Reserve this much space for a file beyond its end.

    Returns 0, or the `errno`: the disk may be full, and not every file system supports this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    end = ctypes.c_int64(os.fstat(fd).st_size)
    failed = libc.fallocate(fd, KEEP_SIZE, end, ctypes.c_int64(room_bytes))
    return ctypes.get_errno() if failed else 0


def take(path: Path, room_bytes: int) -> None:
    """Create the file `path` if it does not exist, and reserve this much space beyond its end.

    Raises `OSError` if the disk has no space for it. If a file system cannot reserve space, this
    only checks that there is some.
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
    """Release the space that is reserved beyond the end of a file."""
    with suppress(OSError):
        os.ftruncate(fd, os.fstat(fd).st_size)


class Elsewhere:
    """The folder for files that do not fit into a run folder: in `TMPDIR`, then the system's own.

    The folder is `allranks-<run>-<pid>`, created for the first file that needs it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._name = f"allranks-{run_dir.resolve().name}-{os.getpid()}"
        self._made: set[Path] = set()

    def places(self, name: str) -> Iterator[Path]:
        """Paths for the file `name`, to be tried in this order; an empty folder is removed."""
        roots = (os.environ.get("TMPDIR"), tempfile.gettempdir())
        for base in dict.fromkeys(os.path.realpath(path) for path in roots if path):
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
