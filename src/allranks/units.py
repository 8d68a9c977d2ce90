"""What people read: numbers with their units, and text that is safe to print. Pure."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """`1536` -> `1.5 KiB`. Binary units, because memory and buckets are counted in them."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_count(count: float) -> str:
    """`12345.6` -> `12,346`."""
    return f"{count:,.0f}"


def printable(line: str) -> str:
    """A line that cannot steer a terminal: control characters are shown, not sent."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line)
