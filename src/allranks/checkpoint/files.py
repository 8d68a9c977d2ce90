"""Atomic writes of files, and JSON of values that may not be finite."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_whole(
    path: Path, content: bytes | Iterable[bytes | bytearray], mode: int = 0o666
) -> None:
    """Write a file atomically: to a temporary name in its folder, fsync, rename.

    The content may come in parts; the file is there whole, or not at all.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # the disk is full
        temporary.unlink(missing_ok=True)
        raise


_encode = json.JSONEncoder(allow_nan=False).encode


def as_json(value: Any) -> str:
    """One line of JSON; a number that is not finite becomes the text `nan`, `inf` or `-inf`."""
    try:
        return _encode(value)
    except ValueError:
        return _encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def fsync_folder(folder: Path) -> None:
    """Sync the names in a folder, as fsync does for the content of a file."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
