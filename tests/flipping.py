"""Damage to a file, as a failing disk does it."""

from __future__ import annotations

import os
from pathlib import Path


def flip_bit(path: Path, byte: int) -> None:
    """Flip the lowest bit of one byte of a file; a negative `byte` counts from its end."""
    with open(path, "r+b") as file:
        file.seek(byte, os.SEEK_END if byte < 0 else os.SEEK_SET)
        where = file.tell()
        value = file.read(1)[0]
        file.seek(where)
        file.write(bytes([value ^ 1]))
