"""Where samples come from: tensors in memory, a map-style data set, or a stream per shard.

A source turns sample numbers into collated batches. Random choices made while a sample is read
(augmentation, transforms inside a data set) draw from streams keyed by (seed, epoch, sample), so
it does not matter which rank, which loader process or which thread reads it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from allranks.errors import RequestError
from allranks.launcher.processes.leftovers import note_names
from allranks.launcher.processes.linux import die_with_parent
from allranks.torch.data.collate import map_tensors, tensors_in
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.task import Task
from allranks.training.order import Epochs, random_key
from allranks.training.prefetch import staged

Ids = NDArray[np.int64]  # sample numbers, (samples,)
Key = tuple[int, int]  # (epoch, sample number)
Wanted = Iterable[tuple[int, Ids]]  # (epoch, sample numbers) of each batch
Place = Callable[[Any], Any]
DEFAULT_PREFETCH = 2  # batches, where nobody says how many
COLLATE = -1  # what the generators are keyed for, beside samples


def as_it_is(data: Any) -> Any:
    """What is not placed."""
    return data


class Source(Protocol):
    """Samples by number. `batches` yields one collated batch for each (epoch, ids), in order.

    It is called in the thread that trains. Of the batches `ahead` are made before they are asked
    for, where anything is, and `place` is applied to each as soon as it is there.
    """

    def __len__(self) -> int: ...

    def batches(
        self, wanted: Wanted, ahead: int = DEFAULT_PREFETCH, place: Place = as_it_is
    ) -> Generator[Any]: ...


class TensorSource:
    """Tensors whose dimension 0 runs over the samples: a batch is one indexing operation."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors
        self._samples = next(tensors_in(tensors)).shape[0]

    def __len__(self) -> int:
        return self._samples

    def batches(
        self, wanted: Wanted, ahead: int = DEFAULT_PREFETCH, place: Place = as_it_is
    ) -> Generator[Any]:
        for _, ids in wanted:
            index = torch.from_numpy(ids)

            def chosen(tensor: Tensor, index: Tensor = index) -> Tensor:
                return tensor.index_select(0, index if tensor.is_cpu else index.to(tensor.device))

            yield place(map_tensors(chosen, self.tensors))


class MapSource:
    """A data set with samples by number, read in the step or by `workers` beside it.

    Without workers the thread that trains reads: the generators of the process are keyed by the
    sample then, so no other thread may. Else `workers` processes do, which have generators of
    their own; or, of a data set with `read` and `decode` (see `allranks.programs.readers`), as many
    threads for each of the two. Such a data set, `collate` and `augment` draw from nothing but what
    they are given.
    """

    def __init__(
        self,
        dataset: Any,
        task: Task,
        seed: int,
        workers: int,
        training: bool,
        collate: Callable[[list[Any]], Any] = default_collate,
        loader: DataLoader[Any] | None = None,
    ) -> None:
        self._epochs = Epochs(loader, dataset, collate)
        self.dataset, self.task, self.seed, self.workers = _in_stages(dataset), task, seed, workers
        self.is_staged = hasattr(self.dataset, "read") and hasattr(self.dataset, "decode")
        self._training = training
        self._augments = training and task.overrides("augment")
        self._collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        """One sample, with every generator that may be drawn from keyed by it."""
        epoch, number = key
        if self._epochs:
            self.enter(epoch)
        if self.is_staged:
            return self._decode(key, self._read(key))
        seed = random_key(self.seed, epoch, number)
        seed_generators(seed)
        sample = self.dataset[number]
        return self.task.augment(sample, _generator(seed)) if self._augments else sample

    def batch(self, keys: list[Key]) -> Any:
        """The collated batch of these samples; what collate draws is keyed by the first of them."""
        return self.collated(keys, [self[key] for key in keys])

    def collated(self, keys: list[Key], samples: list[Any]) -> Any:
        """These samples of these keys as a batch."""
        if not self.is_staged:
            seed_generators(random_key(self.seed, *keys[0], COLLATE))
        return self._collate(samples)

    def _read(self, key: Key) -> Any:
        return self.dataset.read(key[1])

    def _decode(self, key: Key, raw: Any) -> Any:
        if not self._training:
            return self.dataset.decode(raw, None)
        generator = _generator(random_key(self.seed, *key))
        sample = self.dataset.decode(raw, generator)
        return self.task.augment(sample, generator) if self._augments else sample

    def batches(
        self, wanted: Wanted, ahead: int = DEFAULT_PREFETCH, place: Place = as_it_is
    ) -> Generator[Any]:
        keys = ([(epoch, int(number)) for number in ids] for epoch, ids in wanted)
        if not self.workers:
            return (place(self.batch(batch)) for batch in keys)
        if self.is_staged:

            def collate(samples: list[Any]) -> Any:
                return place(self._collate(samples))

            stages = self._read, self._decode, collate, self.workers, ahead
            return self._epoch_by_epoch(keys, stages) if self._epochs else staged(keys, *stages)
        each = self.made_ahead(ahead) // self.workers
        return _unless_refused(_in_processes(self.batch, keys, self.workers, each), place)

    @property
    def has_epochs(self) -> bool:
        """Whether anything of the data has a `set_epoch`."""
        return bool(self._epochs)

    def enter(self, epoch: int) -> None:
        """Call the `set_epoch` of the data, if it has one: this epoch is read next."""
        self._epochs.enter(epoch, lambda: seed_generators(random_key(self.seed, epoch)))

    def _epoch_by_epoch(self, keys: Iterator[list[Key]], stages: Any) -> Generator[Any]:
        """In stages, whose threads share the data set: no epoch begins before the last one ends."""
        for epoch, of_epoch in groupby(keys, key=lambda batch: batch[0][0]):
            self.enter(epoch)
            yield from staged(of_epoch, *stages)

    def in_loader_process(self, make: Callable[[list[Key]], Any], keys: list[Key]) -> Any:
        """`make(keys)`, called where samples are read: what it opens there stays there."""
        if not self.workers or self.is_staged:
            return make(keys)
        (batch,) = _unless_refused(_in_processes(make, [keys], 1), as_it_is)
        return batch

    def check_draws(self) -> None:
        """Raise if reading a sample in stages draws from the generators of the process.

        They belong to the training thread: draws of another thread would differ from run to run.
        """
        if not (self.is_staged and self._training):
            return
        before = drawn_from()
        self._collate([self[0, 0]])
        if drawn_from() != before:
            raise RequestError(
                asked="train_data() of the task: a data set with read and decode",
                found="a sample draws from the generators of Python, NumPy or torch themselves",
                why="it is decoded and augmented by threads, which share these with the training",
                do="draw from the `random` that decode(raw, random) and augment(sample, "
                "random) get",
            )

    def made_ahead(self, ahead: int) -> int:
        """The number of batches in preparation for `ahead`: a loader process makes whole ones."""
        if not self.workers or self.is_staged:
            return ahead
        return self.workers * max(1, ahead // self.workers)


def drawn_from() -> bytes:
    """The states of the generators of the process: they change with any draw."""
    name, keys, *position = np.random.get_state(legacy=True)
    torchs = torch.get_rng_state().numpy().tobytes()
    return repr((random.getstate(), name, position)).encode() + keys.tobytes() + torchs  # type: ignore[union-attr]


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


# --- in a loader process ------------------------------------------------------------------------


class _Refused:
    """A `RequestError` on its way out of a process; an exception would lose its parts there."""

    def __init__(self, error: RequestError) -> None:
        self.parts = error.to_data()


class _InProcess:
    """The batches of a source, for the loader's own processes."""

    def __init__(self, make: Callable[[list[Key]], Any]) -> None:
        self._make = make

    def __getitems__(self, keys: list[Key]) -> Any:
        """What torch asks for a whole batch by; it goes through as it is."""
        try:
            return self._make(keys)
        except RequestError as error:
            return _Refused(error)


def _in_processes(
    make: Callable[[list[Key]], Any],
    keys: Iterable[list[Key]],
    workers: int,
    ahead: int = DEFAULT_PREFETCH,
) -> Iterator[Any]:
    """`make(keys)` for each of these keys, by processes that are forked here, by this thread."""
    loader: DataLoader[Any] = DataLoader(
        _InProcess(make),  # type: ignore[arg-type]
        batch_sampler=keys,
        num_workers=workers,
        prefetch_factor=ahead,
        collate_fn=as_it_is,
        multiprocessing_context="fork",
        worker_init_fn=_start_process,
    )
    return iter(loader)


def _unless_refused(batches: Iterator[Any], place: Place) -> Generator[Any]:
    """The batches; at their end, or at an error, the processes end too, whoever holds the error."""
    try:
        for batch in batches:
            if isinstance(batch, _Refused):
                raise RequestError(**batch.parts)
            yield place(batch)
    finally:
        end = getattr(batches, "_shutdown_workers", None)  # torch ends them when the object goes
        if end is not None:
            end()


def _start_process(number: int) -> None:
    """End with the rank, leave nothing behind, and leave the other cores to the ranks."""
    die_with_parent()
    note_names()
    torch.set_num_threads(1)


# --- parts of data sets, and streams ------------------------------------------------------------


class _Part:
    """What `random_split` makes of a data set with `read` and `decode`: it has them, too."""

    def __init__(self, subset: Subset[Any]) -> None:
        self._whole, self._numbers = _in_stages(subset.dataset), subset.indices
        self.decode = self._whole.decode

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> Any:
        return self._whole.read(self._numbers[number])


def _in_stages(dataset: Any) -> Any:
    """The data set, with the stages of the one that it is a part of."""
    if type(dataset) is not Subset:
        return dataset
    whole = _in_stages(dataset.dataset)
    return _Part(dataset) if hasattr(whole, "read") and hasattr(whole, "decode") else dataset


class TensorRows:
    """Tensors read row by row, for a task that wants to see each sample."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return int(next(tensors_in(self.tensors)).shape[0])

    def __getitem__(self, number: int) -> Any:
        return map_tensors(lambda tensor: tensor[number], self.tensors)


class StreamSource:
    """A stream for each shard, opened anew each epoch. How long it is, only reading it tells."""

    def __init__(self, dataset: Any, task: Task, seed: int) -> None:
        self.dataset, self.task, self.seed = dataset, task, seed
        self._augments = task.overrides("augment")
        self._collate = task.collate if task.overrides("collate") else default_collate

    def rows(self, shard: int, epoch: int, skip: int, state: str = "") -> Any:
        """What the data set opens for one shard in one epoch, at number `skip` or at a state."""
        rows = iter(self.dataset.open(shard, epoch, self.seed, 0 if state else skip))
        if state:
            rows.load_state_dict(json.loads(state))
        return rows

    def samples(self, rows: Iterator[Any], shard: int, epoch: int, first: int) -> Iterator[Any]:
        """The samples of these rows, the first of which has the number `first` in its shard."""
        for number, sample in enumerate(rows, start=first):
            if not self._augments:
                yield sample
                continue
            key = random_key(self.seed, epoch, shard, number)
            yield self.task.augment(sample, _generator(key))

    def collate(self, samples: list[Any]) -> Any:
        return self._collate(samples)


def state_of_rows(rows: Any) -> str:
    """The state of what a stream has opened, as JSON; "" if it has none. Or `RequestError`."""
    if not (hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict")):
        return ""
    state = rows.state_dict()
    try:
        return "" if state is None else json.dumps(state)
    except (TypeError, ValueError) as error:
        raise RequestError(
            asked="to save where a stream is",
            found=f"a state_dict() that is no JSON: {error}",
            why="a checkpoint has the state of each shard as JSON, so that any rank can read it",
            do="return plain values, or leave state_dict() out: a resume then reads anew",
        ) from error
