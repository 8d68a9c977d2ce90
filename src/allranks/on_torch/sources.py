"""Where samples come from: tensors in memory, a map-style data set, or a stream per shard.

A source turns sample numbers into a collated batch. Random choices made while a sample is read
(augmentation, transforms inside a data set) draw from streams keyed by (seed, epoch, sample), so
it does not matter which rank or which loader worker reads it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from allranks.errors import RequestError
from allranks.launch.linux import die_with_parent
from allranks.on_torch.nested import map_tensors, tensors_in
from allranks.on_torch.task import Task
from allranks.order import random_key

ONE_READER = "each rank reads its streams itself, sample after sample"

Ids = NDArray[np.int64]  # sample numbers, (samples,)
Key = tuple[int, int]  # (epoch, sample number)


class Source(Protocol):
    """Samples by number. `batches` yields one collated batch for each (epoch, ids), in order."""

    def __len__(self) -> int: ...

    def batches(self, wanted: Iterable[tuple[int, Ids]]) -> Iterator[Any]: ...


class TensorSource:
    """Tensors whose dimension 0 runs over the samples: a batch is one indexing operation."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors
        self._samples = next(tensors_in(tensors)).shape[0]

    def __len__(self) -> int:
        return self._samples

    def batches(self, wanted: Iterable[tuple[int, Ids]]) -> Iterator[Any]:
        for _, ids in wanted:
            index = torch.from_numpy(ids)

            def chosen(tensor: Tensor, index: Tensor = index) -> Tensor:
                return tensor.index_select(0, index)

            yield map_tensors(chosen, self.tensors)


def seed_generators(seed: int) -> None:
    """Key every generator that user code may draw from: Python's, NumPy's and torch's own."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


class MapSource:
    """A data set with `__getitem__` and `__len__`, read here or by `workers` processes."""

    def __init__(self, dataset: Any, task: Task, seed: int, workers: int, augments: bool) -> None:
        self.dataset, self.task, self.seed, self.workers = dataset, task, seed, workers
        self._augments = augments
        self._collate = task.collate if task.overrides("collate") else default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        """One sample, with every generator that a data set may use keyed by it."""
        epoch, number = key
        seed = random_key(self.seed, epoch, number)
        seed_generators(seed)
        sample = self.dataset[number]
        if self._augments:
            sample = self.task.augment(sample, np.random.Generator(np.random.Philox(seed)))
        return sample

    def batches(self, wanted: Iterable[tuple[int, Ids]]) -> Iterator[Any]:
        keys = ([(epoch, int(number)) for number in ids] for epoch, ids in wanted)
        if not self.workers:
            for batch in keys:
                yield self._collate([self[key] for key in batch])
            return
        yield from DataLoader(
            self,  # type: ignore[arg-type]
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=self._collate,
            multiprocessing_context="fork",
            worker_init_fn=_start_worker,
        )


def _start_worker(number: int) -> None:
    """In a loader worker: end with the rank, and leave the other cores to the ranks."""
    die_with_parent()
    torch.set_num_threads(1)


class StreamSource:
    """A stream for each shard, opened anew each epoch. How long it is, only reading it tells."""

    def __init__(self, dataset: Any, task: Task, seed: int) -> None:
        self.dataset, self.task, self.seed = dataset, task, seed
        self._augments = task.overrides("augment")
        self._collate = task.collate if task.overrides("collate") else default_collate

    def open(self, shard: int, epoch: int, skip: int) -> Iterator[Any]:
        """The samples of one shard in one epoch, from number `skip` on."""
        stream = iter(self.dataset.open(shard, epoch, self.seed, skip))
        for number, sample in enumerate(stream, start=skip):
            if not self._augments:
                yield sample
                continue
            key = random_key(self.seed, epoch, shard, number)
            yield self.task.augment(sample, np.random.Generator(np.random.Philox(key)))

    def collate(self, samples: list[Any]) -> Any:
        return self._collate(samples)


def source_of(data: Any, task: Task, seed: int, workers: int, name: str) -> Source | StreamSource:
    """The source that reads `data`, which `task.<name>()` returned; raises `RequestError`.

    Only training data is augmented.
    """
    augments = name == "train_data" and task.overrides("augment")
    if hasattr(data, "open") and not hasattr(data, "__getitem__"):
        if workers:
            raise _unusable(name, f"a stream, with --loader-workers {workers}", ONE_READER)
        return StreamSource(data, task, seed)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    if isinstance(data, (Tensor, tuple, dict)):
        source: Source = TensorSource(_as_tensors(data, name))
        if augments or task.overrides("collate"):
            source = MapSource(_Rows(source.tensors), task, seed, workers, augments)  # type: ignore[attr-defined]
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        source = MapSource(data, task, seed, workers, augments)
    else:
        raise _unusable(name, type(data).__name__, "it has neither samples by number nor `open`")
    if len(source) == 0:
        raise _unusable(name, "0 samples", "there is nothing to learn from")
    return source


class _Rows:
    """Tensors read row by row, for a task that wants to see each sample."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return int(next(tensors_in(self.tensors)).shape[0])

    def __getitem__(self, number: int) -> Any:
        return map_tensors(lambda tensor: tensor[number], self.tensors)


def _as_tensors(data: Any, name: str) -> Any:
    """Arrays as tensors; all must agree on the number of samples."""
    if isinstance(data, dict):
        data = {k: torch.as_tensor(v) for k, v in data.items() if _is_array(v, name)}
    elif isinstance(data, tuple):
        data = tuple(torch.as_tensor(v) for v in data if _is_array(v, name))
    lengths = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_in(data)}
    if len(lengths) != 1:
        raise _unusable(name, f"lengths {sorted(lengths)}", "dimension 0 is the samples of each")
    return data


def _is_array(value: Any, name: str) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    raise _unusable(
        name, f"a {type(value).__name__} among tensors", "all must be tensors or arrays"
    )


def _unusable(name: str, found: str, why: str) -> RequestError:
    return RequestError(
        asked=f"{name}() of the task",
        found=found,
        why=why,
        do="return tensors, a map-style data set, or an object with open(shard, epoch, seed, skip)",
    )
