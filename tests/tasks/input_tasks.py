"""Tasks whose data comes in stages, and data sets that count what of them is in memory."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import contract_tasks
from contract_tasks import SAMPLES

FORK = multiprocessing.get_context("fork")


@dataclass(kw_only=True)
class Staged(contract_tasks.Pictures):
    """A data set with `read` and `decode`, both random and both keyed, and augmentation."""

    def train_data(self) -> Any:
        return StagedRows()

    def eval_data(self) -> Any:
        return StagedRows()


class StagedRows:
    """Rows that are read as NumPy arrays and decoded to tensors, noisy in the training."""

    def __init__(self) -> None:
        self.rows = contract_tasks.made(SAMPLES, 4).numpy()

    def __len__(self) -> int:
        return SAMPLES

    def read(self, number: int) -> Any:
        return self.rows[number]

    def decode(self, raw: Any, random: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        noise = 0.0 if random is None else 0.1 * random.standard_normal(4)
        return torch.from_numpy(raw + noise), torch.tensor(raw.sum())

    def __getitem__(self, number: int) -> Any:
        return self.decode(self.read(number), None)


class Alive:
    """How many samples have been read and not been let go of: now, and at most so far."""

    def __init__(self) -> None:
        self._numbers = FORK.Array("q", 3)  # now, at most, read in all; shared with processes

    def come(self) -> None:
        with self._numbers.get_lock():
            self._numbers[0] += 1
            self._numbers[1] = max(self._numbers[:2])
            self._numbers[2] += 1

    def go(self, samples: int) -> None:
        with self._numbers.get_lock():
            self._numbers[0] -= samples

    @property
    def most(self) -> int:
        return self._numbers[1]

    @property
    def read(self) -> int:
        return self._numbers[2]


class CountedRows(StagedRows):
    """Counts its samples as they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = Alive()

    def read(self, number: int) -> Any:
        self.alive.come()
        return super().read(number)


class MapRows:
    """The same, read and decoded at once."""

    def __init__(self, rows: CountedRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


def stage_threads() -> list[str]:
    """The names of the threads of the input pipeline that are running."""
    return [t.name for t in threading.enumerate() if t.name.startswith("allranks-")]
