"""The commit of a checkpoint as one rank sees it, with what the others say made up."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.commit import Commit, Planned, Rules, Save
from allranks.checkpoint.format import (
    FileLayout,
    FileTensor,
    SavedTensor,
    TensorBox,
    digest,
    lay_out,
    nothing,
    rank_file,
    read_manifest,
    step_folder,
)

FINE = {"error": "", "own": None, "bytes": 100, "blake2b": digest(b"theirs")}


@dataclasses.dataclass
class Told:
    """One rank of `size`; what all the others say in each exchange stands in `others`."""

    rank: int
    size: int
    others: list[list[str]]

    def gather_texts(self, text: str) -> list[str]:
        said = self.others.pop(0)
        return [text if rank == self.rank else said[rank] for rank in range(self.size)]


@dataclasses.dataclass
class Numbers:
    """A snapshot of two numbers."""

    layout: FileLayout = dataclasses.field(
        default_factory=lambda: lay_out({"w": FileTensor("F32", (2,))})
    )
    data: memoryview = dataclasses.field(default_factory=lambda: memoryview(b"12345678"))


def commit(
    tmp_path: Path, ranks: Told, failed: str = "", reach: Any = nothing
) -> tuple[bool, list[str], Path]:
    """Whether it stands, what was reported, and its folder."""
    told: list[str] = []

    def report(event: str, **values: Any) -> None:
        told.append(event)

    def tensors(files: list[str]) -> dict[str, SavedTensor]:
        return {"w": SavedTensor("F32", (2,), (TensorBox(files[0], (0,), (2,)),))}

    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    planned = Planned({}, None, tensors, Numbers())
    save = Save(7, ranks.size, planned, lambda: {"job": {}}, time.monotonic(), 0.0, failed)
    rules = Rules(tmp_path / "checkpoints", 3, "", 0, reach, report)
    stands = Commit(rules, ranks, save).run()
    return stands, told, step_folder(tmp_path / "checkpoints", 7)


@pytest.mark.parametrize(("size", "bad"), [(2, 1), (3, 2), (4, 1), (4, 3)])
def test_the_error_of_any_rank_keeps_the_leader_from_committing(
    tmp_path: Path, size: int, bad: int
) -> None:
    said = [
        json.dumps(FINE | ({"error": "disk full"} if rank == bad else {})) for rank in range(size)
    ]
    stands, told, folder = commit(tmp_path, Told(0, size, [said]))
    assert not stands and told == ["checkpoint_failed"]
    assert not folder.exists(), "its own file is taken back"


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_rank_takes_its_file_back_for_the_error_of_another(tmp_path: Path, bad: int) -> None:
    said = [json.dumps(FINE | ({"error": "disk full"} if rank == bad else {})) for rank in range(4)]
    stands, told, folder = commit(tmp_path, Told(2, 4, [said]))
    assert not stands and told == [] and not folder.exists()


def test_a_rank_takes_its_file_back_when_the_manifest_could_not_be_written(tmp_path: Path) -> None:
    said = [json.dumps(FINE)] * 4
    stands, _, folder = commit(tmp_path, Told(2, 4, [said, ["no space", "", "", ""]]))
    assert not stands and not folder.exists()


def test_what_could_not_be_copied_is_written_by_nobody(tmp_path: Path) -> None:
    said = [json.dumps(FINE)] * 2
    stands, told, folder = commit(tmp_path, Told(0, 2, [said]), failed="out of memory")
    assert not stands and told == ["checkpoint_failed"] and not folder.exists()


def test_a_checkpoint_that_stands_names_the_files_of_all(tmp_path: Path) -> None:
    said = [json.dumps(FINE | {"own": {"rank": rank}}) for rank in range(4)]
    stands, told, folder = commit(tmp_path, Told(0, 4, [said, [""] * 4]))
    assert stands and told == ["checkpoint"]
    manifest = read_manifest(folder)
    assert list(manifest.files) == [rank_file(rank, 4, 0) for rank in range(4)]
    assert manifest.values["own"] == [None, {"rank": 1}, {"rank": 2}, {"rank": 3}]
    assert (folder / rank_file(0, 4, 0)).read_bytes().endswith(b"12345678")


def test_what_fails_after_the_commit_takes_nothing_back(tmp_path: Path) -> None:
    def reach(point: str, step: int) -> None:
        if point == "save:prune":
            raise OSError(30, "Read-only file system")

    said = [json.dumps(FINE)] * 2
    stands, told, folder = commit(tmp_path, Told(0, 2, [said, ["", ""]]), reach=reach)
    assert stands and told == ["checkpoint", "checkpoints_not_pruned"]
    assert read_manifest(folder).step == 7


def test_a_file_lasts_before_the_others_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, and its name; whoever hears that it is there may write the manifest."""
    done: list[Any] = []
    fsync = os.fsync

    def lasting(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        done.append(path.name if path.is_dir() else path.read_bytes()[-8:])
        fsync(fd)

    class Listens(Told):
        def gather_texts(self, text: str) -> list[str]:
            done.append("told")
            return super().gather_texts(text)

    monkeypatch.setattr(os, "fsync", lasting)
    commit(tmp_path, Listens(1, 2, [[json.dumps(FINE)] * 2, ["", ""]]))
    assert done == [b"12345678", "step-00000007", "told", "told"]


def test_a_file_that_could_not_be_written_whole_is_not_there(tmp_path: Path) -> None:
    def reach(point: str, step: int) -> None:
        if point == "save:half":
            raise OSError(28, "No space left on device")

    stands, _, folder = commit(tmp_path, Told(1, 2, [[json.dumps(FINE)] * 2]), reach=reach)
    assert not stands and not folder.exists()
