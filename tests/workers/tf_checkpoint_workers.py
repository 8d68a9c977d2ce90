"""What runs in the processes of the checkpoint tests of the TensorFlow engine; needs numpy only.

Every array of a state is filled from its step number, so that a mixture of two steps shows.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from allranks.checkpoint.array_snapshot import ArrayCopies
from allranks.checkpoint.checkpointer import Checkpointer, LeaderAlone
from allranks.checkpoint.commit import ALONE, Ranks
from allranks.checkpoint.format import About
from allranks.job.faults import POINTS as ALL_POINTS
from allranks.job.faults import Faults
from small_disk import small_disk

POINTS = [point for point in ALL_POINTS if point.startswith("save:")]
STANDS = ("save:committed", "save:prune")


def state(step: int) -> dict[str, Any]:
    """What all ranks hold after `step`."""
    return {
        "model": {f"dense_{i}/kernel": np.full((3, 5 + i), step, np.float32) for i in range(4)},
        "optimizer": {
            "adam/momentum": np.full((4, 6), step, np.float64).T,
            "rate": np.float32(0.5),
        },
        "optimizer_kind": "Adam",
        "progress": {"batch_index": step, "loss": float("nan")},
    }


def assert_same(found: Any, wanted: Any) -> None:
    """Equal to the bit; numbers of numpy come back as arrays without axes."""
    if isinstance(wanted, (np.ndarray, np.generic)):
        native = wanted.dtype.newbyteorder("=")
        assert isinstance(found, np.ndarray) and found.dtype == native
        assert found.shape == wanted.shape and found.flags.writeable
        assert found.tobytes() == np.asarray(wanted).astype(native).tobytes()
        return
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted or found != found != wanted != wanted


def checkpointer(folder: Path, ranks: Ranks = ALONE, **rules: Any) -> Checkpointer:
    """One whose leader writes for all."""
    return Checkpointer(folder, LeaderAlone(ranks), ArrayCopies(), **rules)


class Meeting:
    """Where the ranks of one process, a thread for each, tell each other texts."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=120)
        self.said = [""] * size

    def gather(self, rank: int, text: str) -> list[str]:
        self.said[rank] = text
        self.barrier.wait()
        told = list(self.said)
        self.barrier.wait()
        return told


class Seat:
    """One rank of a meeting. `hears` counts its exchanges; `twisted` changes what it says."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size, self.hears = meeting, rank, meeting.size, 0
        self.twisted: Callable[[str], str] = str

    def gather_texts(self, text: str) -> list[str]:
        assert threading.current_thread().name == f"rank-{self.rank}", "not the thread that trains"
        self.hears += 1
        return self.meeting.gather(self.rank, self.twisted(text))


def on_ranks(size: int, act: Callable[[Seat], Any]) -> list[Any]:
    """What `act` returns on each rank, or what it raised."""
    meeting, found = Meeting(size), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(Seat(meeting, rank))
        except BaseException as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(r,), name=f"rank-{r}") for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def dies_at(argument: dict[str, Any]) -> int:
    """Commit step 1, then be killed at a point of the save of step 2."""
    faults = Faults.of(f"kill@step=2,at={argument['point']}", 0, 0)
    saver = checkpointer(Path(argument["folder"]), ALONE, reach=faults.reach)
    saver.save(1, state(1), None, About(), blocking=True)
    saver.save(2, state(2), None, About(), blocking=argument["blocking"])
    saver.wait()
    signal.pause()  # nothing was reached: this never ends well
    return os.EX_SOFTWARE


def fills_the_disk(argument: dict[str, Any]) -> None:
    """On a disk with room for one checkpoint and a half."""
    os.makedirs(argument["folder"], exist_ok=True)
    small_disk(argument["folder"], "size=640k")
    folder = Path(argument["folder"]) / "checkpoints"
    told: list[tuple[str, dict[str, Any]]] = []
    saver = checkpointer(folder, ALONE, report=lambda event, **values: told.append((event, values)))

    def save(step: int, count: int) -> bool:
        saver.save(step, {"mine": np.full(count, step, np.uint8)}, None, About())
        return saver.wait()

    assert save(1, 400_000)
    assert not save(2, 400_000)
    assert not save(3, 400_000)
    loaded = saver.load([folder])
    assert loaded is not None and loaded.step == 1 and int(loaded.common["mine"].sum()) == 400_000
    assert len(list(folder.iterdir())) == 1, "what did not fit is gone"
    assert save(4, 4_000), "training went on, and there is room for less"
    failures = [values for event, values in told if event == "checkpoint_failed"]
    assert [values["step"] for values in failures] == [2, 3]
    assert all("No space left on device" in values["error"] for values in failures), failures
