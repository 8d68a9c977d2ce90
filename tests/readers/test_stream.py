"""Streams over files: every record in one shard, an order that is a function, an exact skip."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import reader_tasks
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.programs.readers.stream import BadRecord
from allranks.programs.readers.tfrecord import TFRecords
from conftest import Train
from record_writers import make_example, write_tfrecords

PER_FILE = 7


def write_files(folder: Path) -> None:
    """The files of the task; the last record of each has no inputs."""
    random = np.random.default_rng(0)
    for n in range(reader_tasks.FILES):
        rows = random.normal(size=(reader_tasks.PER_FILE, reader_tasks.FEATURES)).astype(np.float32)
        records = [make_example({"inputs": row}) for row in rows]
        write_tfrecords(folder / f"{n}.tfrecord", [*records, make_example({})])


def number(record: bytes) -> int:
    """The number that a record is; one that is divisible by 10 is bad."""
    value = int(record)
    if not value % 10:
        raise ValueError(f"{value} is divisible by 10")
    return value


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """12 files of 7 numbers each, from 0."""
    folder = tmp_path_factory.mktemp("stream")
    paths = [folder / f"{n:02}.tfrecord" for n in range(12)]
    for n, path in enumerate(paths):
        write_tfrecords(path, [b"%d" % k for k in range(n * PER_FILE, (n + 1) * PER_FILE)])
    return paths


@settings(max_examples=40)
@given(
    count=st.integers(1, 12),
    shards=st.integers(1, 7),
    buffer=st.sampled_from([0, 1, 3, 100]),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_record_is_in_one_shard(
    files: list[Path], count: int, shards: int, buffer: int, shuffle: bool, epoch: int
) -> None:
    data = TFRecords(files[:count], shards, int, shuffle=shuffle, buffer=buffer)
    found = [list(data.open(shard, epoch, 5, 0)) for shard in range(shards)]
    assert sorted(itertools.chain(*found)) == list(range(count * PER_FILE))
    lengths = [len(part) for part in found]
    if count < shards:  # files cut into parts, so that no shard is left without
        assert min(lengths) > 0
    again = TFRecords(files[:count][::-1], shards, int, shuffle=shuffle, buffer=buffer)
    assert list(again.open(0, epoch, 5, 0)) == found[0]


def test_the_order_follows_from_seed_and_epoch(files: list[Path]) -> None:
    data = TFRecords(files, 2, int)

    def order(epoch: int, seed: int) -> list[int]:
        return list(data.open(0, epoch, seed, 0)) + list(data.open(1, epoch, seed, 0))

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9
    first = [k // PER_FILE for k in order(0, 0)[::PER_FILE]]
    assert [k // PER_FILE for k in order(0, 0)] == [f for f in first for _ in range(PER_FILE)]
    plain = TFRecords(files, 1, int, shuffle=False)
    assert list(plain.open(0, 3, 7, 0)) == list(range(84))
    buffered = list(TFRecords(files, 1, int, shuffle=False, buffer=10).open(0, 3, 7, 0))
    assert buffered != sorted(buffered) and sorted(buffered) == list(range(84))
    assert all(k <= at + 10 for at, k in enumerate(buffered))  # none before it was read


@settings(max_examples=30)
@given(skip=st.integers(0, 50), buffer=st.sampled_from([0, 5]), shards=st.integers(1, 3))
def test_a_skip_goes_on_where_the_stream_was_left(
    files: list[Path], skip: int, buffer: int, shards: int
) -> None:
    """With records that are passed over too: only good ones count."""
    data = TFRecords(files, shards, number, buffer=buffer, on_bad_record="skip")
    whole = list(data.open(0, 1, 2, 0))
    assert all(k % 10 for k in whole)
    assert list(data.open(0, 1, 2, skip)) == whole[skip:]
    good = TFRecords(files, shards, int, buffer=buffer)
    assert list(good.open(0, 1, 2, skip)) == list(
        itertools.islice(good.open(0, 1, 2, 0), skip, None)
    )


def test_a_record_that_cannot_be_decoded_is_named(files: list[Path]) -> None:
    data = TFRecords(files[:2], 1, number, shuffle=False)
    with pytest.raises(BadRecord, match=r"00.tfrecord, byte 0: ValueError: 0 is divisible"):
        next(data.open(0, 0, 0, 0))


def test_what_cannot_be_a_stream_is_refused(files: list[Path]) -> None:
    with pytest.raises(RequestError, match=r"slice 2 of TFRecords(.|\n)*shards=self.shards"):
        TFRecords(files, 2, int).open(2, 0, 0, 0)
    with pytest.raises(RequestError, match="no file"):
        TFRecords([], 2, int)
    with pytest.raises(RequestError, match=r"99.tfrecord"):
        TFRecords([*files, files[0].with_name("99.tfrecord")], 2, int)
    with pytest.raises(RequestError, match="passed over"):
        TFRecords(files, 2, int, on_bad_record="ignore")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_job_over_records_does_not_know_the_ranks(train: Train, tmp_path: Path) -> None:
    """Three files for four shards, one record that is passed over, and a buffer."""
    task = f"{Path(__file__).with_name('reader_tasks.py')}:Records"
    write_files(tmp_path)
    settings_ = (f"folder={tmp_path}",)
    found = {
        train(task, *settings_, ranks=ranks, bitwise=True).summary["weights_sha256"]
        for ranks in (1, 3)
    }
    assert len(found) == 1
