"""Joules that the machine has taken, where it counts them and lets us read: Intel's and AMD's RAPL.

The kernel shows a counter of microjoules for each package (`powercap`), which begins again at its
largest value. It counts the package, whoever computes on it; of memory, disks and accelerators it
knows nothing. Most machines let root alone read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

COUNTERS = Path("/sys/class/powercap")
PACKAGES = "intel-rapl:[0-9]*"


def counters(folder: Path = COUNTERS) -> dict[Path, tuple[int, int]]:
    """Of each package the microjoules and the range of the counter; empty where unreadable."""
    found = {}
    for path in folder.glob(PACKAGES):
        if path.name.count(":") > 1:  # a part of a package
            continue
        try:
            counted = int((path / "energy_uj").read_text())
            found[path] = counted, int((path / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            return {}
    return found


@dataclass
class EnergyMeter:
    """Counts from the moment it is made; `joules` says how many since, `None` where nobody knows.

    A counter that begins again twice is not noticed: that takes about an hour at full load.
    """

    folder: Path = COUNTERS
    began: dict[Path, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.began = counters(self.folder)

    def joules(self) -> float | None:
        now = counters(self.folder)
        if not now or now.keys() != self.began.keys():
            return None
        total = 0
        for path, (counted, whole) in now.items():
            before = self.began[path][0]
            total += counted - before if counted >= before else counted - before + whole
        return total / 1e6
