"""Numbers for people, and durations from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import printable
from allranks.job.units import format_bytes, format_count, parse_duration, parse_slurm_time


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0", 0),
        ("1.5", 1.5),
        ("90s", 90),
        ("0.25s", 0.25),
        ("30m", 1800),
        ("1h30m", 5400),
        ("1h30m5s", 5405),
        ("2d", 172800),
        ("1d1h1m1.5s", 90061.5),
        ("1d1s", 86401),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("100:00:00", 360000),
        ("007", 7),
        ("1-12:00:00", 129600),
        ("2-1:2:3", 176523),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "s", "h", "m30", "1h30", "1d12", "30m1h", "1h1h", "-5", "+5", "1e3", "0x10"),
        *("1.5h", "1.", ".5", "5 s", " 5", "5 ", "5\n", "5s\n", "1:2:3:4", ":", "1:", ":1", "1:-1"),
        *(
            "1:1.5",
            "nan",
            "inf",
            "1_000",
            "1,000",
            "five",
            "1H",
            "²",
            "1:²",
            "१",
            "1:१",
            "५m",
            "１",
        ),
        *("9" * 400, "9" * 5000, "1:" + "9" * 400, "1:" + "9" * 5000, "9" * 400 + "d", "\0", "1\0"),
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_what_is_no_duration(text: str) -> None:
    """`1h30` too: half of its readers take it for minutes, the other half for seconds."""
    assert parse_duration(text) is None


@given(
    days=st.integers(0, 10**4),
    hours=st.integers(0, 10**4),
    minutes=st.integers(0, 10**4),
    seconds=st.integers(0, 10**4),
)
def test_every_way_to_write_a_duration_means_the_same(
    days: int, hours: int, minutes: int, seconds: int
) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert parse_duration(f"{days}d{hours}h{minutes}m{seconds}s") == total
    assert parse_duration(f"{days * 24 + hours}:{minutes}:{seconds}") == total
    assert parse_duration(f"{(days * 24 + hours) * 60 + minutes}:{seconds}") == total
    assert parse_duration(str(total)) == parse_duration(f"{total}s") == total
    assert parse_duration(f"{days}d{minutes}m") == days * 86400 + minutes * 60


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20", 1200),  # minutes, as for sbatch
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-12", 216_000),
        ("1-12:30", 131_400),
        ("1-12:30:05", 131_405),
        ("0-0:90", 5400),
        ("20s", 20),
        ("90m", 5400),
        ("2h", 7200),
        ("1h30m", 5400),
        ("7d", 604_800),
    ],
)
def test_time_limits_of_slurm(text: str, seconds: float) -> None:
    assert parse_slurm_time(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "1.5", "-5", "1-", "-1", "1-2-3", "1-2h", "1:2:3:4", "1h30", "²", "9" * 400],
)
def test_what_is_no_time_limit_of_slurm(text: str) -> None:
    assert parse_slurm_time(text) is None


@given(st.text() | st.text("0123456789dhms:.²१ \n-", max_size=12))
def test_any_text_is_a_duration_or_none(text: str) -> None:
    seconds = parse_duration(text)
    assert seconds is None or (type(seconds) is float and 0 <= seconds < float("inf"))
    assert seconds is None or set(text) <= set("0123456789.:dhms")


@given(st.text())
def test_what_is_printable_steers_no_terminal(line: str) -> None:
    shown = printable(line)
    assert all(c.isprintable() or c == "\t" for c in shown)
    assert shown == line or any(not c.isprintable() for c in line)
