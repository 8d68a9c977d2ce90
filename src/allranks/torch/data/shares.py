"""A micro-batch cut into shares of whole pieces, and what comes of them joined again.

Used where several passes make up a micro-batch: replicas on devices, pieces in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allranks.errors import RequestError
from allranks.strategies.shards import Micro, owned_shards
from allranks.torch.data.nested import map_tensors, structure_of, tensors_in
from allranks.torch.task import Task

PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True)
class Cut:
    """Who asked for it, and what the shares are for: the words of what is refused."""

    asked: str
    whose: str


def shares_of(pieces: Micro, most: int) -> list[Micro]:
    """What each has of a micro-batch: whole pieces, in order, as even as can be.

    Fewer pieces than `most` leave the last ones without a share.
    """
    spans = [owned_shards(len(pieces), most, number) for number in range(most)]
    return [pieces[span.start : span.stop] for span in spans if span]


def samples_in(pieces: Micro) -> int:
    return sum(piece.samples for piece in pieces)


def scattered(
    data: Any, samples: int, shares: Sequence[Micro], devices: Sequence[torch.device], cut: Cut
) -> list[Any]:
    """The rows of each share, on its device; what has no rows goes to all."""
    for tensor in tensors_in(data):
        if tensor.ndim and tensor.shape[0] != samples:
            raise _no_row_each(tensor, samples, cut)
    if len(shares) > 1:
        _check_rows(data, samples, cut)
    parts, start = [], 0
    for share, device in zip(shares, devices, strict=True):
        rows = slice(start, start + samples_in(share))
        start = rows.stop

        def own(tensor: Tensor, rows: slice = rows, device: torch.device = device) -> Tensor:
            return (tensor[rows] if tensor.ndim else tensor).to(device, non_blocking=True)

        parts.append(map_tensors(own, data))
    return parts


def check_first_batch(task: Task, cut: Cut) -> Callable[[], None]:
    """Look whether rows follow samples in the first batch of each size that `collate` makes.

    It is asked for one sample less, too: what has as many rows then is no row for each sample, and
    would be cut where there are as many samples by chance. Returns what undoes this.
    """
    if not task.overrides("collate") or "collate" in vars(task):
        return lambda: None
    collate, seen = task.collate, {1}

    def checked(samples: list[Any]) -> Any:
        found = collate(samples)
        if len(samples) not in seen:
            seen.add(len(samples))
            pairs = zip(tensors_in(found), tensors_in(collate(samples[:-1])), strict=False)
            for tensor, fewer in pairs:
                if tensor.ndim and tensor.shape[0] == fewer.shape[0] == len(samples):
                    raise _no_row_each(tensor, len(samples), cut)
        return found

    def undo() -> None:
        vars(task).pop("collate", None)

    vars(task)["collate"] = checked
    return undo


def _no_row_each(tensor: Tensor, samples: int, cut: Cut) -> RequestError:
    return RequestError(
        asked=cut.asked,
        found=f"a tensor of shape {tuple(tensor.shape)} in a batch of {samples} samples",
        why=f"the rows of a batch are cut for {cut.whose}, so there is one for each sample",
        do="let collate give every tensor a row per sample, or use --strategy ddp",
    )


def _check_rows(data: Any, samples: int, cut: Cut) -> None:
    """Raise for texts or arrays, one for each sample: only tensors are cut."""
    inside = structure_of(data)
    if inside is not None and not (isinstance(data, (list, tuple)) and _is_text_in(data)):
        for item in inside.items:
            _check_rows(item, samples, cut)
    elif (
        not isinstance(data, (Tensor, str, bytes))
        and getattr(data, "__len__", int)() == samples > 1
    ):
        raise RequestError(
            asked=cut.asked,
            found=f"a {type(data).__name__} with one item for each of {samples} samples",
            why=f"only tensors are cut for {cut.whose}, so each would get all of it",
            do="let collate make tensors of it, or use --strategy ddp",
        )


def _is_text_in(data: Sequence[Any]) -> bool:
    return any(isinstance(item, (str, bytes)) for item in data)


def gathered(outputs: list[Any], shares: Sequence[Micro], device: torch.device, cut: Cut) -> Any:
    """The outputs of all shares joined along their rows, on `device`. Autograd goes back."""
    for output, share in zip(outputs, shares, strict=True):
        for tensor in tensors_in(output):
            if not tensor.ndim or tensor.shape[0] % samples_in(share):
                samples = samples_in(share)
                raise RequestError(
                    asked=cut.asked,
                    found=f"an output of shape {tuple(tensor.shape)} for {samples} samples",
                    why=f"the outputs of {cut.whose} are joined along their rows",
                    do="let the model return rows for each sample, or use --strategy ddp",
                )
    if len(outputs) == 1:
        return outputs[0]
    sizes = [samples_in(share) for share in shares]
    moved = [map_tensors(lambda t: t.to(device), output) for output in outputs]
    return _joined(moved, sizes, cut, "the output")


def _joined(values: list[Any], sizes: list[int], cut: Cut, place: str) -> Any:
    """What the model returned of all shares as one; raises for what has no rows and differs."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    is_rows = isinstance(first, list) and not any(True for _ in tensors_in(first))
    if is_rows and [len(value) for value in values] == sizes:
        return [item for value in values for item in value]
    inside = [structure_of(value) for value in values]
    names = [found and found.names for found in inside]
    alike = all(type(value) is type(first) for value in values) and names.count(names[0]) == len(
        names
    )
    if not alike or (isinstance(first, PLAIN) and any(value != first for value in values)):
        raise RequestError(
            asked=cut.asked,
            found=f"{place} is {first!r} of one and {_other(values)!r} of another share"[:300],
            why=f"tensors of {cut.whose} are joined along their rows, and lists of one item for "
            "each sample; of the rest there would be that of the first",
            do="let the model return a tensor with a row for each sample, or use --strategy ddp",
        )
    if inside[0] is None:
        return first
    columns = zip(*(found.items for found in inside if found is not None), strict=True)
    return inside[0].build(
        [
            _joined(list(column), sizes, cut, f"{place}{name}")
            for name, column in zip(inside[0].names, columns, strict=True)
        ]
    )


def _other(values: list[Any]) -> Any:
    return next((v for v in values if type(v) is not type(values[0]) or v != values[0]), values[-1])
