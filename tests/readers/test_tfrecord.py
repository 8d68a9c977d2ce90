"""TFRecord: checksums and Examples as others write them, and no damage that goes unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import damage
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.programs.readers.stream import BadRecord
from allranks.programs.readers.tfrecord import (
    TFRecords,
    crc32c,
    parse_example,
)
from record_writers import make_example, write_tfrecords

RECORDS = [b"", b"allranks", bytes(range(200)), b"last"]
WRITTEN = bytes.fromhex(  # the first three of them, as TensorBoard's writer frames them
    "000000000000000029039807d8ea82a2"
    "0800000000000000ff86240f616c6c72616e6b73b68dd86c"
    f"c800000000000000fdaa9078{RECORDS[2].hex()}ef9c6a6d"
)
EXAMPLE = bytes.fromhex(  # serialized by Google's protobuf
    "0a660a110a05696d61676512080a060a0200ff0a000a2d0a056c6162656c12241a220a2000ffffffffffffffffff"
    "01ac02ffffffffffffffff7f808080808080808080010a0a0a046e6f6e6512020a000a160a06776569676874120c"
    "120a0a080000003f000050c0"
)


def stream(path: Path, policy: str = "stop") -> TFRecords:
    return TFRecords([path], 1, bytes, on_bad_record=policy)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "a.tfrecord"


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_the_checksums_of_rfc_3720(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum


def test_without_the_package_it_says_which_extra_has_it() -> None:
    """In a fresh interpreter, as a task that imports the reader would find it."""
    code = (
        "import sys; sys.modules['google_crc32c'] = None\n"
        "from allranks.job.program import find_program\n"
        "try: find_program('allranks.programs.readers.tfrecord:TFRecords')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "RequestError asked: to read or write TFRecord files",
        "found: no package google_crc32c in this Python",
        "why:   it computes the two checksums that each record has",
        "do:    pip install 'allranks[tfrecord]'",
    ]


def test_files_are_framed_as_others_frame_them(path: Path) -> None:
    write_tfrecords(path, RECORDS[:3])
    assert path.read_bytes() == WRITTEN
    assert list(stream(path).open(0, 0, 0, 0)) == RECORDS[:3]


@settings(max_examples=40)
@given(records=st.lists(st.binary(max_size=300), max_size=6), packed=st.booleans())
def test_round_trip(path: Path, records: list[bytes], packed: bool) -> None:
    target = path.with_name("trip.gz" if packed else "trip")
    write_tfrecords(target, records)
    assert list(stream(target).open(0, 0, 0, 0)) == records
    parts = [list(stream(target).records(str(target), part, 3)) for part in range(3)]
    for part, found in enumerate(parts):
        assert [record.content for record in found] == records[part::3]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["flipped", "flipped.gz"])
def test_a_flipped_bit_is_seen_wherever_it_is(path: Path, name: str) -> None:
    """And what comes before it is right. Packed, a bit may say nothing of the content."""
    target = path.with_name(name)
    write_tfrecords(target, RECORDS)
    for _ in damage.flipped(target, damage.a_bit_of_each_byte(target)):
        found, error = damage.until_bad(lambda: stream(target).open(0, 0, 0, 0))
        assert found == RECORDS[: len(found)]
        if error is None:
            assert found == RECORDS and name.endswith(".gz")
        else:
            assert error.file == str(target) and "byte" in error.place


def test_a_file_cut_short_gives_the_records_before_the_cut(path: Path) -> None:
    target = path.with_name("cut")
    write_tfrecords(target, RECORDS)
    ends = [0, 16, 40, 256]
    for length in damage.cut(target, range(276)):
        whole = sum(length >= end for end in ends) - 1
        read = stream(target, "skip")
        assert list(read.open(0, 0, 0, 0)) == RECORDS[:whole]
        assert [e.place for e in read.bad_records.listed] == (
            [] if length in ends else [f"byte {ends[whole]}"]
        )


def test_one_bad_record_is_left_out_and_a_bad_length_ends_the_file(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = path.with_name("skipped")
    write_tfrecords(target, RECORDS)
    damaged = bytearray(target.read_bytes())
    damaged[16 + 12] ^= 1  # in the bytes of the second record
    target.write_bytes(damaged)
    with pytest.raises(BadRecord, match="skipped, byte 16: a record of 8 bytes"):
        list(stream(target).open(0, 0, 0, 0))
    read = stream(target, "skip")
    for _ in range(2):
        assert list(read.open(0, 0, 0, 0)) == [RECORDS[0], *RECORDS[2:]]
    assert capsys.readouterr().err.count("byte 16") == 1 == read.bad_records.count
    damaged[40] ^= 1  # in the length of the third
    target.write_bytes(damaged)
    assert list(read.open(0, 0, 0, 0)) == RECORDS[:1]
    assert "nothing behind it" in read.bad_records.listed[1].problem


def test_an_example_as_protobuf_writes_it() -> None:
    found = parse_example(EXAMPLE)
    assert list(found) == ["image", "label", "none", "weight"]
    assert found["image"] == [b"\0\xff", b""] and found["none"] == []
    assert found["label"].dtype == np.int64 and found["weight"].dtype == np.float32  # type: ignore[union-attr]
    assert list(found["label"]) == [0, -1, 300, 2**63 - 1, -(2**63)]
    assert list(found["weight"]) == [0.5, -3.25]
    assert make_example(found) == EXAMPLE


FEATURES = st.one_of(
    st.lists(st.binary(max_size=20), max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4).map(
        lambda values: np.array(values, np.int64)
    ),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4).map(
        lambda values: np.array(values, np.float32)
    ),
)


@settings(max_examples=40)
@given(features=st.dictionaries(st.text(max_size=5), FEATURES, max_size=4))
def test_examples_make_the_round_trip(features: dict[str, object]) -> None:
    found = parse_example(make_example(features))  # type: ignore[arg-type]
    assert {name: list(values) for name, values in found.items()} == {
        name: list(values)  # type: ignore[call-overload]
        for name, values in features.items()
    }


def test_numbers_one_by_one_and_unknown_fields_are_read_as_well() -> None:
    """Lists that are not packed, fields of later versions, and a list in two pieces."""
    integers = b"\x08\x05\x08\x07" + b"\x0a\x01\x09"  # 5, 7, and 9 packed
    floats = b"\x0d" + np.float32(1.5).tobytes()
    unknown = b"\x98\x06\x2a" + b"\xa1\x06" + bytes(8) + b"\xa5\x06" + bytes(4)

    def feature(kind: int, content: bytes) -> bytes:
        body = bytes([kind << 3 | 2, len(content)]) + content + unknown
        entry = b"\x0a\x01" + b"?f"[kind == 2 :][:1] + b"\x12" + bytes([len(body)]) + body
        return b"\x0a" + bytes([len(entry)]) + entry

    features = feature(3, integers) + feature(2, floats)
    found = parse_example(b"\x0a" + bytes([len(features)]) + features + unknown)
    assert {name: list(values) for name, values in found.items()} == {"?": [5, 7, 9], "f": [1.5]}


@given(data=st.binary(max_size=60) | st.integers(0, len(EXAMPLE)).map(lambda n: EXAMPLE[:n]))
def test_what_is_no_example_is_a_value_error_or_nothing(data: bytes) -> None:
    try:
        parse_example(data)
    except ValueError:
        return
