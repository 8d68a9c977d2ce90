"""A full disk: a job does not start on it; what one has computed is kept elsewhere, and said."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from allranks.checkpoint import folder as room
from allranks.checkpoint.export import digest_of_weights
from allranks.errors import PlaceError, RequestError
from allranks.job import run_folder
from conftest import TASKS, Train

OnRanks = Callable[..., Any]
STEPS = 60
WORDS = {
    "full_disk_tasks.py": ["--ranks", "2"],
    "tf_tasks.py": ["--engine", "tensorflow", "--threads", "1", "--precision", "fp64"],
}


@pytest.fixture
def on_a_small_disk(on_ranks: OnRanks, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`run(elsewhere)`: a job whose disk fills up; what it said and left."""

    def run(
        elsewhere: Path, file: str = "full_disk_tasks.py", options: str = "size=4m"
    ) -> dict[str, Any]:
        argument = {
            "options": options,
            "disk": str(tmp_path / "disk"),
            "told": str(tmp_path / "told.json"),
            "program": f"{TASKS / file}:Filling",
            "words": [*WORDS[file], "--steps", str(STEPS), "--log", "csv"],
            "variables": {"TMPDIR": str(elsewhere), "TEMP": str(elsewhere)},
        }
        on_ranks(1, "full_disk_workers:a_job_on_a_small_disk", argument)
        told: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
        return told

    return run


@pytest.mark.parametrize("with_events", [True, False], ids=["training", "command"])
def test_no_rank_starts_on_a_disk_that_is_full(
    on_ranks: OnRanks, tmp_path: Path, with_events: bool
) -> None:
    without_names = [f"nr_inodes={count}" for count in (2, 3, 4, 5, 6, 9)]
    small = ["size=4k", "size=8k", *(["size=28k"] if with_events else [])]
    disks = [*without_names, *small, "size=100k"]
    argument = {"folder": str(tmp_path), "told": str(tmp_path / "told.json"), "disks": disks}
    worker = "full_disk_workers:run_folders_on_full_disks"
    on_ranks(1, worker, {**argument, "with_events": with_events})
    told = dict(zip(disks, json.loads((tmp_path / "told.json").read_text()), strict=True))
    assert told.pop("size=100k") == ["", []]
    for disk, (found, left) in told.items():
        assert found == "its disk is full: No space left on device", disk
        assert left == [], disk


@pytest.mark.slow
def test_a_job_is_refused_where_the_first_events_do_not_fit(
    on_a_small_disk: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    told = on_a_small_disk(tmp_path, options="size=4k")
    assert told["code"] == 2 and told["left"] is None
    assert "found: its disk is full: No space left on device" in told["err"]


@pytest.mark.parametrize("number", room.FULL)
def test_a_full_quota_is_said_as_a_full_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder, "take", full)
    folder = run_folder.RunFolder(tmp_path / "run")
    with pytest.raises(RequestError) as refused:
        folder.take_room([0])
    assert refused.value.found == f"its disk is full: {os.strerror(number)}"
    assert refused.value.do.startswith("make room there")
    monkeypatch.setattr(folder.events._file, "write", full, raising=False)
    folder.events.row({"lost": 1})
    with pytest.raises(OSError, match=os.strerror(number)) as lost:
        folder.events.close()
    assert lost.value.errno == number
    folder.close()


def test_a_job_is_not_started_again_where_the_disk_is_full_by_then(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, calls = room.take, []

    def full_by_then(path: Path, room_bytes: int) -> None:
        calls.append(path.name)
        if calls.count("events.jsonl") > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        take(path, room_bytes)

    monkeypatch.setattr(run_folder, "take", full_by_then)
    with pytest.raises(PlaceError) as failed:
        train("digits", ranks=2, steps=4, max_restarts=1, inject="kill@rank=1,step=2")
    assert "rank 1" in str(failed.value) and "killed by SIGKILL" in str(failed.value)
    assert "not started again: its disk is full: No space left on device" in str(failed.value)


@pytest.mark.slow
def test_what_does_not_fit_is_kept_elsewhere_and_said(
    on_a_small_disk: Callable[..., dict[str, Any]], train: Train, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    told = on_a_small_disk(elsewhere)
    plain = train("digits", ranks=2, steps=STEPS)
    folder = assert_all_is_kept(told, elsewhere, average=True)
    assert_equal(folder, plain.run_dir, bitwise=True)


@pytest.mark.slow
def test_a_job_of_tensorflow_keeps_it_too(
    on_a_small_disk: Callable[..., dict[str, Any]], train_tf: Train, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    told = on_a_small_disk(elsewhere, "tf_tasks.py")
    plain = train_tf("digits-keras", steps=STEPS, precision="fp64")
    folder = assert_all_is_kept(told, elsewhere, average=False)
    assert_equal(folder, plain.run_dir, bitwise=False)


def assert_equal(found: Path, wanted: Path, *, bitwise: bool) -> None:
    """The weights of two folders are equal, up to rounding where TensorFlow promises no bits."""
    ours, theirs = (load_file(folder / "weights.safetensors") for folder in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        if bitwise:
            assert ours[name].tobytes() == array.tobytes(), name
        else:
            np.testing.assert_allclose(ours[name], array, rtol=1e-8, atol=1e-10, err_msg=name)


def assert_all_is_kept(told: dict[str, Any], elsewhere: Path, *, average: bool) -> Path:
    """All of a job whose disk was full is in a folder `elsewhere`, which is returned, and said."""
    assert told["code"] == 0, told["err"]
    assert "Traceback" not in told["err"]
    (folder,) = elsewhere.glob("allranks-run-*")
    kept = ["metrics.jsonl", "weights.safetensors"]
    kept = ["average.safetensors", *kept] if average else kept
    assert sorted(path.name for path in folder.iterdir()) == kept
    arrays = sorted(load_file(folder / "weights.safetensors").items())
    digest = digest_of_weights((name, a.dtype.name, a.data) for name, a in arrays)
    assert f"sha256 {digest}" in told["out"] and f"sha256 {digest}" in told["show"]
    for name in kept:
        assert any(name in line and str(folder) in line for line in told["out"].splitlines())
        assert not name.endswith("tensors") or name not in told["left"]
    metrics = told["metrics"] + (folder / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == list(range(STEPS))
    assert f"of {STEPS} rows" in told["out"]
    assert "metrics.csv" in told["out"]
    return folder


@pytest.mark.slow
def test_what_can_be_kept_nowhere_is_said_and_the_place_has_failed(
    on_a_small_disk: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    told = on_a_small_disk(tmp_path / "disk")
    assert told["code"] == 3, told["err"]
    assert "Traceback" not in told["err"]
    assert "accuracy" in told["out"]
    assert "weights.safetensors is LOST" in told["out"]
    assert told["left"].count("weights.safetensors") == 0
