"""Tar shards: neighbours with one name are a sample, and an archive that is not whole is told."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import damage
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.programs.readers.stream import BadRecord
from allranks.programs.readers.tar_shards import TarShards

MEMBERS = [
    ("a/0001.jpg", b"picture"),
    ("a/0001.cls", b"3"),
    ("a/README", b"no sample"),
    ("0002.jpg", bytes(600)),
    ("0002.Seg.PNG", b""),
]
SAMPLES: list[dict[str, Any]] = [
    {"__key__": "a/0001", "jpg": b"picture", "cls": b"3"},
    {"__key__": "0002", "jpg": bytes(600), "seg.png": b""},
]
DATA = [512, 1536, 2560, 3584]  # where the members' bytes start; the last has none


def write(path: Path, members: list[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> None:
    mode = "w:gz" if path.suffix == ".gz" else "w"
    with tarfile.open(path, mode, format=kind) as tar:  # type: ignore[call-overload]
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def stream(path: Path, policy: str = "stop") -> TarShards:
    return TarShards([path], 1, dict, on_bad_record=policy)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tar")


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_neighbours_with_one_name_are_a_sample(folder: Path, name: str, kind: int) -> None:
    write(folder / name, MEMBERS, kind)
    assert list(stream(folder / name).open(0, 0, 0, 0)) == SAMPLES


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="./\0"), min_size=1, max_size=120)
GROUPS = st.dictionaries(NAMES, st.lists(st.binary(max_size=600), min_size=1, max_size=3))


@settings(max_examples=30)
@given(groups=GROUPS, kind=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_round_trip(folder: Path, groups: dict[str, list[bytes]], kind: int) -> None:
    """Names longer than a header holds, and of any letters, included."""
    members = [
        (f"{key}.{n}", part) for key, parts in groups.items() for n, part in enumerate(parts)
    ]
    write(folder / "trip.tar", members, kind)
    read = stream(folder / "trip.tar")
    found = list(read.open(0, 0, 0, 0))
    assert found == [
        {"__key__": key} | {str(n): part for n, part in enumerate(parts)}
        for key, parts in groups.items()
    ]
    parts_of = [[r.content for r in read.records(read.files[0], part, 2)] for part in range(2)]
    assert parts_of == [found[0::2], found[1::2]]


def test_a_flipped_bit_of_a_header_never_ends_an_archive_quietly(folder: Path) -> None:
    """Nor changes a sample. The bytes of the members have no checksum in a tar file."""
    path = folder / "flipped.tar"
    write(path, MEMBERS, tarfile.USTAR_FORMAT)
    headers = [0, 1024, 2048, 3072, 4608, 5120]  # the last is the end
    assert path.read_bytes()[5120 : 5120 + 512] == bytes(512)
    bits = [8 * (start + byte) + byte % 8 for start in headers for byte in range(0, 512, 5)]
    quiet = 0
    for _ in damage.flipped(path, bits):
        found, error = damage.until_bad(lambda: stream(path).open(0, 0, 0, 0))
        assert found == SAMPLES[: len(found)]
        if error is None:
            assert len(found) == len(SAMPLES)
            quiet += 1
        else:
            assert error.file == str(path) and "byte" in error.place
    assert quiet <= 6  # a blank behind the number of a checksum may as well be another letter


def test_an_archive_cut_short_is_told_wherever_it_was_cut(folder: Path) -> None:
    path = folder / "cut.tar"
    write(path, MEMBERS, tarfile.USTAR_FORMAT)
    for _ in damage.cut(path, range(0, 5120 + 512, 61)):
        found, error = damage.until_bad(lambda: stream(path).open(0, 0, 0, 0))
        assert found == SAMPLES[: len(found)]
        assert error is not None and error.file == str(path) and "byte" in error.place


def test_a_flipped_bit_of_a_packed_archive_is_seen(folder: Path) -> None:
    """The checksum of gzip is found at the end: a sample may have been wrong before that."""
    path = folder / "flipped.tar.gz"
    write(path, MEMBERS)
    fixed = range(8 * 10, 8 * path.stat().st_size, 7)  # behind the head of gzip
    quiet = 0
    for _ in damage.flipped(path, fixed):
        found, error = damage.until_bad(lambda: stream(path).open(0, 0, 0, 0))
        assert error is not None or found == SAMPLES
        quiet += error is None
    assert quiet < len(fixed) / 4  # the name of the file, and what fills up a byte


def test_members_that_make_no_sample_are_told_or_left_out(folder: Path) -> None:
    path = folder / "odd.tar"
    apart = [
        ("1.a", b"x"),
        ("2.a", b"y"),
        ("1.b", b"z"),
        ("3.a", b"v"),
        ("3.A", b"w"),
        ("4.a", b""),
    ]
    write(path, apart)
    with pytest.raises(BadRecord, match=r"odd.tar, member 1.b at byte 2048: .* apart"):
        list(stream(path).open(0, 0, 0, 0))
    read = stream(path, "skip")
    assert [sample["__key__"] for sample in read.open(0, 0, 0, 0)] == ["1", "2", "4"]
    assert [error.problem for error in read.bad_records.listed] == [
        "sample 1 has members apart from each other",
        "sample 3 has two members .a",
    ]
