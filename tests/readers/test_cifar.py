"""CIFAR-10: the binary records of a folder and of the archive, and what is no record."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from allranks.errors import RequestError
from allranks.programs.readers.arrays import DEVIATION, MEAN, RECORD_BYTES, CifarImages
from allranks.programs.readers.stream import BadRecord

LABELS = [[3, 0, 9], [1, 2]]  # of the two files


def content(labels: list[int], seed: int) -> bytes:
    random = np.random.default_rng(seed)
    records = random.integers(256, size=(len(labels), RECORD_BYTES), dtype=np.uint8)
    records[:, 0] = labels
    return records.tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, labels in enumerate(LABELS, start=1):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(content(labels, number))
    (tmp_path / "test_batch.bin").write_bytes(content([7], 9))
    return tmp_path


def test_a_folder_and_the_archive_hold_the_same(folder: Path) -> None:
    path = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(folder.glob("*.bin"), reverse=True):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{file.name}")
            info.size = file.stat().st_size
            tar.addfile(info, io.BytesIO(file.read_bytes()))
    plain, packed = CifarImages(folder), CifarImages(path)
    assert len(plain) == len(packed) == 5
    assert [label for _, label in plain] == [label for _, label in packed] == [3, 0, 9, 1, 2]
    for (image, _), (other, _) in zip(plain, packed, strict=True):
        np.testing.assert_array_equal(image, other)
    assert [label for _, label in CifarImages(path, train=False)] == [7]
    image, _ = plain[4]
    pixels = np.frombuffer((folder / "data_batch_2.bin").read_bytes(), np.uint8)[-3072:]
    wanted = (pixels.reshape(3, 1024) / 255 - np.array(MEAN)[:, None]) / np.array(DEVIATION)[
        :, None
    ]
    assert image.dtype == np.float32
    np.testing.assert_allclose(image.reshape(3, 1024), wanted, rtol=1e-5, atol=1e-6)


def test_a_label_that_is_none_is_named_or_the_next_image_stands_in(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "data_batch_2.bin"
    path.write_bytes(content([1, 200], 2))
    with pytest.raises(BadRecord, match=rf"data_batch_2.bin, byte {RECORD_BYTES}: label 200"):
        CifarImages(folder)[4]
    data = CifarImages(folder, on_bad_record="skip")
    for _ in range(2):
        assert [label for _, label in data] == [
            3,
            0,
            9,
            1,
            3,
        ]  # the one after the last is the first
    assert data.bad_records.count == 1 == capsys.readouterr().err.count("label 200")


def test_a_file_that_is_cut_short_is_named_or_loses_its_last_record(folder: Path) -> None:
    path = folder / "data_batch_1.bin"
    path.write_bytes(content(LABELS[0], 1)[:-1])
    with pytest.raises(
        BadRecord, match=rf"data_batch_1.bin, byte {2 * RECORD_BYTES}: the file ends"
    ):
        CifarImages(folder)
    data = CifarImages(folder, on_bad_record="skip")
    assert [label for _, label in data] == [3, 0, 1, 2]


def test_if_all_records_are_bad_nothing_stands_in(folder: Path) -> None:
    (folder / "test_batch.bin").write_bytes(content([10, 11], 0))
    data = CifarImages(folder, train=False, on_bad_record="skip")
    with pytest.raises(RequestError, match=r"2 samples, all of them bad; .*label 11"):
        data[0]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data_batch_\*.bin"):
        CifarImages(tmp_path)
    with pytest.raises(RequestError, match="nowhere"):
        CifarImages(tmp_path / "nowhere")
