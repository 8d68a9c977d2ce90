"""The file that a snapshot becomes: written once, whole and lasting, or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from allranks.checkpoint.folder import BLOCK_BYTES
from allranks.checkpoint.manifest import DIGEST_BYTES, SavedFile, nothing
from allranks.checkpoint.tensor_file import Layout

Tell = Callable[[str], None]


def write_file(path: Path, layout: Layout, data: memoryview, reach: Tell = nothing) -> SavedFile:
    """Write a new file, whole and lasting when this returns; raises OSError, and then it is gone.

    All of its room is taken before the first byte is written: a full disk shows at once.
    """
    total = len(layout.header) + layout.data_bytes
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, total)
        digest = _write(fd, memoryview(layout.header), data, reach)
        reach("save:fsync")
        os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return SavedFile(total, digest)


def _write(fd: int, header: memoryview, data: memoryview, reach: Tell) -> str:
    running = blake2b(digest_size=DIGEST_BYTES)
    half = len(data) // 2
    _write_all(fd, header, running)
    _write_all(fd, data[:half], running)
    reach("save:half")
    _write_all(fd, data[half:], running)
    return running.hexdigest()


def _write_all(fd: int, data: memoryview, running: blake2b) -> None:
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        running.update(block)
        while block:
            block = block[os.write(fd, block) :]
