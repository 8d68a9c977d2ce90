"""What every benchmark here shares: order of runs, honest statistics, and one record per run.

Contenders run interleaved (A B, B A, …) in one session, and only what one round measured side by
side is compared: the ratio of each pair, then the median of the ratios. Its confidence interval
comes from order statistics (the binomial interval of a median): it assumes no distribution, and
it is never narrower than the data allow; where there are too few pairs for 95 %, it is the whole
range and the confidence that it reaches is recorded instead.

Progress goes to stderr; the record to `records/NAME-DATE.json`, units in its keys; the last line
of stdout is one JSON object. Standard library only.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parent / "records"
PACKAGES = ("torch", "tensorflow", "keras", "allranks", "accelerate", "lightning-fabric", "numpy")
SCHEMA = 1
ENOUGH = 0.9  # confidence below which no bar is called met or missed: four pairs or fewer


@dataclass(frozen=True)
class Interval:
    """The median of `pairs` values, and an interval that holds the true one with `confidence`."""

    median: float
    low: float
    high: float
    confidence: float
    pairs: int


@dataclass(frozen=True)
class Comparison:
    """One contender beside another, from pairs: `kind` is `ratio` or `difference_us`.

    A `value_s` or `value_us` stands beside nothing but its bar; `over` is empty.

    `met` is `yes` if the whole interval is within the bar, `no` if none of it is, otherwise (and
    where the pairs are too few for an interval) `undecided`; `null` where no bar was set.
    """

    what: str
    kind: str
    metric: str
    of: str
    over: str
    interval: Interval
    bar: float | None = None

    @property
    def met(self) -> str | None:
        if self.bar is None:
            return None
        if self.interval.confidence < ENOUGH:
            return "undecided"
        if self.interval.high <= self.bar:
            return "yes"
        return "no" if self.interval.low > self.bar else "undecided"

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def median_interval(values: list[float], confidence: float = 0.95) -> Interval:
    """The median with its order-statistics interval: the k-th smallest and the k-th largest."""
    ordered, count = sorted(values), len(values)

    def covered(k: int) -> float:
        """How often the median lies between the k-th smallest and the k-th largest, k from 1."""
        return 1.0 - 2 * sum(math.comb(count, i) for i in range(k)) / float(2**count)

    k = max((k for k in range(1, count // 2 + 1) if covered(k) >= confidence), default=1)
    return Interval(
        statistics.median(ordered), ordered[k - 1], ordered[count - k], max(covered(k), 0.0), count
    )


def ratio(
    what: str, metric: str, of: str, over: str, pairs: list[tuple[float, float]], bar: float | None
) -> Comparison:
    """The median of the ratios `of` / `over`, pair by pair."""
    interval = median_interval([a / b for a, b in pairs])
    return Comparison(what, "ratio", metric, of, over, interval, bar)


def difference_us(
    what: str, metric: str, of: str, over: str, pairs: list[tuple[float, float]], bar: float | None
) -> Comparison:
    """The median of the differences `of` - `over`, pair by pair, of values in seconds."""
    interval = median_interval([(a - b) * 1e6 for a, b in pairs])
    return Comparison(what, "difference_us", metric, of, over, interval, bar)


def value_s(what: str, metric: str, of: str, values: list[float], bar: float | None) -> Comparison:
    """The median of `values`, in seconds, against a bar that is in seconds itself."""
    return Comparison(what, "value_s", metric, of, "", median_interval(values), bar)


def value_us(what: str, metric: str, of: str, values: list[float], bar: float | None) -> Comparison:
    """The median of `values`, in microseconds, against a bar that is in microseconds itself."""
    return Comparison(what, "value_us", metric, of, "", median_interval(values), bar)


def order_of(names: list[str], turn: int) -> list[str]:
    """Who goes first in round `turn`: every second round backwards, and rotated from two to two."""
    shift = (turn // 2) % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated if turn % 2 == 0 else rotated[::-1]


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What the numbers were taken on. Unknown is `null`."""
    load_1min, _, _ = os.getloadavg()
    return {
        "cpu": _first(Path("/proc/cpuinfo"), "model name"),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": commit_of(Path(__file__).resolve().parent),
        "load_1min_at_start": round(load_1min, 2),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def start_record(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A new record, with the machine in it; says both."""
    record = {"schema": SCHEMA, "benchmark": name, "machine": machine(), "settings": settings}
    say(json.dumps(record["machine"], indent=1))
    say(f"settings {json.dumps(settings)}")
    return record


def finish_record(record: dict[str, Any], comparisons: list[Comparison], folder: Path) -> None:
    """Write the record, say the comparisons, and print the line for machines.

    The samples of every single run are in the file; the line leaves them out.
    """
    record["comparisons"] = [comparison.to_data() for comparison in comparisons]
    path = _new_path(folder, record["benchmark"])
    path.write_text(json.dumps(record, indent=1) + "\n")
    for comparison in comparisons:
        say(in_words(comparison))
    say(f"record {path.name}")
    line = {key: value for key, value in record.items() if key != "samples"}
    print(json.dumps({**line, "record": path.name}))


def in_words(comparison: Comparison) -> str:
    """One comparison on one line."""
    i, unit = (
        comparison.interval,
        {"difference_us": " us", "value_s": " s", "value_us": " us"}.get(comparison.kind, ""),
    )
    digits = 0 if comparison.kind == "difference_us" else 3
    sign = {"difference_us": f" - {comparison.over}", "ratio": f" / {comparison.over}"}
    text = (
        f"{comparison.what}, {comparison.metric}: {comparison.of}{sign.get(comparison.kind, '')}"
        f" = {i.median:.{digits}f}{unit} [{i.low:.{digits}f}, {i.high:.{digits}f}] at "
        f"{i.confidence:.0%}, {i.pairs} pairs"
    )
    if comparison.bar is not None:
        text += f", bar {comparison.bar:g}{unit}: {comparison.met}"
    return text


def _new_path(folder: Path, name: str) -> Path:
    """A file that is not there yet: a record is never written over."""
    folder.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    number, path = 1, folder / f"{name}-{day}.json"
    while path.exists():
        number += 1
        path = folder / f"{name}-{day}-{number}.json"
    return path


def _first(path: Path, key: str) -> str | None:
    """The value of the first `key : value` line of a file, or `None`."""
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout, with `+changes` if files differ from it."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+changes", "--abbrev=12"],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
