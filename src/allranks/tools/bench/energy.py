"""Energy of the machine in joules, from the RAPL counters of Intel and AMD processors.

The kernel has a counter of microjoules for each package (`powercap`), which wraps around at its
largest value. It counts all processes on the package, and no memory, disks or accelerators. On
most machines only root can read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

COUNTERS = Path("/sys/class/powercap")
PACKAGES = "intel-rapl:[0-9]*"


def counters(folder: Path = COUNTERS) -> dict[Path, tuple[int, int]]:
    """The microjoules and the range of each package's counter; empty if unreadable."""
    readings = {}
    for path in folder.glob(PACKAGES):
        if path.name.count(":") > 1:  # a part of a package
            continue
        try:
            counted = int((path / "energy_uj").read_text())
            readings[path] = counted, int((path / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            return {}
    return readings


@dataclass
class EnergyMeter:
    """Counts from its creation; `joules` returns the energy since, `None` if unknown.

    It misses a counter that wraps around twice, which takes about an hour at full load.
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
