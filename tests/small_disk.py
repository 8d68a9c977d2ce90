"""A disk that is soon full, for the tests that fill one. Needs no framework."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from allranks.training.callback import Callback

FILLED_AFTER = 3
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


def small_disk(folder: str, options: str) -> None:
    """Mount a disk with these options on `folder`, seen by this process and its children only."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()

    def must(result: int) -> None:
        assert result == 0, os.strerror(ctypes.get_errno())

    must(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    must(libc.mount(b"none", folder.encode(), b"tmpfs", 0, options.encode()))


def fill(folder: Path) -> None:
    """Take what room is left on the disk of `folder`."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


class Filler(Callback):
    """The leader fills the disk of the run folder after a step."""

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if result.batch_index == FILLED_AFTER and trainer.world.is_leader:
            fill(Path(trainer.job.run_dir).parent)
