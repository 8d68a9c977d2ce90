"""What people read: numbers with their units, and text that is safe to print. Pure."""

from __future__ import annotations

import math
import re


def format_bytes(count: float) -> str:
    """`1536` -> `1.5 KiB`. Binary units, because memory and buckets are counted in them."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(i?)B")


def parse_bytes(text: str) -> int | None:
    """Bytes of `512MB` or `1.5GiB`, which is a power of two; else `None`."""
    match = SIZE.fullmatch(text)
    if match is None:
        return None
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))


def format_count(count: float) -> str:
    """`12345.6` -> `12,346`."""
    return f"{count:,.0f}"


LONGEST_NUMBER = 10
NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
DURATIONS = (
    re.compile(NUMBER),
    re.compile(rf"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:{NUMBER}s)?(?<=[dhms])"),
    re.compile(r"(?:(?:([0-9]+)-)?([0-9]+):)?([0-9]+):([0-9]+)"),
)


def parse_duration(text: str) -> float | None:
    """Seconds of `90`, `90s`, `1h30m`, `2d`, or Slurm's `1:30:00` and `1-12:00:00`; else `None`.

    `1h30` is none: it may mean minutes as well as seconds.
    """
    match = next((m for kind in DURATIONS if (m := kind.fullmatch(text))), None)
    if match is None:
        return None
    *above, seconds = (float(part or 0) for part in match.groups())
    for count, unit in zip(reversed(above), (60, 3600, 86400), strict=False):
        seconds += count * unit
    return seconds if math.isfinite(seconds) else None


DAYS = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")


def parse_slurm_time(text: str) -> float | None:
    """Seconds of a time limit as sbatch reads it (`20` are minutes, `1:30`, `1:30:00`, `2-12`,
    `2-12:30`, `2-12:30:00`), or of `90s`, `20m`, `1h30m`, `2d`; else `None`.
    """
    days = DAYS.fullmatch(text)
    if days is not None:
        count, hours, minutes, seconds = (int(part or 0) for part in days.groups())
        return float(((count * 24 + hours) * 60 + minutes) * 60 + seconds)
    if text.isascii() and text.isdigit():
        return float(int(text) * 60) if len(text) < LONGEST_NUMBER else None
    return None if re.fullmatch(NUMBER, text) else parse_duration(text)
