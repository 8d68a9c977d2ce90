"""One rank of `memory.py`: trains a transformer, and watches the memory that is in use."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Task, Trainer

TOKENS, HEADS = 500, 8
STEPS = 3
EVERY_S = 0.002
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


@dataclass(kw_only=True)
class Transformer(Task):
    """`layers` blocks of a width of `width`: 12 · width² parameters each."""

    batch_size: int = 8
    layers: int = 24
    width: int = 512

    def model(self) -> nn.Module:
        return _Model(self.layers, self.width)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-3)

    def train_data(self) -> Tensor:
        return torch.randint(TOKENS, (64, 17), generator=torch.Generator().manual_seed(0))

    def inputs(self, batch: Any) -> Any:
        return batch[:, :-1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch[:, 1:], reduction="none")


class _Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(TOKENS, width), nn.Linear(width, TOKENS)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.embedding(tokens)
        for block in self.blocks:
            found = block(found)
        return self.output(found)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def bytes_in_use() -> int:
    """What this process has asked of its allocator and not given back."""
    libc: Any = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class Watched:
    """While it is entered: the most bytes in use beyond those at its start, phase by phase."""

    def __init__(self) -> None:
        self.start, self.phase = bytes_in_use(), "build"
        self.peaks: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            own = bytes_in_use() - self.start
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), own)
            time.sleep(EVERY_S)


def measure_as_rank(
    rank: int, ranks: int, strategy: str, task: dict[str, int], folder: str
) -> None:
    """Build, train, save a checkpoint; write the peaks of this rank to `rank-R.json`."""
    torch.set_num_threads(1)
    world = World(rank, ranks, rank, ranks, 0, str(Path(folder) / "store"))
    job = Job(strategy=strategy, steps=STEPS, run_dir=str(Path(folder) / "run"))
    model = Transformer(**task)
    warm = Transformer(layers=1, width=64)  # what is imported on the way is no part of a model
    with Trainer(warm, Job(strategy=strategy), world=_beside(world)) as trainer:
        trainer.step(next(trainer.batches()))
    with Watched() as watched:
        with Trainer(model, job, world=world) as trainer:
            weights = sum(p.numel() for p in trainer.strategy.model.parameters()) * 4
            watched.phase = "steps"
            for batch in trainer.batches():
                trainer.step(batch)
            watched.phase = "checkpoint"
            trainer.save()
        watched.phase = "end"
    found = {"weights": weights, **watched.peaks}
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))


def _beside(world: World) -> World:
    return World(
        world.rank, world.size, world.rank, world.size, 0, world.store and f"{world.store}-warm"
    )
