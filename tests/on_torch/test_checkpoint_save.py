"""Saving on one rank: what is written is what training had at that step, once, and lasts."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from allranks.checkpoint.folder import committed
from allranks.checkpoint.format import About, read_manifest, step_folder
from allranks.errors import PeerLost, RequestError
from allranks.torch import accelerator
from allranks.torch.checkpoint.saving import TorchCheckpointer
from allranks.torch.checkpoint.state import DTYPES
from allranks.torch.comm.comm import Comm
from checkpoint_workers import LEADER_POINTS, POINTS, check, own, state


def test_a_state_comes_back_whole(tmp_path: Path) -> None:
    checkpointer = TorchCheckpointer(tmp_path, Comm())
    about = About({"program": "x"}, {"epoch": 1}, {"torch": "2"}, {"loss": float("nan")})
    checkpointer.save(7, state(7), own(7, 0), about)
    assert checkpointer.wait()
    loaded = TorchCheckpointer(tmp_path, Comm()).load([tmp_path])
    assert loaded is not None and loaded.path == step_folder(tmp_path, 7)
    check(loaded, 0, has_own=True)
    manifest = loaded.manifest
    assert (manifest.job, manifest.progress, manifest.facts) == (
        {"program": "x"},
        {"epoch": 1},
        {"torch": "2"},
    )
    assert manifest.metrics["loss"] != manifest.metrics["loss"]
    assert TorchCheckpointer(tmp_path / "none", Comm()).load([tmp_path / "none"]) is None


def test_every_type_of_number_in_any_shape(tmp_path: Path) -> None:
    """As the library reads it, and as it is loaded: also strided, of no dimension, and empty."""
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        ones = torch.randint(0, 2, (4, 3)).to(dtype)
        tensors |= {
            name: ones,
            f"{name}/t": ones.t(),
            f"{name}/e": ones[:0],
            f"{name}/0": ones[1, 2],
        }
        tensors |= {f"{name}/s": ones[::2], f"{name}/x": ones[0].expand(2, 3)}
    checkpointer = TorchCheckpointer(tmp_path, Comm())
    checkpointer.save(1, tensors, None, About(), blocking=True)
    loaded = checkpointer.load([tmp_path])
    assert loaded is not None
    (file,) = step_folder(tmp_path, 1).glob("*.safetensors")
    read = load_file(file)
    assert len(read) == len(tensors)
    for name, tensor in tensors.items():
        written = read[f"common/{name.replace('/', '~1')}"]
        if tensor.dtype == torch.complex128:  # the format has none: pairs of F64
            written = torch.view_as_complex(written.clone())
        for found in (loaded.common[name], written):
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert (
                found.contiguous()
                .flatten()
                .view(torch.uint8)
                .equal(tensor.contiguous().flatten().view(torch.uint8))
            )


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    """The copy is taken when `save` returns: what changes then is not in the checkpoint."""
    go_on, writing = threading.Event(), threading.Event()
    told: list[str] = []

    def reach(point: str, step: int) -> None:
        if point == "save:write" and step == 1:
            writing.set()
            go_on.wait()

    checkpointer = TorchCheckpointer(
        tmp_path, Comm(), reach=reach, report=lambda event, **values: told.append(event)
    )
    common, about = state(1), About(progress={"step": [1]})
    checkpointer.save(1, common, own(1, 0), about)
    writing.wait()
    for tensor in common["model"].values():
        tensor.fill_(99)
    common["optimizer"]["param_groups"].clear()
    about.progress["step"].append(2)
    assert told == [] and committed(tmp_path) == []
    go_on.set()
    checkpointer.save(2, state(2), own(2, 0), About())
    assert step_folder(tmp_path, 1) in committed(tmp_path), "a save waits for the one before it"
    checkpointer.close()
    assert told == ["checkpoint", "checkpoint"]
    loaded = checkpointer.load([step_folder(tmp_path, 1)])
    assert loaded is not None and loaded.manifest.progress == {"step": [1]}
    check(loaded, 0, has_own=True)


def test_the_points_are_reached_in_order(tmp_path: Path) -> None:
    reached: list[str] = []
    told: list[dict[str, Any]] = []
    checkpointer = TorchCheckpointer(
        tmp_path,
        Comm(),
        reach=lambda point, step: reached.append(point),
        report=lambda event, **values: told.append({"event": event, **values}),
    )
    checkpointer.save(3, state(3), None, About(), blocking=True)
    assert tuple(reached) == POINTS + LEADER_POINTS
    size = sum(path.stat().st_size for path in step_folder(tmp_path, 3).glob("*.safetensors"))
    (event,) = told
    assert event["event"] == "checkpoint" and event["step"] == 3 and event["bytes"] == size
    assert 0 < event["stall_s"] <= event["seconds"]
    assert event["path"] == str(step_folder(tmp_path, 3))


def test_a_step_that_is_there_is_not_saved_again(tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        checkpointer = TorchCheckpointer(
            tmp_path, Comm(), report=lambda event, **values: told.append(event)
        )
        checkpointer.load([tmp_path])
        checkpointer.save(3, state(3), None, About(), blocking=True)
        checkpointer.save(3, state(3), None, About(), blocking=True)
    assert told == ["checkpoint"]
    elsewhere = TorchCheckpointer(tmp_path / "other", Comm())
    elsewhere.load([tmp_path])
    elsewhere.save(3, state(3), None, About(), blocking=True)
    assert len(committed(tmp_path / "other")) == 1, "what was loaded lies in another folder"


def test_another_attempt_never_touches_the_files_of_the_last(tmp_path: Path) -> None:
    """Also when the same step is saved again: the name of the manifest changes hands at once."""
    TorchCheckpointer(tmp_path, Comm()).save(3, state(3), None, About(), blocking=True)
    (first,) = step_folder(tmp_path, 3).glob("*.safetensors")
    inode = first.stat().st_ino
    again = TorchCheckpointer(tmp_path, Comm())
    again.save(3, state(3), None, About(), blocking=True)
    assert not again.wait() and first.stat().st_ino == inode, "the same attempt: refused, and kept"
    loaded = TorchCheckpointer(tmp_path, Comm()).load([tmp_path])
    assert loaded is not None and loaded.step == 3
    second = TorchCheckpointer(tmp_path, Comm(), attempt=1)
    second.save(3, state(3), None, About(), blocking=True)
    assert second.wait()
    (only,) = step_folder(tmp_path, 3).glob("*.safetensors")
    assert ".a1." in only.name
    loaded = second.load([tmp_path])
    assert loaded is not None and loaded.step == 3


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    checkpointer = TorchCheckpointer(tmp_path, Comm(), keep=2, best="min:loss")
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0]):
        checkpointer.save(step, state(step), None, About(metrics={"loss": loss}))
    checkpointer.close()
    assert [read_manifest(folder).step for folder in committed(tmp_path)] == [4, 3, 1]
    with pytest.raises(RequestError, match="max:accuracy"):
        TorchCheckpointer(tmp_path, Comm(), best="accuracy")


def test_no_failure_of_the_thread_is_silent(tmp_path: Path) -> None:
    told: list[tuple[str, Any]] = []

    class Lost(Comm):
        def aside(self) -> Comm:
            return self

        def gather_texts(self, text: str) -> list[str]:
            if threading.current_thread() is not threading.main_thread():
                raise PeerLost("connection closed")
            return [text]

    checkpointer = TorchCheckpointer(
        tmp_path, Lost(), report=lambda event, **values: told.append((event, values["error"]))
    )
    checkpointer.save(1, state(1), None, About())
    with pytest.raises(PeerLost):
        checkpointer.wait()
    checkpointer.save(2, state(2), None, About())
    with pytest.raises(PeerLost):
        checkpointer.save(3, state(3), None, About())
    checkpointer.save(4, state(4), None, About())
    checkpointer.close()
    assert told == [("checkpoint_failed", "connection closed")]
    assert committed(tmp_path) == []


def test_a_save_that_fails_is_told_and_the_next_one_stands(tmp_path: Path) -> None:
    told: list[tuple[str, Any]] = []

    def reach(point: str, step: int) -> None:
        if step == 2 and point == "save:half":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpointer = TorchCheckpointer(
        tmp_path, Comm(), reach=reach, report=lambda event, **v: told.append((event, v["step"]))
    )
    for step in (1, 2, 3):
        checkpointer.save(step, state(step), None, About())
        assert checkpointer.wait() is (step != 2)
        assert not (step == 2 and step_folder(tmp_path, 2).exists())
    assert told == [("checkpoint", 1), ("checkpoint_failed", 2), ("checkpoint", 3)]
    checkpointer.load([tmp_path])


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    told: list[str] = []
    checkpointer = TorchCheckpointer(
        tmp_path / "checkpoints", Comm(), report=lambda event, **v: told.append(v["error"])
    )
    checkpointer.save(1, state(1), None, About())
    assert not checkpointer.wait()
    assert len(told) == 1 and str(tmp_path / "checkpoints") in told[0]


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpointer = TorchCheckpointer(tmp_path / "checkpoints", Comm())
    with pytest.raises(RequestError, match="without pickle"):
        checkpointer.save(1, {"model": object()}, None, About())
    assert not (tmp_path / "checkpoints").exists()
    checkpointer.close()


def test_a_state_that_is_refused_was_not_saved_though_the_one_before_it_was(tmp_path: Path) -> None:
    checkpointer = TorchCheckpointer(tmp_path, Comm())
    checkpointer.save(1, state(1), None, About(), blocking=True)
    with pytest.raises(RequestError, match="without pickle"):
        checkpointer.save(2, {"model": object()}, None, About())
    assert not checkpointer.wait()
    checkpointer.save(2, state(2), None, About())
    assert checkpointer.wait()
    loaded = TorchCheckpointer(tmp_path, Comm()).load([tmp_path])
    assert loaded is not None and loaded.step == 2


def test_a_state_is_saved_where_no_memory_can_be_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory is rounded up to a power of two, and limited: a slower copy is one too."""
    asked: list[int] = []

    def refuse(size: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
        asked.append(size)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False))
    monkeypatch.setattr(accelerator, "pinned_zeros", refuse)
    checkpointer = TorchCheckpointer(tmp_path, Comm())
    checkpointer.save(7, state(7), own(7, 0), About())
    assert checkpointer.wait() and len(asked) == 1
    loaded = TorchCheckpointer(tmp_path, Comm()).load([tmp_path])
    assert loaded is not None
    check(loaded, 0, has_own=True)
