"""The files of a job at its end, kept elsewhere where the run folder has no room for them.

The leader makes one. What was kept elsewhere is `elsewhere`, with its path; what could be kept
nowhere is `lost`, and what the run folder has a part of that can be made anew is `incomplete`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from allranks.checkpoint.folder import FULL, Elsewhere
from allranks.job.run_folder import REMOVED

ALL = "all of it"


class Keeping:
    """Where the files of one job go; `report` hears of each that is not in the run folder."""

    def __init__(self, run_dir: Path, report: Callable[..., None]) -> None:
        self.run_dir, self._report = run_dir, report
        self._places = Elsewhere(run_dir)
        self.elsewhere: dict[str, dict[str, str]] = {}
        self.lost: dict[str, str] = {}
        self.incomplete: list[str] = []

    def whole(self, name: str, write: Callable[[Iterator[Path]], Path]) -> None:
        """Keep a file: `write` tries the paths in order, and returns the one that it took.

        It raises the `OSError` of the first if none has room.
        """
        try:
            path = write(self._paths(name))
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.lost[name] = str(error.strerror)
            self._report("not_kept", file=name, error=str(error.strerror))
            return
        if path.parent != self.run_dir:
            self._say_where(name, path, ALL)

    def rest(self, name: str, content: bytes) -> None:
        """Keep the lines that a file of the run folder did not take, if there are any."""
        if not content:
            return
        rows = content.count(b"\n")
        there = (self.run_dir / name).read_bytes().count(b"\n")
        part = f"{rows:,} of {there + rows:,} rows"
        for path in self._places.places(name):
            try:
                _write_new(path, content)
            except OSError:
                path.unlink(missing_ok=True)
                continue
            return self._say_where(name, path, part)
        self.lost[name] = part
        self._report("not_kept", file=name, error=part)

    def removed(self, name: str) -> None:
        """Somebody has removed a file, which was begun again."""
        self.lost[name] = REMOVED
        self._report("not_kept", file=name, error=REMOVED)

    def to_data(self) -> dict[str, Any]:
        """For the summary of the job: nothing where all is in the run folder."""
        found = {
            "kept_elsewhere": self.elsewhere,
            "not_kept": self.lost,
            "incomplete_logs": self.incomplete,
        }
        return {name: values for name, values in found.items() if values}

    def _paths(self, name: str) -> Iterator[Path]:
        yield self.run_dir / name
        yield from self._places.places(name)

    def _say_where(self, name: str, path: Path, part: str) -> None:
        if part == ALL and (self.run_dir / name).exists():
            part = f"{ALL}; the one in the run folder is of an earlier end"
        where = {"path": str(path), "host": socket.gethostname(), "holds": part}
        self.elsewhere[name] = where
        self._report("kept_elsewhere", file=name, where=where)


def write_where_room_is(
    paths: Iterable[Path], size_bytes: int, write: Callable[[BinaryIO], object]
) -> Path:
    """Write a file to the first path with room for all of it; returns that path.

    The file is there whole, or not at all. Its room is taken before `write(file)` is called, once.
    Raises the `OSError` of the first path if none has room.
    """
    path, file = _begun(paths, size_bytes)
    beside = Path(file.name)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return path


def _begun(paths: Iterable[Path], size_bytes: int) -> tuple[Path, BinaryIO]:
    first: OSError | None = None
    for path in paths:
        beside = path.with_name(f".{path.name}")
        try:
            file = open(beside, "wb")
            try:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            except BaseException:
                file.close()
                beside.unlink()
                raise
        except OSError as error:
            if first is None and error.errno not in FULL:
                raise
            first = first or error
            continue
        return path, file
    assert first is not None
    raise first


def _write_new(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, len(content))
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
