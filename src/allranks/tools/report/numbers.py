"""Numbers as a page shows them: few digits, a thin count of seconds, and what is not known."""

from __future__ import annotations

import math

UNKNOWN = "not recorded"
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def format_number(value: float, digits: int = 4) -> str:
    """`0.98611` -> `0.9861`, `5419.4` -> `5,419`, `3e-05` -> `3e-05`, `nan` -> `nan`."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def format_seconds(seconds: float) -> str:
    """`0.0312` -> `31 ms`, `2.93` -> `2.93 s`, `192` -> `3 min 12 s`, `3900` -> `1 h 05 min`."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if round(seconds) < MINUTE_S:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S:02d} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S:02d} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S:02d} h"


def format_percent(share: float) -> str:
    """`0.4312` -> `43.1 %`."""
    return f"{100 * share:.1f} %"


def counted(count: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
