"""From a task's data to the source that reads it; refuses data that no source can read."""

from __future__ import annotations

import operator
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from allranks.errors import RequestError
from allranks.torch.data.collate import structure_of, tensors_in
from allranks.torch.data.loaders import (
    ONLY_KEYED,
    Iterated,
    SamplerOrder,
    WholeLoader,
    brings_collate,
    has_samples_by_number,
    is_in_order,
    notes_on,
    order_of,
)
from allranks.torch.data.sources import MapSource, Source, StreamSource, TensorRows, TensorSource
from allranks.torch.data.streams import DataStream, is_data_stream
from allranks.torch.task import Task

ONE_READER = "each rank reads it itself, in the step"
IN_ORDER = "each sample is evaluated once, so how many there are must be known"


@dataclass(frozen=True)
class Opened:
    """A source, the order of its sampler if it has one, and a note for the user.

    `drops_last`: the loader leaves out the incomplete last batch of an epoch. Without `shuffles`,
    each epoch is in the order of the data set.
    """

    source: Source | StreamSource | WholeLoader
    order: SamplerOrder | None = None
    note: str = ""
    drops_last: bool = False
    shuffles: bool = True


def open_data(data: Any, task: Task, seed: int, workers: int, name: str) -> Opened:
    """Open a source for `data`, which `task.<name>()` returned; raises `RequestError`.

    Only training data is augmented, and decoded with random draws.
    """
    training = name == "train_data"
    if training and is_data_stream(data):
        data = DataStream(data, task.shards)
    if isinstance(data, DataLoader):
        opened = _open_loader(data, task, seed, workers, name)
    elif hasattr(data, "open") and not hasattr(data, "__getitem__"):
        if not training:
            raise _unusable(name, "a stream", IN_ORDER)
        if workers:
            raise _unusable(name, f"a stream, with --loader-workers {workers}", ONE_READER)
        cut = getattr(data, "shards", task.shards)
        if cut != task.shards:
            found = f"a stream in {cut} parts, for shards = {task.shards}"
            raise _unusable(name, found, "a part that no shard reads would be left out in silence")
        opened = Opened(StreamSource(data, task, seed), note=getattr(data, "note", ""))
    elif is_tensors(data):
        tensors = _as_tensors(data, name)
        source: Source = TensorSource(tensors)
        collate = collate_of(task, training)
        if (training and task.overrides("augment")) or collate is not default_collate:
            source = MapSource(TensorRows(tensors), task, seed, workers, training, collate)
        opened = Opened(source)
    elif (
        not isinstance(data, IterableDataset)  # which inherits a __getitem__, and may have a length
        and hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
    ):
        _check_length(data, name)
        collate = collate_of(task, training)
        opened = Opened(MapSource(data, task, seed, workers, training, collate))
    else:
        opened = _open_iterable(data, task, seed, workers, name)
    if not isinstance(opened.source, (StreamSource, WholeLoader)) and len(opened.source) == 0:
        raise _unusable(name, "0 samples", "there is nothing to learn from")
    return opened


def _check_length(data: Any, name: str) -> None:
    """Raise `RequestError` if a data set has a length that `len` does not accept."""
    length = data.__len__()
    try:
        is_one = 0 <= operator.index(length) <= sys.maxsize
    except TypeError:
        is_one = False
    if not is_one:
        raise _unusable(
            name,
            f"{type(data).__name__}, whose __len__ gives {length!r}",
            "a length is a whole number, 0 or more: samples have the numbers below it",
            "return a whole number from __len__, such as n // 2 for half of n",
        )


def is_tensors(data: Any) -> bool:
    """Whether rows of `data` are samples; not for a TensorDataset with its own `__getitem__`."""
    if isinstance(data, TensorDataset):
        return type(data).__getitem__ is TensorDataset.__getitem__
    return isinstance(data, (Tensor, np.ndarray)) or _is_columns(data)


def collate_of(task: Task, training: bool) -> Callable[[list[Any]], Any]:
    """The function that collates samples, if there is no loader with its own `collate_fn`."""
    if not training and task.overrides("eval_collate"):
        return task.eval_collate
    return task.collate if task.overrides("collate") else default_collate


def _open_iterable(data: Any, task: Task, seed: int, workers: int, name: str) -> Opened:
    """Samples without numbers: every rank reads all of them, as from a DataLoader."""
    kind = type(data).__name__
    if not hasattr(data, "__iter__"):
        raise _unusable(name, kind, "it has neither samples by number nor `open`")
    if name != "train_data":
        do = "return list(…) of it: a list has samples by number"
        raise _unusable(name, f"{kind}, whose samples have no numbers", IN_ORDER, do)
    if isinstance(data, Iterator):
        why = "it can be read once, and every epoch reads all of it"
        do = "return an object whose __iter__ begins anew, or list(…) of it"
        raise _unusable(name, f"{kind}, an iterator", why, do)
    collate = task.collate if task.overrides("collate") else None
    loader: DataLoader[Any] = DataLoader(
        Iterated(data), batch_size=task.batch_size, collate_fn=collate
    )
    if task.overrides("augment"):
        do = "change the samples where they are read"
        raise _unusable(name, f"{kind}, and augment() of the task", "they have no numbers", do)
    if workers:
        raise _unusable(name, f"{kind}, with --loader-workers {workers}", ONE_READER)
    note = (
        f"{name}() is a {kind}, whose samples have no numbers: every rank reads all of it, in the "
        "step and without workers, and takes its own rows; resuming in mid-epoch reads the epoch "
        f"from its start; {ONLY_KEYED}"
    )
    return Opened(WholeLoader(loader, task, seed), None, note)


def _open_loader(loader: DataLoader[Any], task: Task, seed: int, workers: int, name: str) -> Opened:
    by_number = has_samples_by_number(loader)
    order = order_of(loader, task, seed) if by_number else None
    note = notes_on(loader, task, name, order)
    training = name == "train_data"
    drops, shuffles = training and loader.drop_last, not is_in_order(loader)
    if not training and (order is not None or not by_number):
        kind = "a DataLoader that reads an IterableDataset" if order is None else order.kind
        raise _unusable(name, f"a DataLoader with its own {kind}", IN_ORDER)
    if by_number and type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate:
        opened = open_data(loader.dataset, task, seed, workers, name)
        return replace(opened, order=order, note=note, drops_last=drops, shuffles=shuffles)
    if by_number:
        collate = _collate_of_loader(loader, task, name)
        source = MapSource(loader.dataset, task, seed, workers, training, collate, loader)
        return Opened(source, order, note, drops, shuffles)
    found = "a DataLoader that can only be read as a whole"
    for method in ("augment", "collate"):
        if task.overrides(method) and getattr(task, method) != loader.collate_fn:
            raise _unusable(name, f"{found}, and {method}() of the task", "it collates itself")
    if workers:
        raise _unusable(name, f"{found}, with --loader-workers {workers}", ONE_READER)
    return Opened(WholeLoader(loader, task, seed), None, note)


def _collate_of_loader(
    loader: DataLoader[Any], task: Task, name: str
) -> Callable[[list[Any]], Any]:
    """The loader's own `collate_fn`, else the task's; raises `RequestError` for two."""
    training = name == "train_data"
    if not brings_collate(loader):
        return collate_of(task, training)
    rival = "collate" if training else "eval_collate"
    if task.overrides(rival) and getattr(task, rival) != loader.collate_fn:
        raise _unusable(
            name,
            f"a DataLoader with a collate_fn of its own, and {rival}() of the task",
            "samples are collated once, by one of the two",
            f"leave one of them out{'; eval_collate() is for the evaluation alone' * training}",
        )
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    return collate


def _as_tensors(data: Any, name: str) -> Any:
    """Arrays as tensors; all must agree on the number of samples."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if (columns := structure_of(data) if _is_columns(data) else None) is not None:
        data = columns.build([torch.as_tensor(v) for v in columns.items if _is_array(v, name)])
    else:
        data = torch.as_tensor(data)
    lengths = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_in(data)}
    if len(lengths) != 1:
        raise _unusable(name, f"lengths {sorted(lengths)}", "dimension 0 is the samples of each")
    return data


def _is_columns(data: Any) -> bool:
    """Whether data are arrays side by side: in a tuple, a dict, or a dataclass of nothing else."""
    if isinstance(data, (tuple, dict, UserDict)):
        return True
    return is_dataclass(data) and not (hasattr(data, "__getitem__") or hasattr(data, "__iter__"))


def _is_array(value: Any, name: str) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    raise _unusable(
        name, f"a {type(value).__name__} among tensors", "all must be tensors or arrays"
    )


def _unusable(name: str, found: str, why: str, remedy: str = "") -> RequestError:
    do = "return tensors, or a data set with samples by number (torch.utils.data.Subset for a part)"
    if name == "train_data":
        do = (
            "return tensors, a map-style data set or a DataLoader over one, or an object with "
            "open(shard, epoch, seed, skip)"
        )
    return RequestError(asked=f"{name}() of the task", found=found, why=why, do=remedy or do)
