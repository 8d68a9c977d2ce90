"""Requests to change the number of ranks of a running job, and the answers of its launcher.

A command writes a request into the run folder, under one name and whole: whoever may write there
may change the job. The launcher looks for it ten times a second, removes it as it reads it, and
answers by an event `scaled` or `not_scaled` with the number of the request; `scale_request` says
that it was read. Pure but for the file.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from allranks.checkpoint.files import as_json
from allranks.errors import RequestError

REQUEST = ".scale.json"
READ = "scale_request"
"""The event of a launcher that has read a request, and will answer it."""
ANSWERS = ("scaled", "not_scaled")
LONGEST_REQUEST = 4096  # bytes: it has four short values


@dataclass(frozen=True)
class Bounds:
    """How few and how many ranks may train, as `--elastic MIN:MAX` says."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


@dataclass(frozen=True)
class ScaleRequest:
    """Let `ranks` ranks train (0: as `join` and `leave` say), or `join` more, or ranks `leave` go.

    `number` is drawn by chance: the answer has it too. `by` is who asks, for the record.
    """

    number: str
    by: str
    ranks: int = 0
    join: int = 0
    leave: tuple[int, ...] = ()

    @classmethod
    def new(
        cls, *, ranks: int = 0, join: int = 0, leave: Collection[int] = (), by: str = ""
    ) -> ScaleRequest:
        """A request of this process, or `by` another."""
        by = by or f"process {os.getpid()} of user {os.getuid()}"
        return cls(secrets.token_hex(8), by, ranks, join, tuple(sorted(set(leave))))

    def __str__(self) -> str:
        """The words of the command."""
        if self.join:
            return "join"
        leavers = "".join(f" --leave {rank}" for rank in self.leave)
        return f"scale{leavers or f' --ranks {self.ranks}'}"

    def size_after(self, members: Collection[int], bounds: Bounds) -> int:
        """How many ranks train then, of those that do now; raises `RequestError`."""
        if not set(self.leave) <= set(members):
            raise RequestError(
                asked=str(self),
                found=f"ranks {', '.join(map(str, sorted(members)))} train",
                why="only a rank that trains can leave",
                do="name one of them",
            )
        size = self.ranks or len(members) + self.join - len(self.leave)
        if not bounds.least <= size <= bounds.most:
            raise RequestError(
                asked=str(self),
                found=f"{size} rank{'s' * (size != 1)} would train, under --elastic {bounds}",
                why="the job was started for that many ranks, neither fewer nor more",
                do=f"scale --ranks M with M from {bounds.least} to {bounds.most}, or stop the job, "
                "and resume it with another --elastic",
            )
        return size


def leavers_of(request: ScaleRequest, members: Collection[int], size: int) -> tuple[int, ...]:
    """The members that leave so that `size` train: those named, or the highest numbers."""
    return request.leave or tuple(sorted(members)[size:])


def joiners_of(members: Collection[int], running: Collection[int], size: int) -> tuple[int, ...]:
    """The numbers of new ranks so that `size` train: the lowest that no process has."""
    free = (number for number in range(size + len(running)) if number not in running)
    return tuple(next(free) for _ in range(size - len(members)))


def post(run_dir: Path, request: ScaleRequest) -> None:
    """Write a request for the launcher of the run; raises `RequestError` if one waits there."""
    temporary = run_dir / f"{REQUEST}.{request.number}"
    try:
        temporary.write_text(as_json(asdict(request)))
        os.link(temporary, run_dir / REQUEST)  # unlike a rename, it replaces no other request
    except FileExistsError:
        raise RequestError(
            asked=f"{request} {run_dir}",
            found="another request that waits for its launcher",
            why="a job changes its ranks for one request at a time",
            do=f"wait for that command; if none runs, remove {run_dir / REQUEST}",
        ) from None
    except OSError as error:
        raise RequestError(
            asked=f"{request} {run_dir}",
            found=str(error),
            why="the launcher of a run reads requests from its folder",
            do="ask as the user who started the run, on a machine that sees its folder",
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def withdraw(run_dir: Path, request: ScaleRequest) -> bool:
    """Remove this request, and no other; whether it still waited, so that nobody answers it."""
    path = run_dir / REQUEST
    try:
        waits = _parsed(_read(path)) == request
        if waits:
            path.unlink()
    except OSError:
        return False
    return waits


def next_request(run_dir: Path) -> ScaleRequest | None:
    """The request that waits, if one does; it is removed. What is no request is removed too.

    A folder of that name stays, and is no request.
    """
    path, request = run_dir / REQUEST, None
    try:
        request = _parsed(_read(path))
    except FileNotFoundError:
        return None
    except OSError:  # a link, a folder, or what nobody may read
        pass
    try:
        path.unlink()
    except OSError:  # its command has given up
        return None
    return request


def _read(path: Path) -> bytes:
    """The begin of a file; waits for no pipe, and follows no link."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(file, LONGEST_REQUEST + 1)
    finally:
        os.close(file)


def _parsed(content: bytes) -> ScaleRequest | None:
    try:
        values = json.loads(content)
        request = ScaleRequest(**{**values, "leave": tuple(values["leave"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    texts, numbers = (request.number, request.by), (request.ranks, request.join, *request.leave)
    if any(type(text) is not str for text in texts) or any(type(n) is not int for n in numbers):
        return None
    asks_once = (request.ranks > 0) + (request.join > 0) + bool(request.leave) == 1
    return request if asks_once else None
