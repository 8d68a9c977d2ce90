"""How torch gets the pretended device in any process: as a backend that is installed beside it."""

from __future__ import annotations

from pathlib import Path

from pretended import backend, streams

ENTRY_POINT = "[torch.backends]\npretended = pretended.plug:load\n"
NAME = "Metadata-Version: 2.1\nName: pretended\nVersion: 1\n"


def load() -> None:
    """Called by torch when it is imported: one device."""
    streams.DEVICES = 1
    backend.install()


def installed_in(folder: Path) -> Path:
    """What pip would leave there; a process with `folder` in its path has the device."""
    about = folder / "pretended-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(NAME)
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    return folder
