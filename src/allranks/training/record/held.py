"""The most memory that a process has had in use at once, since it began: of the host, of a device.

Each rank says it with its event `done` or `stopped`, a process of another role in an event of its
own. On the host it is what the kernel has counted
(`VmHWM`): memory of its own, and pages that it shares with others, which are counted in each of
them. So ranks that come from one fork server all count the libraries that it has loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
PEAK = "VmHWM:"
ENDS = ("done", "stopped", "held")


@dataclass(frozen=True)
class Held:
    """The peaks of one process in bytes; `None` where nobody counts."""

    host_bytes: int | None
    device_bytes: int | None = None

    def to_data(self) -> dict[str, int | None]:
        """For an event."""
        return asdict(self)


def held_at_most(device_bytes: int | None = None, status: Path = STATUS) -> Held:
    """The peaks of this process; what it held on its device, the caller says."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split() for line in lines if line.startswith(PEAK)]
    return Held(int(found[0][1]) * 1024 if found else None, device_bytes)


def held_in(events: Iterable[dict[str, Any]]) -> dict[int, Held]:
    """The peaks of each rank by its last word in `events`; those that said nothing are left out."""
    found: dict[int, Held] = {}
    for event in events:
        said = event.get("memory")
        if event["event"] in ENDS and event["rank"] is not None and said:
            found[event["rank"]] = Held(said["host_bytes"], said["device_bytes"])
    return found
