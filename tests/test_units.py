"""Numbers for people."""

from __future__ import annotations

import pytest

from allranks.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (25 * 2**20, "25.0 MiB"),
        (-(2**30), "-1.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (2.5e-5, "25 µs"),
        (0.0042, "4.2 ms"),
        (1, "1.0 s"),
        (59.9, "59.9 s"),
        (75, "1 min 15 s"),
        (3600, "60 min 0 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts() -> None:
    assert format_count(12345.6) == "12,346"
