"""Saves the final files of a job, in another folder if the run folder has no space for them.

The leader makes one. `elsewhere` lists files in another folder, with their paths; `lost` lists
those that could not be saved; `incomplete` those that are partly written and can be made again.
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
    """The files of one job; `report` is called for each that is not in the run folder."""

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

    def keep_rows(self, name: str, content: bytes) -> None:
        """Save the rows that did not fit a file of the run folder, if there are any."""
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
        """Record that a file was removed by another program, and was begun again."""
        self.lost[name] = REMOVED
        self._report("not_kept", file=name, error=REMOVED)

    def to_data(self) -> dict[str, Any]:
        """The lists for the summary of the job; empty if all files are in the run folder."""
        lists = {
            "kept_elsewhere": self.elsewhere,
            "not_kept": self.lost,
            "incomplete_logs": self.incomplete,
        }
        return {name: values for name, values in lists.items() if values}

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
    temporary = Path(file.name)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _begun(paths: Iterable[Path], size_bytes: int) -> tuple[Path, BinaryIO]:
    first: OSError | None = None
    for path in paths:
        temporary = path.with_name(f".{path.name}")
        try:
            file = open(temporary, "wb")
            try:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            except BaseException:
                file.close()
                temporary.unlink()
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
