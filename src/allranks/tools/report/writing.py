"""Which runs a report is of, and where its files go: whole or not at all, over nothing foreign."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allranks.checkpoint.files import write_whole
from allranks.errors import RequestError
from allranks.tools.report.benches.records import RECORD as BENCH
from allranks.tools.report.checks import RECORD as CHECK
from allranks.tools.report.page import MARKER

PAGE = "report.html"
LOOKED_AT_BYTES = 200
RUNS, BENCHES, CHECKS = "runs", "benches", "checks"


def kind_of(names: Sequence[str]) -> str:
    """What these names are all of: runs, benches or checks; raises `RequestError` for a mixture."""
    kinds = dict.fromkeys(map(_kind, names))
    if len(kinds) > 1:
        raise RequestError(
            asked=f"report {' '.join(names)}",
            found=f"{' and '.join(kinds)}",
            why="a page is of runs, of benches, or of checks",
            do="report each kind by itself",
        )
    return next(iter(kinds))


def _kind(name: str) -> str:
    path = Path(name)
    if (path / BENCH).is_file():
        return BENCHES
    if path.suffix == ".json" or (path / CHECK).is_file():
        return CHECKS
    return RUNS


def run_folders(names: Sequence[str]) -> list[Path]:
    """The run folders of these names, each once; the folder of a sweep stands for its runs."""
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        if not path.is_dir():
            raise RequestError(
                asked=f"report {name}",
                found="a file" if path.exists() else "nothing there",
                why="a report is of a run folder",
                do="see `allranks runs` for those there are",
            )
        inside = [] if (path / "job.toml").is_file() else sorted(path.glob("*/job.toml"))
        for one in [job.parent for job in inside] or [path]:
            found.setdefault(one.resolve(), one)
    return list(found.values())


def page_path(paths: Sequence[Path], out: str | None) -> Path:
    """Where the page goes; raises `RequestError` over a file that is no report."""
    beside = paths[0] if paths[0].is_dir() else paths[0].parent
    path = Path(out) if out else beside / PAGE if len(paths) == 1 else Path(PAGE)
    _check(path, "--out")
    if path.is_file() and MARKER.encode() not in _beginning(path):
        raise RequestError(
            asked=f"--out {path}",
            found="a file that is no report",
            why="only an earlier report is written over",
            do="name another file, or remove that one",
        )
    return path


def trace_path(name: str | None) -> Path | None:
    """Where the trace goes, if one is asked for; never over a file that is there."""
    if name is None:
        return None
    path = Path(name)
    _check(path, "--trace")
    if path.exists() and b'"traceEvents"' not in _beginning(path):
        raise RequestError(
            asked=f"--trace {path}",
            found="a file that is no trace",
            why="only an earlier trace is written over",
            do="name another file, or remove that one",
        )
    return path


def write_file(path: Path, text: str, option: str) -> None:
    """Write one file whole; raises `RequestError` where that cannot be."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise RequestError(
            asked=f"{option} {path}",
            found=str(error),
            why="the file cannot be written there",
            do=f"name another with {option} FILE",
        ) from None


def _check(path: Path, option: str) -> None:
    """Raise `RequestError` unless a file of this name can be: its folder is there, and is one."""
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(
            asked=f"{option} {path}",
            found="a folder" if path.is_dir() else f"no folder {path.parent}",
            why="a file is written there",
            do="name a file in a folder that is there",
        )


def _beginning(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(LOOKED_AT_BYTES)
    except OSError as error:
        raise RequestError(
            asked=f"to write {path}",
            found=str(error),
            why="the file that is there cannot be looked at",
            do="name another file",
        ) from None
