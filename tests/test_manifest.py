"""What a checkpoint folder is: a manifest of which no byte may change,
and files that it vouches for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint import folder as checkpoint_folder
from allranks.checkpoint import format as manifest
from allranks.checkpoint.folder import committed, prune, set_aside, sweep, verify_files
from allranks.checkpoint.format import (
    NAME,
    BadCheckpoint,
    FileTensor,
    Manifest,
    SavedFile,
    SavedTensor,
    TensorBox,
    digest,
    lay_out,
    read_layout,
    read_manifest,
    seal,
    step_folder,
    write_manifest,
)
from counting import calls_of

FILE = "rank-000-of-001.a0.safetensors"


def small(step: int, content: bytes = b"12345678", **changes: Any) -> Manifest:
    tensor = SavedTensor("F32", (2,), (TensorBox(FILE, (0,), (2,)),))
    plain = Manifest(
        step=step,
        created=1.5,
        ranks=1,
        files={FILE: SavedFile(len(content), digest(content))},
        tensors={"common/model/w": tensor},
        values={"common": {"model": {"w": {"$tensor": "common/model/w"}}}, "own": [None]},
        job={"program": "é"},
        metrics={"accuracy": 0.5, "loss": float("inf")},
    )
    return replace(plain, **changes)


def commit(checkpoints: Path, step: int, **changes: Any) -> Path:
    folder = step_folder(checkpoints, step)
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(b"12345678")
    write_manifest(folder, small(step, **changes))
    return folder


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest of which the digest holds, and of which something else is wrong."""
    values = json.loads((folder / NAME).read_bytes())
    values.pop("blake2b")
    change(values)
    body = json.dumps(values)[:-1].encode()
    (folder / NAME).write_bytes(body + b',"blake2b":"' + digest(body).encode() + b'"}\n')


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = commit(tmp_path, 12)
    assert read_manifest(folder) == small(12)
    assert verify_files(folder, small(12), [FILE]) == []
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_no_byte_of_a_manifest_can_change(tmp_path: Path) -> None:
    folder = commit(tmp_path, 12)
    text = (folder / NAME).read_bytes()
    for at in range(len(text)):
        for flip in (1, 0x20, 0x80, 0xFF):
            (folder / NAME).write_bytes(text[:at] + bytes([text[at] ^ flip]) + text[at + 1 :])
            with pytest.raises(BadCheckpoint, match=NAME):
                read_manifest(folder)
        (folder / NAME).write_bytes(text[:at])
        with pytest.raises(BadCheckpoint, match=NAME):
            read_manifest(folder)
    (folder / NAME).write_bytes(text + b"\n")
    with pytest.raises(BadCheckpoint, match="torn"):
        read_manifest(folder)


def rename_file(name: str) -> Callable[[dict[str, Any]], object]:
    def change(values: dict[str, Any]) -> None:
        values["files"] = {name: values["files"][FILE]}
        values["tensors"]["common/model/w"]["chunks"][0]["file"] = name

    return change


def set_in(*keys: Any) -> Callable[[dict[str, Any]], object]:
    def change(values: Any) -> None:
        for key in keys[:-2]:
            values = values[key]
        values[keys[-2]] = keys[-1]

    return change


W = "common/model/w"
CHUNK = ("tensors", W, "chunks", 0)


@pytest.mark.parametrize(
    "change",
    [
        *(
            rename_file(name)
            for name in ("../x", "/etc/passwd", f"{FILE}\n", f"a/{FILE}", "", "rank-٠٠٠-of-001.a0")
        ),
        set_in("schema", 2),
        set_in("step", "12"),
        set_in("step", -1),
        set_in("step", True),
        set_in("step", 13),
        set_in("ranks", None),
        set_in("created", "now"),
        set_in("files", []),
        set_in("files", FILE, "bytes", -1),
        set_in("files", FILE, "blake2b", "00"),
        set_in("files", FILE, "more", 1),
        set_in("tensors", W, "dtype", "pickle"),
        set_in("tensors", W, "shape", [3]),
        set_in("tensors", W, "shape", [2.0]),
        set_in("tensors", W, "shape", "2"),
        set_in("tensors", W, "chunks", []),
        set_in(*CHUNK, "offsets", [1]),
        set_in(*CHUNK, "offsets", [-1]),
        set_in(*CHUNK, "offsets", []),
        set_in(*CHUNK, "file", "rank-001-of-001.a0.safetensors"),
        set_in("tensors", W, "chunks", [{"file": FILE, "offsets": [0], "sizes": [1]}] * 2),
        set_in("tensors", W, "shape", [2, 2**62, 0]),
        lambda values: values["tensors"].update(other=values["tensors"][W]),
        set_in("job", []),
        set_in("metrics", "loss", []),
        lambda values: values.pop("files"),
        lambda values: values.update(unknown=1),
    ],
)
def test_a_sealed_manifest_is_checked_too(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = commit(tmp_path, 12)
    reseal(folder, change)
    with pytest.raises(BadCheckpoint, match=NAME):
        read_manifest(folder)


class Counted(int):
    """A size, of which sums are counted."""

    added = 0

    def __radd__(self, other: int) -> int:
        Counted.added += 1
        return int(self) + other

    __add__ = __radd__


@pytest.mark.parametrize("across", [False, True])
def test_the_parts_of_a_tensor_are_held_against_it_in_time_linear_in_them(across: bool) -> None:
    """Each against each other one would be a quarter of an hour for 500 ranks."""
    counts = []
    for parts in (8, 64):
        Counted.added = 0
        cut = [
            ((0, i), (3, Counted(1))) if across else ((i, 0), (Counted(1), 3)) for i in range(parts)
        ]
        chunks = tuple(TensorBox(FILE, *box) for box in cut)
        shape = (3, parts) if across else (parts, 3)
        assert manifest._filled(SavedTensor("F32", shape, chunks))
        counts.append(Counted.added)
    assert counts[1] == 8 * counts[0] > 0


def test_a_tensor_more_costs_a_manifest_no_copies() -> None:
    """A model may have tens of thousands: dataclasses.asdict calls 50 functions for each."""
    sealed = {}
    for count in (10, 110):
        tensors = {
            f"w{n}": SavedTensor("F32", (2,), (TensorBox(FILE, (0,), (2,)),)) for n in range(count)
        }
        sealed[count] = calls_of(partial(seal, small(1, tensors=tensors)))
    assert (sealed[110] - sealed[10]) / 100 < 3


@pytest.mark.parametrize(
    ("boxes", "fill"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], True),
        ([((0, 0), (4, 1)), ((0, 1), (1, 2)), ((1, 1), (3, 2))], True),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], False),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], False),
        ([((0, 0), (3, 2)), ((2, 1), (2, 2)), ((0, 2), (2, 1))], False),
        ([((0, 0), (4, 3)), ((4, 0), (0, 3))], True),
    ],
)
def test_boxes_fill_a_tensor_once(boxes: list[Any], fill: bool) -> None:
    chunks = tuple(TensorBox(FILE, *box) for box in boxes)
    assert manifest._filled(SavedTensor("F32", (4, 3), chunks)) is fill


@pytest.mark.parametrize("text", [b"[]", b"1", b"[" * 100_000, b"\xff{", b"{} "])
def test_what_is_no_object_is_no_manifest(tmp_path: Path, text: bytes) -> None:
    (tmp_path / NAME).write_bytes(text + b',"blake2b":"' + digest(text).encode() + b'"}\n')
    with pytest.raises(BadCheckpoint, match=NAME):
        read_manifest(tmp_path)


def test_no_manifest_no_checkpoint(tmp_path: Path) -> None:
    folder = commit(tmp_path, 12)
    (folder / NAME).unlink()
    assert committed(tmp_path) == []
    with pytest.raises(BadCheckpoint, match="never committed"):
        read_manifest(folder)


def test_what_is_wrong_with_a_file_is_named(tmp_path: Path) -> None:
    folder = commit(tmp_path, 12)

    def problem() -> str:
        (found,) = verify_files(folder, small(12), [FILE])
        assert found.startswith(FILE)
        return found

    (folder / FILE).write_bytes(b"12345679")
    assert "digest" in problem()
    (folder / FILE).write_bytes(b"1234567")
    assert "7 bytes instead of 8" in problem()
    (folder / FILE).unlink()
    assert "missing" in problem()
    (folder / FILE).mkdir()
    assert "cannot be read" in problem()


def test_a_manifest_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def full(point: str, step: int) -> None:
        if point == "save:rename":
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_manifest(tmp_path, small(1), full)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_gets_its_name_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rename makes it visible: a kill leaves a whole one or none."""
    seen: list[bytes] = []

    def reach(point: str, step: int) -> None:
        assert not (tmp_path / NAME).exists()
        seen.extend(path.read_bytes() for path in tmp_path.iterdir())

    def replace(source: Path, target: Path) -> None:
        assert not (tmp_path / NAME).exists()
        source.rename(target)

    monkeypatch.setattr(os, "replace", replace)
    write_manifest(tmp_path, small(1), reach)
    assert seen == [seal(small(1))] and (tmp_path / NAME).read_bytes() == seal(small(1))


def test_a_manifest_lasts_before_it_has_its_name_and_so_does_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power between two of these has a whole manifest, or none."""
    done: list[tuple[str, Any]] = []
    fsync, replace = os.fsync, os.replace

    def lasting(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        done.append(("fsync", tmp_path if path.is_dir() else path.read_bytes()))
        fsync(fd)

    def named(source: Path, target: Path) -> None:
        done.append(("name", target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lasting)
    monkeypatch.setattr(os, "replace", named)
    write_manifest(tmp_path, small(1))
    assert done == [
        ("fsync", seal(small(1))),
        ("name", tmp_path / NAME),
        ("fsync", tmp_path),
    ]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, accuracy in enumerate([0.1, 0.9, 0.2, float("nan"), 0.9, 0.3, 0.4]):
        commit(tmp_path, step, metrics={"accuracy": accuracy})
    assert [checkpoint_folder.step_of(f) for f in committed(tmp_path)] == [6, 5, 4, 3, 2, 1, 0]
    prune(tmp_path, 2, "max:accuracy")
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "step-00000004",
        "step-00000005",
        "step-00000006",
    ]
    prune(tmp_path, 1, "min:accuracy")
    assert [checkpoint_folder.step_of(f) for f in committed(tmp_path)] == [6, 5]
    prune(tmp_path, 0)
    assert [checkpoint_folder.step_of(f) for f in committed(tmp_path)] == [6]


@pytest.mark.parametrize("calls", range(1, 12))
def test_a_kill_while_pruning_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Whatever call to the kernel is the last: all that is committed is whole,
    and sweep ends it."""
    for step in range(4):
        commit(tmp_path, step)
    left = iter(range(calls - 1))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patched:
        for name in ("unlink", "rmdir"):
            patched.setattr(os, name, counted(getattr(os, name)))
            patched.setattr(Path, name, counted(getattr(Path, name)))
        patched.setattr(checkpoint_folder, "fsync_folder", counted(manifest.fsync_folder))
        try:
            prune(tmp_path, 1)
        except KeyboardInterrupt:
            assert len(list(tmp_path.iterdir())) > 1
    for folder in committed(tmp_path):
        assert verify_files(folder, read_manifest(folder), [FILE]) == []
    assert committed(tmp_path)[0] == step_folder(tmp_path, 3)
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == set(committed(tmp_path))


def test_a_bad_one_is_set_aside_under_the_next_free_name(tmp_path: Path) -> None:
    for number in (1, 2):
        assert set_aside(commit(tmp_path, 7)) == tmp_path / f"step-00000007.bad-{number}"
    assert committed(tmp_path) == []
    assert len(checkpoint_folder.bad(tmp_path)) == 2


def test_sweeping_takes_what_is_ours_and_nothing_else(tmp_path: Path) -> None:
    whole = commit(tmp_path, 1)
    (whole / ".manifest.json.123").touch()
    half = commit(tmp_path, 2)
    (half / NAME).unlink()
    (half / ".manifest.json.77").touch()
    strange = commit(tmp_path, 3)
    (strange / NAME).unlink()
    (strange / "notes.txt").touch()
    (tmp_path / "step-00000004").symlink_to(strange)
    (tmp_path / "step-5").mkdir()
    (tmp_path / "other").mkdir()
    bad = set_aside(commit(tmp_path, 6))
    assert set(sweep(tmp_path)) == {half, strange}
    assert not half.exists()
    assert [path.name for path in strange.iterdir()] == ["notes.txt"]
    assert {path.name for path in whole.iterdir()} == {FILE, NAME}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {whole.name, strange.name, "step-00000004", "step-5", "other", bad.name}
    assert sweep(tmp_path / "not there") == []


def test_a_layout_is_read_as_it_was_written(tmp_path: Path) -> None:
    layout = lay_out(
        {"b": FileTensor("BOOL", (3,)), "é": FileTensor("F64", ()), "e": FileTensor("F32", (0, 2))}
    )
    path = tmp_path / "file"
    path.write_bytes(layout.header + bytes(layout.data_bytes))
    assert read_layout(path) == layout
    assert len(layout.header) % 8 == 0 and layout.pieces["é"].begin == 0
    for torn in (0, 7, len(layout.header) - 1, len(layout.header) + layout.data_bytes - 1):
        path.write_bytes((layout.header + bytes(layout.data_bytes))[:torn])
        with pytest.raises(ValueError, match="file:"):
            read_layout(path)


def test_seal_is_the_same_for_the_same() -> None:
    assert seal(small(1)) == seal(small(1)) != seal(small(2))
