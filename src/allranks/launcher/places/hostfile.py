"""Files that list the hosts of a job and how many processes each may run, as other tools read them.

    node1 slots=4                 DeepSpeed, Open MPI
    node2 slots=4 max_slots=8     Open MPI
    node3:4                       MPICH, Intel MPI
    node4                         any of them: as many as the job says
    node5                         twice the same line, as batch systems write it: two slots
    node5
    # a comment

Pure but for `read_hostfile`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from allranks.errors import RequestError

NAME = re.compile(r"(?:[\w.-]+@)?(?:[\w.-]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]+)(?:%[\w.-]+)?")
BRACKETED = re.compile(r"((?:[\w.-]+@)?)\[([0-9a-fA-F:.]+(?:%[\w.-]+)?)\](?::(.*))?")
SLOTS, MOST_SLOTS = ("slots",), ("max_slots", "max-slots")
MOST = 100_000


@dataclass(frozen=True)
class HostSlots:
    """A host, with its `user@`, and how many processes it may run (`None`: no line says)."""

    host: str
    slots: int | None


@dataclass(frozen=True)
class _Line:
    number: int
    host: str
    slots: int | None


def read_hostfile(path: str | Path) -> tuple[HostSlots, ...]:
    """The hosts of the file, in its order; raises `RequestError` that names file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise RequestError(
            asked=f"the hosts in {path}",
            found=str(error),
            why="a hostfile is a text with a host on each line",
            do="check the path",
        ) from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str) -> tuple[HostSlots, ...]:
    """The hosts that `text` lists, in its order; `name` is how errors call the file."""
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if words:
            lines.append(_read_line(words, number, name))
    if not lines:
        raise RequestError(
            asked=f"the hosts in {name}",
            found="no host in it",
            why="a job needs at least one",
            do="write a host on each line, as `node1 slots=4`",
        )
    return tuple(_merged(host, lines, name) for host in dict.fromkeys(row.host for row in lines))


def _read_line(words: list[str], number: int, name: str) -> _Line:
    where = f"line {number} of {name}"
    host, slots = _host_of(words[0], where)
    most = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in (*SLOTS, *MOST_SLOTS):
            raise _wrong(where, repr(word), "after the host only slots= and max_slots= are known")
        if key in MOST_SLOTS:
            most = _count(value, where)
        elif slots is not None:
            raise _wrong(where, repr(word), "the slots of this host were said already")
        else:
            slots = _count(value, where)
    if most is not None and slots is not None and slots > most:
        raise _wrong(where, f"slots={slots}, max_slots={most}", "these are more than the most")
    return _Line(number, host, slots)


def _host_of(word: str, where: str) -> tuple[str, int | None]:
    """`node3:4` -> node3, 4; `[fe80::1]:4` is an IPv6 address in brackets."""
    bracketed = BRACKETED.fullmatch(word)
    if bracketed:
        host, count = bracketed[1] + bracketed[2], bracketed[3]
    elif word.count(":") == 1:
        host, _, count = word.partition(":")
    else:
        host, count = word, None
    if not NAME.fullmatch(host) or host.startswith("-"):
        raise _wrong(where, repr(word), "this is no name or address of a host")
    return host, None if count is None else _count(count, where)


def _count(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= MOST:
        raise _wrong(where, repr(text), f"slots are a whole number from 1 to {MOST}")
    return int(text)


def _merged(host: str, lines: list[_Line], name: str) -> HostSlots:
    """One host: its line, or as many slots as lines that do nothing but name it."""
    own = [row for row in lines if row.host == host]
    if len(own) == 1:
        return HostSlots(host, own[0].slots)
    if any(row.slots is not None for row in own):
        where = f"lines {' and '.join(str(row.number) for row in own)} of {name}"
        raise _wrong(where, f"{host!r} on each of them", "whether their slots add up is unclear")
    return HostSlots(host, len(own))


def _wrong(where: str, found: str, why: str) -> RequestError:
    return RequestError(
        asked=where,
        found=found,
        why=why,
        do="write a host on each line, as `node1 slots=4`, `node1:4` or `node1`",
    )
