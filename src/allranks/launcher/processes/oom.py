"""Did the kernel run out of memory? Its counters say so; a rank that it killed cannot.

Two counters: that of the control group of this process, whose kills are ours, and that of the
whole machine, whose kills may have been others'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
MACHINE = Path("/proc/vmstat")


@dataclass(frozen=True)
class Kills:
    """How many processes the kernel has killed for want of memory; `None`: it does not say."""

    in_our_group: int | None
    on_this_machine: int | None

    @classmethod
    def now(cls) -> Kills:
        return cls(_in_our_group(), _counter(MACHINE))

    def since(self, before: Kills) -> str:
        """What to say of a rank killed between `before` and these counts; "" for nothing."""
        if _rose(before.in_our_group, self.in_our_group):
            return "out of memory: the kernel killed it at the limit of its control group"
        if _rose(before.on_this_machine, self.on_this_machine):
            return "probably out of memory: the kernel killed a process of this machine for it"
        return ""


def _rose(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _in_our_group() -> int | None:
    """Version 1 of control groups counts in memory.oom_control, version 2 in memory.events."""
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            return _counter_in(MOUNT / "memory", path, "memory.oom_control")
        if not kinds and (MOUNT / "cgroup.controllers").exists():
            return _counter_in(MOUNT, path, "memory.events")
    return None


def _counter_in(mount: Path, group: str, name: str) -> int | None:
    """The counter of a group; inside a container the mount may begin at that very group."""
    inside = mount / group.lstrip("/") / name
    return _counter(inside if inside.exists() else mount / name)


def _counter(path: Path) -> int | None:
    try:
        rows = dict(line.split()[:2] for line in path.read_text().splitlines())
        return int(rows["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
