"""IDX: what is written is read again, mapped where it can be,
and damage is told by file and byte."""

from __future__ import annotations

from pathlib import Path

import damage
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as made

from allranks.programs.readers.arrays import read_idx, read_labelled
from allranks.programs.readers.stream import BadRecord
from record_writers import write_idx

GOLDEN = bytes.fromhex("00000802 00000002 00000003 010203040506")  # by hand, from the format's page
KINDS = ["u1", "i1", "i2", "i4", "f4", "f8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx")


def test_a_file_made_by_hand(folder: Path) -> None:
    path = folder / "golden"
    path.write_bytes(GOLDEN)
    found = read_idx(path)
    assert found.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert isinstance(found, np.memmap)  # shared by the ranks of a machine
    torch.from_numpy(found).add_(1)  # which torch may write to; the file stays as it is
    assert path.read_bytes() == GOLDEN
    write_idx(path, np.array([[1, 2, 3], [4, 5, 6]], np.uint8))
    assert path.read_bytes() == GOLDEN


@settings(max_examples=40)
@given(
    array=st.sampled_from(KINDS).flatmap(
        lambda kind: made.arrays(kind, made.array_shapes(min_side=0, max_dims=4))
    ),
    packed=st.booleans(),
)
def test_round_trip(folder: Path, array: np.ndarray, packed: bool) -> None:
    path = folder / ("trip.gz" if packed else "trip")
    write_idx(path, array)
    found = read_idx(path)
    assert found.dtype == array.dtype and found.dtype.isnative and found.flags.writeable
    np.testing.assert_array_equal(found, array)


def test_a_file_of_another_length_is_refused(folder: Path) -> None:
    path = folder / "cut"
    path.write_bytes(GOLDEN + b"?")
    for length in damage.cut(path, [*range(len(GOLDEN)), len(GOLDEN) + 1]):
        with pytest.raises(BadRecord, match=r"cut, byte \d+: ") as caught:
            read_idx(path)
        assert caught.value.file == str(path)
        assert caught.value.place == f"byte {0 if length < 4 else min(length, len(GOLDEN))}"


def test_a_flipped_bit_in_the_header_is_seen(folder: Path) -> None:
    path = folder / "flipped"
    path.write_bytes(GOLDEN)
    for bit in damage.flipped(path, range(8 * 12)):
        if bit == 16:  # signed bytes: a header as good as the other
            continue
        with pytest.raises(BadRecord, match="flipped"):
            read_idx(path)


def test_a_flipped_bit_in_a_packed_file_never_changes_the_values(folder: Path) -> None:
    path = folder / "flipped.gz"
    write_idx(path, np.frombuffer(GOLDEN[12:], np.uint8).reshape(2, 3))
    checked = path.stat().st_size - 8  # where the checksum and the length of the content stand
    for bit in damage.flipped(path, range(8 * path.stat().st_size)):
        found, error = damage.until_bad(lambda: [read_idx(path).tolist()])
        if error is None:  # when or on what it was packed, or bits that fill up a byte
            assert found == [[[1, 2, 3], [4, 5, 6]]] and bit // 8 < checked
        else:
            assert error.file == str(path) and "byte" in error.place


def test_labels_have_to_be_classes_and_as_many_as_images(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels = folder / "images", folder / "labels.gz"
    write_idx(images, np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2))
    write_idx(labels, np.array([3, 10, 0, 9], np.uint8))
    with pytest.raises(BadRecord, match=r"labels.gz, byte 9: label 10, of 10 classes"):
        read_labelled(images, labels, 10, "stop")
    pixels, numbers = read_labelled(images, labels, 10, "skip")
    assert numbers.tolist() == [3, 0, 9] and pixels[:, 0, 0].tolist() == [0, 8, 12]
    assert "byte 9: label 10" in capsys.readouterr().err
    write_idx(labels, np.zeros(3, np.uint8))
    with pytest.raises(BadRecord, match="4 images"):
        read_labelled(images, labels, 10, "skip")
