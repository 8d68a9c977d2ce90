"""A torch `DataLoader` of a task: the parts that are used, and those that the job replaces.

    a data set with samples by number   the data set and `collate_fn`; the order is the job's, or
                                        that of the data set with `shuffle=False`
    ... and a custom sampler            also the order of the sampler, drawn anew each epoch
    anything else (an IterableDataset)  every rank reads all of it and uses its own rows

Ranks do not communicate here, so every rank must draw the same: the generators of the process, and
those of sampler and loader, are keyed by (seed, epoch). Draws from other generators are detected if
they show in the first epoch (`TaskData.rehearse`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from allranks.errors import RequestError
from allranks.torch.checkpoint.state import kept_random_streams
from allranks.torch.data.collate import structure_of, tensors_in
from allranks.torch.data.sources import Ids
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.task import Task
from allranks.training.order import Epochs, random_key

CPU = torch.device("cpu")
END = None


class Iterated(IterableDataset[Any]):
    """Whatever can be iterated anew for each epoch, as a data set of torch."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.dataset = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def has_samples_by_number(loader: DataLoader[Any]) -> bool:
    """Whether the samples of a loader can be read one by one, in an order that is known before."""
    return (
        type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def brings_collate(loader: DataLoader[Any]) -> bool:
    """Whether a loader has a `collate_fn` of its own, and not the one that torch gives each."""
    return loader.collate_fn not in (None, default_collate, default_convert)


def order_of(loader: DataLoader[Any], task: Task, seed: int) -> SamplerOrder | None:
    """The order of a loader with a sampler of one's own; `None` where the job's takes its place."""
    sampler = sampler_of(loader)
    if type(sampler) in (SequentialSampler, DistributedSampler):
        return None
    if type(sampler) is RandomSampler and not sampler.replacement and _draws_all(sampler):
        return None
    return SamplerOrder(loader, task, seed, sampler)


def is_in_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader goes through its data set as that is: `shuffle=False`, torch's default."""
    sampler = sampler_of(loader)
    if type(sampler) is DistributedSampler:
        return not sampler.shuffle
    return type(sampler) is SequentialSampler


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What decides the order of samples, or of whole batches where a sampler cuts them."""
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _draws_all(sampler: RandomSampler) -> bool:
    return sampler.num_samples == len(sampler.data_source)


class SamplerOrder:
    """The batches of each epoch as a sampler draws them, the same on every rank; in one thread.

    The numbers of a plain sampler are cut into batches of the task; a batch sampler gives batches.
    `steps` is the number of batches of each epoch that has been drawn.
    """

    def __init__(self, loader: DataLoader[Any], task: Task, seed: int, sampler: Any) -> None:
        self._loader, self._task, self._seed, self._sampler = loader, task, seed, sampler
        self._epoch = -1
        self._batches: list[Ids] = []
        self.steps: dict[int, int] = {}
        try:
            self.first_guess = len(self._cut(range(len(sampler)))) if self.is_cut else len(sampler)
        except TypeError as error:
            found = f"{self.kind}, which has no length"
            raise _refused(found, "an epoch has an end", "give it a __len__") from error

    @property
    def kind(self) -> str:
        return type(self._sampler).__name__

    @property
    def is_of_torch(self) -> bool:
        """Whether it is a sampler of torch, which keeps nothing from epoch to epoch."""
        return type(self._sampler) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

    @property
    def is_cut(self) -> bool:
        """Whether the sampler gives single numbers."""
        return self._sampler is not self._loader.batch_sampler

    def batch(self, epoch: int, step: int) -> Ids:
        """The samples of step `step` of `epoch`: (batch,) numbers in the data set."""
        self.steps_in(epoch)
        return self._batches[step]

    def steps_in(self, epoch: int) -> int:
        """How many batches there are in an epoch, which is drawn if it was not the last drawn."""
        if epoch != self._epoch:
            with kept_random_streams(CPU):
                key_loader(self._loader, self._seed, epoch)
                self._batches = self._cut(list(self._sampler))
            if not self._batches:
                why = "training would never come to its end"
                raise _refused(f"no batch in epoch {epoch}", why, f"mend its {self.kind}")
            self._epoch, self.steps[epoch] = epoch, len(self._batches)
        return len(self._batches)

    def fingerprint(self) -> str:
        """What all ranks must have in common: the order of the first epoch."""
        self.steps_in(0)
        return _digest(batch.tobytes() for batch in self._batches)

    def _cut(self, drawn: Sequence[Any]) -> list[Ids]:
        size = self._task.batch_size
        drops = self._task.last_batch == "drop" or self._loader.drop_last
        if self.is_cut:
            drawn = [drawn[start : start + size] for start in range(0, len(drawn), size)]
            drawn = [batch for batch in drawn if len(batch) == size or not drops]
        largest = max(map(len, drawn), default=0)
        if largest > size:
            raise _larger(f"a batch of {largest}", size, largest)
        return [_numbers(batch) for batch in drawn if len(batch)]


def _numbers(batch: Any) -> Ids:
    ids = np.asarray(batch)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        why = "samples are read, and their randomness keyed, by number"
        raise _refused(f"{batch!r}"[:200], why, "let the sampler give whole numbers")
    return ids.astype(np.int64)


class WholeLoader:
    """Batches that a loader makes itself; each is the global batch of a step.

    Read in the step, by one process: what a loader draws is keyed there. How many there are is
    known when the last of an epoch has been read, or before if the loader says it.
    """

    def __init__(self, loader: DataLoader[Any], task: Task, seed: int) -> None:
        size = loader.batch_size
        if size is not None and size != task.batch_size:
            raise _larger(f"batches of {size}", task.batch_size, size)
        self.loader = copy.copy(loader)
        self.loader.num_workers, self.loader.timeout, self.loader.pin_memory = 0, 0, False
        self._task, self._seed = task, seed
        self.steps_per_epoch: int | None = None
        self._begun: tuple[tuple[Any, int] | None, Iterator[tuple[Any, int] | None]] | None = None
        with suppress(TypeError):  # nobody knows
            self.steps_per_epoch = len(loader)

    @property
    def kind(self) -> str:
        """What is read: the class of the stream, and of the loader that came with it."""
        data = self.loader.dataset
        if isinstance(data, Iterated):
            return f"a {type(data.dataset).__name__}"
        return f"a DataLoader over a {type(data).__name__}"

    def open(self, epoch: int, skip: int) -> Iterator[tuple[Any, int]]:
        """The batches of one epoch with their samples, from number `skip` on."""
        drops, size = self._task.last_batch == "drop", self._task.batch_size
        batches = (b for b in self._epoch(epoch) if b is END or b[1] == size or not drops)
        for number, (batch, following) in enumerate(pairwise(batches)):
            assert batch is not None
            if following is END:
                self.steps_per_epoch = number + 1
            if number >= skip:
                yield batch

    def fingerprint(self) -> str:
        """What all ranks must have in common: the first batch of the first epoch.

        That epoch goes on from there when it is trained: nothing is read twice.
        """
        if self._begun is None:
            with kept_random_streams(CPU):
                epoch = self._read(0)
                self._begun = next(epoch), epoch
        first, _ = self._begun
        tensors = [] if first is END else tensors_in(first[0])
        return _digest(t.contiguous().view(-1).view(torch.uint8).numpy().data for t in tensors)

    def _epoch(self, epoch: int) -> Iterator[tuple[Any, int] | None]:
        """Every batch with its samples, then END; what was begun already is gone on with."""
        begun, self._begun = self._begun, None
        return chain([begun[0]], begun[1]) if begun and epoch == 0 else self._read(epoch)

    def _read(self, epoch: int) -> Iterator[tuple[Any, int] | None]:
        """Every batch with its samples, then END."""
        key_loader(self.loader, self._seed, epoch)
        batches = iter(self.loader)
        for number in range(2**62):
            seed_generators(random_key(self._seed, epoch, number))
            batch = next(batches, END)
            if batch is END:
                break
            rows = rows_of(batch)
            if rows > self._task.batch_size:
                raise _larger(f"a batch of {rows}", self._task.batch_size, rows)
            yield batch, rows
        yield END


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def key_loader(loader: DataLoader[Any], seed: int, epoch: int) -> None:
    """Key all that a loader may draw from: the process's generators, and those it holds itself."""
    key = random_key(seed, epoch)
    seed_generators(key)
    inner = getattr(loader.batch_sampler, "sampler", None)
    for part in (loader, loader.dataset, loader.sampler, loader.batch_sampler, inner):
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(key)
    parts = loader, loader.dataset, loader.sampler, loader.batch_sampler, inner, loader.collate_fn
    Epochs(*parts).enter(epoch, lambda: seed_generators(key), again=True)
    seed_generators(key)


def rows_of(batch: Any) -> int:
    """The samples of a collated batch; raises `RequestError` if it cannot be cut by rows."""
    first = next(tensors_in(batch), None)
    rows = first.shape[0] if first is not None and first.ndim else 0
    if not rows:
        raise _refused("a batch without a row", "rows are given to ranks", "let it give tensors")
    rows_between(batch, 0, 0, rows)
    return rows


def rows_between(value: Any, start: int, stop: int, rows: int) -> Any:
    """The same structure, every tensor and every list of texts cut to its rows `start:stop`.

    So is a list of objects without tensors, if there are as many as rows.
    """
    if isinstance(value, (Tensor, np.ndarray)) and value.shape[:1] == (rows,):
        return value[start:stop]
    if isinstance(value, (list, tuple)) and len(value) == rows and all(map(_is_whole, value)):
        return value[start:stop]
    if isinstance(value, (str, type(None))):  # of the whole batch
        return value
    if (inside := structure_of(value)) is not None:
        return inside.build([rows_between(item, start, stop, rows) for item in inside.items])
    shape = f"a {type(value).__name__} {tuple(getattr(value, 'shape', ()))}"
    why = f"it is not one of {rows} rows, which are given to ranks"
    raise _refused(f"{shape} in a batch", why, "let collate_fn put the samples in dimension 0")


def _is_whole(item: Any) -> bool:
    """Whether an item of a list can only belong to one sample: a text, or an object."""
    if isinstance(item, (str, bytes)):
        return True
    is_number = isinstance(item, (int, float, complex, Tensor, np.ndarray, np.generic, type(None)))
    return not is_number and structure_of(item) is None


def notes_on(loader: DataLoader[Any], task: Task, name: str, order: SamplerOrder | None) -> str:
    """A note for the user: what the job does differently from the loader."""
    note = f"{name}() is a DataLoader with num_workers={loader.num_workers}"
    if not has_samples_by_number(loader):
        return (
            f"{note} that can only be read as a whole: every rank reads all of it, in the step and "
            "without workers, and takes its own rows; resuming in mid-epoch reads the epoch from "
            f"its start; {ONLY_KEYED}"
        )
    text = f"{note}, batch_size={loader.batch_size}, {type(sampler_of(loader)).__name__}: "
    parts = "its data set and collate_fn"
    rival = "eval_collate" if name != "train_data" and task.overrides("eval_collate") else "collate"
    if not brings_collate(loader) and task.overrides(rival):
        parts = f"its data set and {rival}() of the task"
    extra = f"batch_size={task.batch_size} over all ranks, --loader-workers"
    if loader.drop_last and name == "train_data":
        text = f"{text}drop_last=True, "
    if loader.generator is not None and order is None:
        extra += ", no `generator` of its own"
    if order is None:
        if name != "train_data":
            extra += ", each sample once"
        elif is_in_order(loader):
            parts = f"{parts}, in the order of the data set (shuffle=False),"
        else:
            extra += ", an order drawn from --seed"
        return f"{text}{parts} are used; the rest is the job's own ({extra})"
    if not order.is_cut:
        extra = "--loader-workers"
    return (
        f"{text}{parts} are used, in the order of its {order.kind}, which "
        f"every rank draws; the rest is the job's own ({extra}); {ONLY_KEYED}; a sample drawn "
        "twice in an epoch is augmented alike"
    )


ONLY_KEYED = (
    "ranks agree, and a run can be repeated, only if it draws from the generators of Python, NumPy "
    "and torch, or from its own `generator`"
)


def _refused(found: str, why: str, do: str) -> RequestError:
    return RequestError(asked="train_data() of the task: a DataLoader", found=found, why=why, do=do)


def _larger(found: str, size: int, batch_size: int) -> RequestError:
    why = f"what it gives is the global batch of a step, and the task has batch_size = {size}"
    return _refused(found, why, f"--set batch_size={batch_size}")


def endless(epoch: int, source: str, do: str) -> RequestError:
    """The error for an epoch without a sample."""
    return RequestError(
        asked=f"epoch {epoch} of {source}",
        found="no sample in it",
        why="an epoch without a step would never end",
        do=do,
    )
