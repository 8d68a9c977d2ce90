"""Numbers for people."""

from __future__ import annotations

import pytest

from allranks.units import format_bytes, format_count


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


def test_counts() -> None:
    assert format_count(12345.6) == "12,346"
