"""Tasks that hand in data as people have it already: loaders of torch,
and Hugging Face data sets."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

import contract_tasks
from contract_tasks import SAMPLES, made


class Lengths(Sampler[list[int]]):
    """Batches of neighbours in length, of 3 to 24 samples, in random order: a bucket sampler."""

    sizes = (24, 3, 24, 17, 24, 9)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = list(range(SAMPLES))
        starts = [sum(self.sizes[:n]) for n in range(len(self.sizes))]
        batches = [numbers[s : s + size] for s, size in zip(starts, self.sizes, strict=True)]
        for chosen in torch.randperm(len(batches)):
            yield batches[chosen]

    def __len__(self) -> int:
        return len(self.sizes)


class Lawless(Sampler[int]):
    """Draws from what nobody can key."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(SAMPLES), key=lambda number: os.urandom(8)))

    def __len__(self) -> int:
        return SAMPLES


class Shuffled(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows without numbers, in an order of their own, noisy; nobody knows how many."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = made(SAMPLES, 4)
        for number in torch.randperm(SAMPLES):
            yield rows[number] + 0.1 * torch.randn(4, dtype=torch.float64), rows[number].sum()


def named(samples: list[Any]) -> dict[str, Tensor]:
    """A `collate_fn` of one's own."""
    rows, targets = zip(*samples, strict=True)
    return {"row": torch.stack(rows), "target": torch.stack(targets)}


@dataclass(kw_only=True)
class Named(contract_tasks.Plain):
    """Rows in batches that are dicts; the data is `loader`."""

    epochs: int = 2

    def inputs(self, batch: Any) -> Any:
        return (batch["row"],)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch["target"]).square()


class ByNumber(Named):
    def train_data(self) -> Any:
        data = contract_tasks.NoisyRows()
        return DataLoader(data, batch_size=7, shuffle=True, num_workers=3, collate_fn=named)

    def eval_data(self) -> Any:
        return DataLoader(contract_tasks.NoisyRows(), batch_size=64, collate_fn=named)


class InBuckets(Named):
    def train_data(self) -> Any:
        data = contract_tasks.NoisyRows()
        return DataLoader(data, batch_sampler=Lengths(), collate_fn=named)


class AsAWhole(Named):
    def train_data(self) -> Any:
        return DataLoader(Shuffled(), batch_size=24, num_workers=2, collate_fn=named)

    def eval_data(self) -> Any:
        return DataLoader(contract_tasks.NoisyRows(), batch_size=64, collate_fn=named)


class Remembering(Lengths):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("nobody saves it")


class InBucketsWithAState(InBuckets):
    def train_data(self) -> Any:
        data = contract_tasks.NoisyRows()
        return DataLoader(data, batch_sampler=Remembering(), collate_fn=named)


class WithoutLaw(Named):
    def train_data(self) -> Any:
        sampler = BatchSampler(Lawless(), 24, drop_last=False)
        return DataLoader(contract_tasks.NoisyRows(), batch_sampler=sampler, collate_fn=named)


class OfItsRank(IterableDataset[Any]):
    """Every second row of a rank of two, as tutorials teach it."""

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        rows = made(SAMPLES, 4).float()[rank::ranks]
        return iter([(row, row.sum()) for row in rows])


@dataclass(kw_only=True)
class ShardsItself(contract_tasks.Plain):
    loads: bool = False

    def train_data(self) -> Any:
        return DataLoader(OfItsRank(), self.batch_size) if self.loads else OfItsRank()


class Columns:
    """What a `datasets.Dataset` of Hugging Face is to a loop: rows that are dicts, lists as it has
    them or, after `with_format("torch")`, tensors. For machines without that library.
    """

    def __init__(self, columns: dict[str, list[Any]], kind: str | None = None) -> None:
        self._columns, self._kind = columns, kind
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(self._columns[self.column_names[0]])

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return {name: self._formatted(column[key]) for name, column in self._columns.items()}

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        return [self[key] for key in keys]

    def with_format(self, kind: str | None) -> Columns:
        return Columns(self._columns, kind)

    def _formatted(self, value: Any) -> Any:
        if self._kind != "torch":
            return value
        is_whole = isinstance(value, int)
        return torch.tensor(value, dtype=torch.int64 if is_whole else torch.float32)


@dataclass(kw_only=True)
class HuggingFace(contract_tasks.Plain):
    """Rows of a Hugging Face data set, made in memory; `library` is theirs or the stand-in."""

    library: str = "stand-in"
    epochs: int = 2

    def train_data(self) -> Any:
        rows = made(SAMPLES, 4).round(decimals=2).tolist()
        columns = {"row": rows, "label": [int(row[0] > 0) for row in rows]}
        if self.library == "stand-in":
            return Columns(columns).with_format("torch")
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_HOME"] = os.path.join(tempfile.gettempdir(), "huggingface")
        library = importlib.import_module(self.library)
        return library.Dataset.from_dict(columns).with_format("torch")

    def eval_data(self) -> Any:
        return self.train_data()

    def inputs(self, batch: Any) -> Any:
        return (batch["row"],)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output.squeeze(1) - batch["label"]).square()


class InMemory(HuggingFace):
    """The same rows as tensors."""

    def train_data(self) -> Any:
        rows = made(SAMPLES, 4).round(decimals=2).float()
        return {"row": rows, "label": (rows[:, 0] > 0).long()}
