"""The ways to save that `checkpoint.py` runs side by side, over one and the same training.

    allranks            our Trainer: `save(wait=False)`, a thread writes. Each rank writes its half,
                        with a digest; fsync of files, manifest and folders; the last one is removed
    allranks-blocking   the same, `save()`: it returns when the checkpoint is committed
    torch-save          the usual script: rank 0 calls `torch.save`, the others wait in a barrier.
                        Returns when the operating system has the bytes: a power cut may take them
    torch-save-fsync    the same beside and renamed, with fsync of the file and its folder
    dcp                 `torch.distributed.checkpoint.save`: each rank writes its half, with fsync
    dcp-async           its `async_save`, as in the tutorial, on a group of its own
    dcp-async-kept      the same with a stager that is kept, so that later saves reuse its memory

None of the others has digests. The state is the same: weights and both moments of AdamW. Loading
is until model and optimizer hold the state again.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from allranks.checkpoint.files import fsync_folder
from allranks.checkpoint.folder import FOLDER, committed, verify_files
from allranks.checkpoint.format import read_manifest
from allranks.torch import Trainer


class Saver(ABC):
    """One way to save; `commit_s` are the seconds from each call to its end, on the leader."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.comm = trainer.comm
        self.commit_s: list[float] = []
        if self.comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self.comm.barrier()

    @abstractmethod
    def save(self) -> None:
        """Save; when this returns, training may go on. Every rank calls it."""

    def wait(self) -> None:
        """Until the last save is committed."""

    @abstractmethod
    def load(self) -> None:
        """Take up what was saved last. Every rank calls it."""

    def files(self) -> list[Path]:
        """What was saved last."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def tidy(self) -> None:
        """Remove what is not the last save; the leader calls this between measurements."""


class Nothing(Saver):
    """No save: the same steps."""

    def save(self) -> None:
        pass

    def load(self) -> None:
        pass


class AllRanks(Saver):
    """Our own, asynchronous."""

    wait_in_save = False

    def save(self) -> None:
        if not self.trainer.save(wait=self.wait_in_save):
            raise SystemExit("the checkpoint was not committed: see its report")

    def wait(self) -> None:
        saving = self.trainer._saving  # training has gone on: `save` would save another step
        assert saving is not None
        if not saving.checkpointer.wait():
            raise SystemExit("the checkpoint was not committed: see its report")

    def heard(self, event: str, **values: Any) -> None:
        """What the trainer reports; of contenders with one trainer, each takes what is its own."""
        if event == "checkpoint":
            self.commit_s.append(values["seconds"])

    def load(self) -> None:
        assert self.trainer.resume() is not None

    def newest(self) -> Path:
        return committed(Path(self.trainer.job.run_dir) / FOLDER)[0]

    def files(self) -> list[Path]:
        return [path for path in self.newest().iterdir() if path.is_file()]


class Blocking(AllRanks):
    """Our own, waited for."""

    wait_in_save = True


class Verify(AllRanks):
    """Only the digests of our own: each rank reads its share of the files."""

    def load(self) -> None:
        manifest = read_manifest(self.newest())
        share = sorted(manifest.files)[self.comm.rank :: self.comm.size]
        problems = verify_files(self.newest(), manifest, share)
        self.comm.barrier()
        assert not problems, problems


class TorchSave(Saver):
    """One file, written by the leader."""

    path_name = "state.pt"

    def save(self) -> None:
        begun = time.perf_counter()
        if self.comm.rank == 0:
            model, optimizer = self.trainer.strategy.model, self.trainer.strategy.step.optimizer
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            self.write(state, self.folder / self.path_name)
        self.comm.barrier()
        self.commit_s.append(time.perf_counter() - begun)

    def write(self, state: dict[str, Any], path: Path) -> None:
        torch.save(state, path)

    def load(self) -> None:
        state = torch.load(self.folder / self.path_name, weights_only=True)
        self.trainer.strategy.model.load_state_dict(state["model"])
        self.trainer.strategy.step.optimizer.load_state_dict(state["optimizer"])
        self.comm.barrier()


class TorchSaveFsync(TorchSave):
    """With the promise that ours makes: whole or not at all, also after a power cut."""

    def write(self, state: dict[str, Any], path: Path) -> None:
        beside = path.with_suffix(".new")
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        fsync_folder(path.parent)


class Dcp(Saver):
    """A folder for each save, each rank writes what `dcp` gives it."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer, folder)
        self.number = 0

    def state(self) -> dict[str, Any]:
        step = self.trainer.strategy.step
        model, optimizer = get_state_dict(step.model, step.optimizer)
        return {"model": model, "optimizer": optimizer}

    def next_folder(self) -> Path:
        self.number += 1
        return self.folder / str(self.number)

    def save(self) -> None:
        begun = time.perf_counter()
        save(self.state(), checkpoint_id=self.next_folder())
        self.commit_s.append(time.perf_counter() - begun)

    def load(self) -> None:
        state, step = self.state(), self.trainer.strategy.step
        load(state, checkpoint_id=self.folder / str(self.number))
        set_state_dict(
            step.model,
            step.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def tidy(self) -> None:
        for number in range(1, self.number):
            shutil.rmtree(self.folder / str(number), ignore_errors=True)


class DcpAsync(Dcp):
    """The state is copied in the call, and written by a thread."""

    is_stager_kept = False

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer, folder)
        self.group = dist.new_group(backend="gloo") if self.comm.size > 1 else None
        self.under_way: Future[Any] | None = None
        self.stager = (
            DefaultStager(StagingOptions(False, False, False, False))
            if self.is_stager_kept
            else None
        )

    def save(self) -> None:
        self.wait()
        begun = time.perf_counter()
        answer: Any = async_save(
            self.state(),
            checkpoint_id=self.next_folder(),
            process_group=self.group,
            async_stager=self.stager,
        )
        answer.add_done_callback(lambda _: self.commit_s.append(time.perf_counter() - begun))
        self.under_way = answer

    def wait(self) -> None:
        if self.under_way is not None:
            self.under_way.result()
        self.under_way = None


class DcpAsyncKept(DcpAsync):
    """With a stager that keeps its memory."""

    is_stager_kept = True


SAVERS: dict[str, Callable[[Trainer, Path], Saver]] = {
    "none": Nothing,
    "none-again": Nothing,
    "allranks": AllRanks,
    "allranks-blocking": Blocking,
    "allranks-verify": Verify,
    "torch-save": TorchSave,
    "torch-save-fsync": TorchSaveFsync,
    "dcp": Dcp,
    "dcp-async": DcpAsync,
    "dcp-async-kept": DcpAsyncKept,
}
