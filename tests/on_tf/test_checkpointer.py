"""Checkpoints where the leader writes for all: whole or not there,
and the same one on all ranks."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from allranks.checkpoint.array_snapshot import KINDS
from allranks.checkpoint.checkpointer import Checkpointer
from allranks.checkpoint.commit import ALONE
from allranks.checkpoint.export import export_weights
from allranks.checkpoint.folder import committed, uncommitted, verify_files
from allranks.checkpoint.format import NAME, About, read_manifest, step_folder
from allranks.errors import PeerLost, RequestError
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise
from flipping import flip_bit
from tf_checkpoint_workers import (
    POINTS,
    STANDS,
    Seat,
    assert_same,
    checkpointer,
    on_ranks,
    state,
)

pytestmark = pytest.mark.slow

FILE = "rank-000-of-001.a0.safetensors"
Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """A fork server that has imported numpy and no framework."""
    with ForkServer(("tf_checkpoint_workers",)) as running:
        yield running


def run_fork(forks: ForkServer, target: str, argument: Any, folder: Path) -> int:
    log = folder / "log"
    process = Process(0, f"tf_checkpoint_workers:{target}", argument, {}, log)
    code = supervise(forks, [process]).exits[0].code
    print(log.read_text())
    return code


def saved(folder: Path, *steps: int, **values: Any) -> Checkpointer:
    saver = checkpointer(folder, ALONE, **values)
    for step in steps:
        saver.save(step, state(step), None, About())
    assert saver.wait()
    return saver


def test_a_state_comes_back_whole_and_its_weights_are_exported(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    saver = checkpointer(folder, ALONE)
    about = About({"program": "x"}, {"epoch": 1}, {"keras": "3"}, {"loss": 2.0})
    saver.save(7, state(7), None, about, blocking=True)
    loaded = checkpointer(folder, ALONE).load([folder])
    assert loaded is not None and (loaded.step, loaded.path) == (7, step_folder(folder, 7))
    assert_same(loaded.common, state(7))
    manifest = loaded.manifest
    assert (manifest.ranks, manifest.job, manifest.progress) == (1, {"program": "x"}, {"epoch": 1})
    assert (manifest.facts, manifest.metrics) == ({"keras": "3"}, {"loss": 2.0})
    names = export_weights(loaded.path, tmp_path / "w.safetensors")
    read = load_file(tmp_path / "w.safetensors")
    assert names == sorted(read) == sorted(state(7)["model"])
    for name, array in state(7)["model"].items():
        assert_same(np.array(read[name]), array)
    assert checkpointer(tmp_path / "none", ALONE).load([tmp_path / "none"]) is None


def test_every_type_of_number_in_any_shape(tmp_path: Path) -> None:
    """Also strided, of no dimension, empty, of the other byte order, and numbers of numpy."""
    assert np.dtype(ml_dtypes.bfloat16).name in KINDS.values()
    ones = {name: np.arange(12).reshape(4, 3).astype(kind) for name, kind in KINDS.items()}
    arrays = {
        name: {"whole": a, "t": a.T, "none": a[:0], "one": a[1, 2, None][0], "s": a[::2, ::-1]}
        for name, a in ones.items()
    }
    swapped = {"swapped": np.arange(5, dtype=">f4"), "wide": np.broadcast_to(np.int16(3), (2, 4))}
    values = {"tuple": (1, [2.5, None], "text"), 7: {"-1": float("-inf")}, "yes": np.bool_(True)}
    saver = checkpointer(tmp_path, ALONE)
    whole = {"arrays": arrays, **swapped, **values}
    saver.save(1, whole, None, About(), blocking=True)
    loaded = saver.load([tmp_path])
    assert loaded is not None
    assert_same(loaded.common, whole)


@pytest.mark.parametrize("wrong", [object(), np.array(["text"]), np.array([1 + 2j]), {True: 1}])
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, wrong: Any
) -> None:
    saver = checkpointer(tmp_path / "checkpoints", ALONE)
    with pytest.raises(RequestError, match="without pickle"):
        saver.save(1, {"model": wrong}, None, About())
    assert not (tmp_path / "checkpoints").exists()
    saver.close()


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    go_on, writing = threading.Event(), threading.Event()
    told: list[str] = []

    def reach(point: str, step: int) -> None:
        if point == "save:write" and step == 1:
            writing.set()
            go_on.wait()

    saver = checkpointer(
        tmp_path, ALONE, reach=reach, report=lambda event, **values: told.append(event)
    )
    changing = state(1)
    saver.save(1, changing, None, About())
    writing.wait()
    for array in changing["model"].values():
        array.fill(99)
    changing["progress"]["batch_index"] = 99
    assert told == [] and committed(tmp_path) == []
    go_on.set()
    saver.save(2, state(2), None, About())
    assert step_folder(tmp_path, 1) in committed(tmp_path), "a save waits for the one before it"
    saver.close()
    loaded = saver.load([step_folder(tmp_path, 1)])
    assert loaded is not None
    assert_same(loaded.common, state(1))


def test_the_points_are_reached_in_order_and_the_event_tells(tmp_path: Path) -> None:
    reached: list[str] = []
    told: Told = []
    saver = saved(
        tmp_path,
        3,
        reach=lambda point, step: reached.append(point),
        report=lambda event, **values: told.append((event, values)),
    )
    saver.save(3, state(3), None, About(), blocking=True)
    assert reached == POINTS, "and a step that is there is not saved again"
    ((event, values),) = told
    assert event == "checkpoint" and values["step"] == 3
    assert values["bytes"] == (step_folder(tmp_path, 3) / FILE).stat().st_size
    assert 0 < values["stall_s"] <= values["seconds"]


@pytest.mark.thinned(1, ("point", POINTS), ("blocking", [True, False]))
def test_a_kill_at_any_point(forks: ForkServer, tmp_path: Path, point: str, blocking: bool) -> None:
    folder = tmp_path / "checkpoints"
    argument = {"folder": str(folder), "point": point, "blocking": blocking}
    assert run_fork(forks, "dies_at", argument, tmp_path) == -signal.SIGKILL
    told: list[str] = []
    again = checkpointer(
        folder, ALONE, attempt=1, report=lambda event, **values: told.append(event)
    )
    loaded = again.load([folder])
    assert loaded is not None and loaded.step == (2 if point in STANDS else 1)
    assert_same(loaded.common, state(loaded.step))
    assert told == [], "a kill makes no checkpoint bad"
    assert uncommitted(folder) == [], "what was begun is swept away"
    again.save(3, state(3), None, About(), blocking=True)
    assert again.wait() and len(committed(folder)) == len(list(folder.iterdir()))


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(
    forks: ForkServer, tmp_path: Path
) -> None:
    argument = {"folder": str(tmp_path / "disk")}
    assert run_fork(forks, "fills_the_disk", argument, tmp_path) == 0


@pytest.mark.parametrize(("name", "at"), [(FILE, -1), (FILE, 9), (FILE, 0), (NAME, 40)])
def test_a_flipped_bit_is_found_and_the_older_one_is_loaded(
    tmp_path: Path, name: str, at: int
) -> None:
    saved(tmp_path, 1, 2)
    flip_bit(step_folder(tmp_path, 2) / name, at)
    told: Told = []
    again = checkpointer(
        tmp_path, ALONE, report=lambda event, **values: told.append((event, values))
    )
    loaded = again.load([tmp_path])
    assert loaded is not None and loaded.step == 1
    assert_same(loaded.common, state(1))
    ((event, values),) = told
    assert event == "checkpoint_skipped" and values["step"] == 2
    assert name in " ".join(values["problems"])
    assert Path(values["set_aside"]).name == "step-00000002.bad-1"


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, ALONE, keep=2, best="min:loss")
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0]):
        saver.save(step, state(step), None, About(metrics={"loss": loss}))
    saver.close()
    assert [read_manifest(folder).step for folder in committed(tmp_path)] == [4, 3, 1]
    with pytest.raises(RequestError, match="max:accuracy"):
        checkpointer(tmp_path, ALONE, best="accuracy")


def test_the_leader_writes_for_all_and_any_number_of_ranks_loads(tmp_path: Path) -> None:
    """Saves and waits cost one exchange each, from the thread that trains (`Seat` looks)."""

    def save(comm: Seat) -> tuple[bool, int]:
        saver = checkpointer(tmp_path, comm)
        for step in (1, 2):
            saver.save(step, state(step) if comm.rank == 0 else None, None, About())
        return saver.wait() and saver.wait(), comm.hears

    assert on_ranks(2, save) == [(True, 2), (True, 2)]
    manifest = read_manifest(step_folder(tmp_path, 2))
    assert manifest.ranks == 2 and list(manifest.files) == ["rank-000-of-002.a0.safetensors"]
    assert verify_files(step_folder(tmp_path, 2), manifest, manifest.files) == []

    def load(comm: Seat) -> Any:
        loaded = checkpointer(tmp_path, comm).load([tmp_path])
        assert loaded is not None and loaded.step == 2 and loaded.rank_state is None
        return loaded.common

    for ranks in (1, 2, 3):
        for found in on_ranks(ranks, load):
            assert_same(found, state(2))


def test_ranks_that_see_other_manifests_agree_on_an_older_one(tmp_path: Path) -> None:
    """Rank 1 is made to say that it looks at another manifest of step 2."""
    saved(tmp_path, 1, 2)
    told: Told = []
    other = json.dumps([[], read_manifest(step_folder(tmp_path, 2)).step])

    def load(comm: Seat) -> int:
        if comm.rank == 1:
            comm.twisted = lambda text: other if comm.hears == 2 else text
        saver = checkpointer(
            tmp_path, comm, report=lambda event, **values: told.append((event, values))
        )
        loaded = saver.load([tmp_path])
        assert loaded is not None
        assert_same(loaded.common, state(1))
        return loaded.step

    assert on_ranks(2, load) == [1, 1]
    ((event, values),) = told
    assert event == "checkpoint_skipped" and "storage shared" in values["problems"][0]


def test_all_ranks_hear_of_a_save_that_failed(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    def reach(point: str, step: int) -> None:
        if step == 2 and point == "save:half":
            raise OSError("the disk is gone")
        if step == 4 and point == "save:prune":
            raise RuntimeError("no disk at all")

    def save(comm: Seat) -> list[bool]:
        found = []
        saver = checkpointer(
            tmp_path, comm, reach=reach, report=lambda event, **v: told.append((event, v["step"]))
        )
        for step in (1, 2, 2, 3):
            saver.save(step, state(step), None, About())
            found.append(saver.wait())
        assert not step_folder(tmp_path, 2).exists()
        saver.save(4, state(4), None, About())
        error = RuntimeError if comm.rank == 0 else PeerLost
        with pytest.raises(error, match="no disk at all"):
            saver.save(5, state(5), None, About())
        return found

    assert on_ranks(2, save) == [[True, False, False, True]] * 2
    failed = ("checkpoint_failed", 2)
    assert told == [("checkpoint", 1), failed, failed, ("checkpoint", 3), ("checkpoint", 4)]


def test_an_error_that_nobody_waited_for_is_reported_when_it_is_closed(tmp_path: Path) -> None:
    told: Told = []

    def reach(point: str, step: int) -> None:
        if point == "save:prune":
            raise RuntimeError("no disk at all")

    saver = checkpointer(
        tmp_path, ALONE, reach=reach, report=lambda event, **values: told.append((event, values))
    )
    saver.save(1, state(1), None, About())
    saver.close()
    assert told[-1] == ("checkpoint_failed", {"step": None, "rank": 0, "error": "no disk at all"})
