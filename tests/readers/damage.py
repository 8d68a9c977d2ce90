"""Damage for the tests of the readers: a file with one bit turned, or cut short, once for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from allranks.programs.readers.stream import BadRecord


def flipped(path: Path, bits: Iterable[int]) -> Iterator[int]:
    """Turn each of these bits alone in a file; afterwards the file is whole again."""
    whole = path.read_bytes()
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        yield bit
    path.write_bytes(whole)


def a_bit_of_each_byte(path: Path) -> list[int]:
    return [8 * byte + byte % 8 for byte in range(path.stat().st_size)]


def cut(path: Path, lengths: Iterable[int]) -> Iterator[int]:
    """Cut a file to each of these lengths; afterwards it is whole again."""
    whole = path.read_bytes()
    for length in lengths:
        path.write_bytes(whole[:length])
        yield length
    path.write_bytes(whole)


def until_bad(read: Callable[[], Iterable[Any]]) -> tuple[list[Any], BadRecord | None]:
    """What is read before the first bad record, and its error, if there is one."""
    found: list[Any] = []
    try:
        for item in read():
            found.append(item)
    except BadRecord as error:
        return found, error
    return found, None
