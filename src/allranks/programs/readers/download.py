"""The files of a data set, fetched once per node: whoever comes first fetches, the others wait.

A file is written under another name, its digest is checked, and only then it gets its own name; so
a file that has its name is whole, whatever was killed when. Digests of files that somebody put
there by hand are checked too.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from allranks.checkpoint.files import fsync_folder
from allranks.errors import RequestError

BLOCK_BYTES = 1 << 20
SILENCE_S = 60.0  # after which a server is taken for dead
LOCK = ".fetch.lock"


@dataclass(frozen=True)
class Remote:
    """A file to be had from `url`; `digest` is "sha256:…" or "md5:…", over its bytes."""

    url: str
    digest: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def fetch(files: Sequence[Remote], folder: str | Path) -> list[Path]:
    """The paths of all files in `folder`, where those that are missing are fetched first.

    Raises `RequestError` if one cannot be had, or is not what its digest says.
    """
    folder = Path(folder)
    if not all((folder / file.name).exists() for file in files):
        with _alone_on_this_node(folder):
            for file in files:
                if not (folder / file.name).exists():
                    _download(file, folder, files)
    for file in files:
        _check(file, _digest(file, folder / file.name), folder)
    return [folder / file.name for file in files]


@contextmanager
def _alone_on_this_node(folder: Path) -> Iterator[None]:
    """Hold the lock of this folder, so that one process fetches; its end releases the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "wb")
    except OSError as error:
        raise RequestError(
            asked=f"to fetch data into {folder}",
            found=str(error),
            why="files of the data set are missing there, and it cannot be written to",
            do="--set data=… names a folder that has them, or that can be written to",
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(file: Remote, folder: Path, files: Sequence[Remote]) -> None:
    print(f"fetching {file.url} into {folder}", file=sys.stderr, flush=True)
    beside = folder / f".{file.name}.part"
    try:
        _copy(file.url, beside)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        beside.unlink(missing_ok=True)
        names = ", ".join(f"{other.name} ({other.digest})" for other in files)
        raise RequestError(
            asked=f"to fetch {file.url}",
            found=f"{type(error).__name__}: {error}",
            why=f"the data set is not whole without it, and {folder} does not have it",
            do=f"try again, or put these files into {folder}: {names}",
        ) from error
    try:
        _check(file, _digest(file, beside), folder)
    except RequestError:
        beside.unlink()
        raise
    beside.rename(folder / file.name)
    fsync_folder(folder)


def _copy(url: str, path: Path) -> None:
    """What is at `url`, as a file that would outlive a loss of power."""
    request = urllib.request.Request(url, headers={"User-Agent": "allranks"})
    with urllib.request.urlopen(request, timeout=SILENCE_S) as source, open(path, "wb") as target:
        while block := source.read(BLOCK_BYTES):
            target.write(block)
        target.flush()
        os.fsync(target.fileno())


def _digest(file: Remote, path: Path) -> str:
    kind = file.digest.partition(":")[0]
    with open(path, "rb") as content:  # against damage, not against an attacker
        found = hashlib.file_digest(content, lambda: hashlib.new(kind, usedforsecurity=False))
    return found.hexdigest()


def _check(file: Remote, found: str, folder: Path) -> None:
    kind, _, expected = file.digest.partition(":")
    if found != expected:
        raise RequestError(
            asked=f"{file.name} with {kind} {expected}",
            found=f"{kind} {found}",
            why="it was cut short, changed, or is another file of that name",
            do=f"remove {folder / file.name} if it is there, and try again; it is from {file.url}",
        )
