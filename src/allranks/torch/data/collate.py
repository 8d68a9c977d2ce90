"""Tensors in what data sets yield and what models take and return: see `engine.structures`.

`map_tensors`, `tensors_in` and `structure_of` traverse batches and outputs, including objects of
user classes. `map_arguments` and `tensors_of_arguments` traverse the arguments of modules, where
such an object (a cache) may have to keep its identity. `copied` is for code that only observes.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils.data import Dataset

from allranks.errors import RequestError
from allranks.strategies.shards import Shares
from allranks.torch.comm.comm import Comm
from allranks.training.engine.structures import ATOMS, CODE, Structure, Walker, attributes_of

TORCH_ATOMS = (torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module, Optimizer)
DEEP = 0  # no id of an object


def registered(value: Any) -> Structure | None:
    """The structure of a type that was registered with `torch.utils._pytree`, which has no public
    form; `None` for others, and for one that shows no children."""
    node = getattr(_pytree, "SUPPORTED_NODES", {}).get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    items = list(children)
    names = [f"[{number}]" for number in range(len(items))]
    return Structure(names, items, lambda new: node.unflatten_fn(new, context)) if items else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


DATA = Walker(_is_tensor, (*TORCH_ATOMS, Dataset), registered)
ARGUMENTS = Walker(_is_tensor, TORCH_ATOMS, objects=False)

structure_of = DATA.open
tensors_of_arguments = ARGUMENTS.arrays_in


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with `change` applied to every tensor; anything else is unchanged."""
    if type(value) is tuple:  # as most batches are
        return tuple(
            [
                change(item) if isinstance(item, Tensor) else map_tensors(change, item)
                for item in value
            ]
        )
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(change, item) for key, item in value.items()}
    if type(value) is list:
        return [map_tensors(change, item) for item in value]
    return DATA.map(change, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of the structure, in order."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from tensors_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from tensors_in(item)
    else:
        yield from DATA.arrays_in(value)


def map_arguments(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """As `map_tensors`, for arguments and outputs of modules."""
    return ARGUMENTS.map(change, value)


def replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same structure with its tensors replaced, in order, by `tensors`."""
    return map_tensors(lambda _: next(tensors), value)


# --- to a device, and to a type ------------------------------------------------------------------


def map_to_device(
    change: Callable[[Tensor], Tensor],
    cast: Callable[[Tensor], Tensor],
    value: Any,
    device: torch.device,
    *,
    pin: bool = False,
) -> Any:
    """As `map_tensors`; an object with a `to` is moved to `device` by it, and then only `cast`.

    Such an object knows which of its tensors stay on the host, like the lengths of a packed
    sequence. With `pin`, its `pin_memory` is called first.
    """
    if type(value) is tuple:  # as most batches are
        items = []
        for item in value:  # a comprehension would have cells for all these arguments
            is_tensor = isinstance(item, Tensor)
            moved = (
                change(item) if is_tensor else map_to_device(change, cast, item, device, pin=pin)
            )
            items.append(moved)
        return tuple(items)
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        changed = {}
        for key, item in value.items():
            is_tensor = isinstance(item, Tensor)
            moved = (
                change(item) if is_tensor else map_to_device(change, cast, item, device, pin=pin)
            )
            changed[key] = moved
        return changed
    return DATA.map(change, value, partial(_moved_and_cast, cast, device, pin))


def _moved_and_cast(
    cast: Callable[[Tensor], Tensor], device: torch.device, pin: bool, value: Any
) -> Any:
    """An object with a `to`, on the device; `None` for other values."""
    if not _moves_itself(value):
        return None
    tensors = list(tensors_in(value))
    if not tensors or any(tensor.device != device for tensor in tensors):
        value = _moved(value, device, pin=pin)
    return DATA.map(cast, value)


def _moves_itself(value: Any) -> bool:
    if isinstance(value, (*ATOMS, *CODE, *TORCH_ATOMS, Mapping)):
        return False
    is_row = isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence)
    return not is_row and callable(getattr(type(value), "to", None))


def _moved(value: Any, device: torch.device, *, pin: bool) -> Any:
    """Move an object to the device: a shallow copy, because many `to` change the object itself."""
    other: Any = value if isinstance(value, tuple) else copy.copy(value)
    if pin and callable(pin_memory := getattr(other, "pin_memory", None)):
        pinned = pin_memory()
        other = other if pinned is None else pinned
    try:
        inspect.signature(other.to).bind(device, non_blocking=pin)
    except (TypeError, ValueError):
        moved = other.to(device)
    else:
        moved = other.to(device, non_blocking=pin)
    return other if moved is None else moved


# --- copies ---------------------------------------------------------------------------------------


def copied(value: Any) -> Any:
    """A copy of a batch that shares no mutable memory or object with it.

    Raises `RequestError` if a value cannot be copied, or its copy still shares something.
    """
    memo: dict[int, Any] = {}
    duplicate = _copied(value, memo)
    if memo.pop(DEEP, None):
        before, after = _mutable(value), _mutable(duplicate)
        if shared := before.keys() & after.keys():
            raise _not_copied(before[shared.pop()], "its copy shares it")
    return duplicate


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """As `copy.deepcopy`, which plain structures do not need; sets `memo[DEEP]` if it was used."""
    if type(value) is Tensor and not value.__dict__:
        if id(value) not in memo:
            memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return memo[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_copied(item, memo) for item in value)
    if type(value) is dict:
        return {key: _copied(item, memo) for key, item in value.items()}
    if type(value) in (str, bytes, int, float, bool, type(None)):
        return value
    memo[DEEP] = True
    known = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        for half in memo.keys() - known:
            del memo[half]
        refused = _not_copied(value, f"{type(error).__name__}: {error}")
        if (inside := structure_of(value)) is None:
            raise refused from error
    try:  # its class alone may be in the way, as a dict whose `__init__` wants arguments
        return inside.build([_copied(item, memo) for item in inside.items])
    except RequestError as error:
        raise refused from error


def _mutable(value: Any) -> dict[Any, Any]:
    """The memory and objects in a value that a model could change, by their identity."""
    mutable: dict[Any, Any] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, np.ndarray):
            if item.size:
                mutable["array", np.lib.array_utils.byte_bounds(item)[0]] = item
            continue
        if isinstance(item, Tensor):
            if item.layout == torch.strided and item.numel() and not item.is_meta:
                mutable["memory", item.untyped_storage().data_ptr()] = item
            waiting += vars(item).values()
            continue
        if isinstance(item, (*ATOMS, *CODE, torch.dtype, torch.device, torch.Size)):
            continue
        attributes = attributes_of(item)
        if id(item) in mutable:
            continue
        if attributes or isinstance(item, (list, dict, set, bytearray)):
            mutable[id(item)] = item
        waiting += attributes.values()
        if isinstance(item, (tuple, list, set, frozenset)):
            waiting += item
        elif isinstance(item, Mapping):
            waiting += item.values()
    return mutable


def _not_copied(value: Any, why: str) -> RequestError:
    kind = type(value)
    return RequestError(
        asked="a copy of a batch",
        found=f"a {kind.__module__}.{kind.__qualname__}: {why}"[:300],
        why="passes that only observe a training run the model on copies",
        do="let copy.deepcopy copy it",
    )


# --- rows ----------------------------------------------------------------------------------------
# Joins the rows of many parts: the tensors of a batch, and its lists of texts and numbers.
#
# Outputs of a model and of `collate` have one row for each sample: tensors along dimension 0, lists
# of plain values by their items. Parts are micro-batches, and ranks. Other values (a number, a
# text, `None`) must be the same in all parts. Only the loss over a batch and the data-dependent
# initialisation use this, and communicate for it.


PLAIN = (str, int, float, bool, type(None))
DIGEST_BYTES = 16
Visit = Callable[[str, Any], Any]


@dataclass(frozen=True)
class BatchRows:
    """The rows of one part, by their place in its structure `value`; `fixed` are not rows."""

    value: Any
    samples: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)

    def looks(self) -> str:
        """The properties that must be equal in all parts; parts without samples do not count."""
        tensors = {n: [str(t.dtype), list(t.shape[1:])] for n, t in self.tensors.items()}
        return json.dumps([tensors, list(self.lists), self.fixed])

    def rebuilt(self, tensors: dict[str, Tensor], lists: dict[str, list[Any]]) -> Any:
        """The structure with other tensors and lists in it."""
        leaves = {**self.fixed, **lists, **tensors}
        return _walked(self.value, self.samples, "", lambda place, item: leaves.get(place, item))

    def without_rows(self) -> BatchRows:
        """The same without a sample."""
        tensors = {place: tensor[:0] for place, tensor in self.tensors.items()}
        return BatchRows(self.value, self.samples, tensors, {n: [] for n in self.lists}, self.fixed)


def split_rows(value: Any, samples: int) -> BatchRows:
    """Split a part of so many samples; raises `RequestError` for values that cannot be joined."""
    rows = BatchRows(value, samples)

    def visit(place: str, item: Any) -> None:
        if isinstance(item, Tensor):
            if not item.ndim or item.shape[0] != samples:
                raise _refused(
                    place,
                    f"a tensor of shape {tuple(item.shape)} for {samples} samples",
                    "rows are put together in the order of the samples, one for each",
                    "give it one row for each sample: x.expand(samples, …) for what all share",
                )
            rows.tensors[place] = item
        elif not is_plain(item):
            raise _refused(
                place,
                f"a {type(item).__module__}.{type(item).__qualname__}",
                "tensors, and lists of texts and numbers, can be put together; this cannot",
                "let the model return tensors, in tuples, dicts, dataclasses or attributes"
                if place.startswith("['output']")
                else "let collate make a tensor of it, or a list of plain values",
            )
        elif _is_list_of_rows(item, samples):
            rows.lists[place] = list(item)
        else:
            rows.fixed[place] = item

    _walked(value, samples, "", visit)
    return rows


def joined(parts: list[BatchRows]) -> BatchRows:
    """Join the parts of one rank; raises `RequestError` if their looks differ."""
    first = parts[0]
    for part in parts[1:]:
        if part.looks() != first.looks():
            raise _unlike(first.looks(), part.looks(), "micro-batches")
    tensors = {p: torch.cat([part.tensors[p] for part in parts]) for p in first.tensors}
    lists = {p: [item for part in parts for item in part.lists[p]] for p in first.lists}
    return BatchRows(first.value, first.samples, tensors, lists, first.fixed)


def own_rows(parts: list[tuple[Any, int]]) -> BatchRows | RequestError | None:
    """Join the (value, samples) of a rank's micro-batches, or return the error; `None` for none."""
    try:
        return joined([split_rows(value, samples) for value, samples in parts]) if parts else None
    except RequestError as error:
        return error


def rows_of_ranks(sizes: tuple[int, ...], ranks: int, dealt: Shares | None) -> list[int]:
    """How many samples each rank has of shards of these sizes, `dealt` to them or else evenly."""
    shares = dealt or Shares.even(len(sizes), ranks)
    return [sum(sizes[shard] for shard in owned) for owned in shares.runs]


def gathered(comm: Comm, local: BatchRows | RequestError, rows: list[int]) -> BatchRows:
    """The rows of all ranks, `rows[r]` of rank r, in rank order; every rank calls this.

    If `local` is an error, all ranks raise it. Gathers the tensors, padded to the most rows of a
    rank (kind `outputs`), a digest of their looks, and the lists as text.
    """
    if comm.size == 1:
        if isinstance(local, RequestError):
            raise local
        return local
    local = _agreed(comm, local, rows)
    tensors = {p: _gathered_tensor(comm, tensor, rows) for p, tensor in local.tensors.items()}
    lists: dict[str, list[Any]] = {}
    if local.lists:
        lists_of_ranks = [json.loads(text) for text in comm.gather_texts(json.dumps(local.lists))]
        lists = {p: [item for lists in lists_of_ranks for item in lists[p]] for p in local.lists}
    return BatchRows(local.value, local.samples, tensors, lists, local.fixed)


def _agreed(comm: Comm, local: BatchRows | RequestError, rows: list[int]) -> BatchRows:
    """`local` if its looks are equal on all ranks; else all raise, before they send the tensors."""
    text = local.looks() if isinstance(local, BatchRows) else json.dumps(local.to_data())
    has_rows = rows[comm.rank] > 0
    digest = blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
    part = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(comm.device)
    whole = part.new_empty(comm.size * part.numel())
    comm.all_gather(whole, part, "control").wait()
    digests = whole.view(comm.size, -1)
    with comm.reading():
        is_alike = bool((digests == digests[0]).all())
    if isinstance(local, BatchRows) and is_alike:
        return local
    texts = comm.gather_texts(text if has_rows or not isinstance(local, BatchRows) else "")
    looks = []
    for words in filter(None, texts):
        about = json.loads(words)
        if isinstance(about, dict):
            raise RequestError.from_data(about)
        looks.append(words)
    for other in looks[1:]:
        if other != looks[0]:
            raise _unlike(looks[0], other, "ranks")
    assert isinstance(local, BatchRows)
    if has_rows:
        return local
    tensors = {  # of no sample, as wide as those of the others
        place: local.tensors[place].new_empty((0, *shape))
        for place, (_, shape) in json.loads(looks[0])[0].items()
    }
    return BatchRows(local.value, local.samples, tensors, local.lists, local.fixed)


def _gathered_tensor(comm: Comm, local: Tensor, rows: list[int]) -> Tensor:
    """Rows of every rank, as bytes padded to the longest part: any type."""
    row_bytes = local[:0].new_empty((1, *local.shape[1:])).nbytes
    part = torch.zeros(max(rows) * row_bytes, dtype=torch.uint8, device=local.device)
    part[: local.nbytes] = local.contiguous().view(-1).view(torch.uint8)
    whole = part.new_empty(comm.size * part.numel())
    comm.all_gather(whole, part, "outputs").wait()
    parts = whole.view(comm.size, -1)
    flat = torch.cat([part[: n * row_bytes] for part, n in zip(parts, rows, strict=True)])
    return flat.view(local.dtype).view(sum(rows), *local.shape[1:])


def _walked(value: Any, samples: int, place: str, visit: Visit) -> Any:
    """The same structure with `visit` of its tensors, lists of rows and plain values."""
    inside = None if _is_list_of_rows(value, samples) else structure_of(value)
    if inside is None:
        return visit(place, value)
    pairs = zip(inside.names, inside.items, strict=True)
    return inside.build([_walked(item, samples, f"{place}{name}", visit) for name, item in pairs])


def _is_list_of_rows(value: Any, samples: int) -> bool:
    """Whether a value is a list of plain values, one for each sample.

    A tuple of such lists is no list of rows: they are columns.
    """
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return False
    if len(value) != samples or not is_plain(value):
        return False
    columns = all(isinstance(item, (list, tuple)) and len(item) == samples for item in value)
    return not (columns and isinstance(value, tuple))


def is_plain(value: Any) -> bool:
    """Whether JSON can carry a value: texts, numbers, `None`, lists and dicts of such."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(item) for k, item in value.items())
    return isinstance(value, PLAIN)


def _unlike(first_looks: str, other_looks: str, whose: str) -> RequestError:
    place, (first, second) = next(_differing(json.loads(first_looks), json.loads(other_looks)))
    return _refused(
        place,
        f"{first} of one and {second} of another of the {whose} of a step",
        "their rows are put together, so they must be equally wide and of one type; padded to the "
        "longest of its own part, a row would also follow the number of ranks",
        "pad to a fixed width in collate, or return one vector for each sample",
    )


def _differing(first: list[Any], second: list[Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """The places where two looks differ, and the text of each there."""
    for mine, theirs in ((first[0], second[0]), (first[2], second[2])):
        for place in [*mine, *(p for p in theirs if p not in mine)]:
            if mine.get(place) != theirs.get(place):
                yield place, (_described(mine.get(place)), _described(theirs.get(place)))
    for place in sorted(set(first[1]) ^ set(second[1])):
        yield place, ("a list with an item for each sample", "none")


def _described(look: Any) -> str:
    if isinstance(look, list) and len(look) == 2 and isinstance(look[1], list):
        return f"{look[0]} rows of shape {tuple(look[1])}"
    return "nothing" if look is None else repr(look)


def _refused(place: str, found: str, why: str, do: str) -> RequestError:
    for name in ("output", "batch"):
        place = place.replace(f"[{name!r}]", name, 1) if place.startswith(f"[{name!r}]") else place
    return RequestError(
        asked=f"{place} over the whole global batch",
        found=found,
        why=why,
        do=do,
    )
