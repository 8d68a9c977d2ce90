"""Process groups of some ranks of a job, made once and lent again.

The ranks of such a group find each other under its name in the store of the job. Torch counts all
groups of a process in that name, and ranks that are in more groups than others would count further,
and hang. So each is named here by its ranks and by how many groups of the same ranks there were. A
group that is left is kept for the next that asks for the same ranks, for as long as the process
group of the job is there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

Key = tuple[tuple[int, ...], str | None]


def borrow(ranks: tuple[int, ...], timeout: timedelta, backend: str | None = None) -> Any:
    """A group of these ranks of the job; each of them calls this, and `give_back` at the end."""
    kept = _kept.setdefault(dist.group.WORLD, {}).setdefault((ranks, backend), [])
    group = kept.pop() if kept else None
    if group is None:
        group = new_group(ranks, timeout, backend, use_local_synchronization=True)
    _lent[group] = ref(dist.group.WORLD), (ranks, backend)
    return group


def new_group(
    ranks: Sequence[int], timeout: timedelta, backend: str | None = None, **more: Any
) -> Any:
    """A group of these ranks of the job, connected at once where NCCL makes it.

    Where the group of the job is bound to a device torch would split it, and NCCL asks all ranks of
    it for that: those that are not in the new group never come.
    """
    with _named_by_ranks(), _not_split() as device:
        is_nccl = (backend or dist.get_backend()) == "nccl"
        bound = {"device_id": device} if device is not None and is_nccl else {}
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, **bound, **more)


@contextmanager
def _named_by_ranks() -> Iterator[None]:
    """Within, torch gives a new group the name that `_name` makes."""
    torchs: Any = c10d
    own, torchs._process_group_name = torchs._process_group_name, _name
    try:
        yield
    finally:
        torchs._process_group_name = own


def _name(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """The same on all `ranks`: each makes the groups of these ranks in the same order."""
    made = _made.setdefault(dist.group.WORLD, Counter())
    made[tuple(ranks)] += 1
    text = "_".join(map(str, (*ranks, made[tuple(ranks)])))
    return "allranks-" + hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@contextmanager
def _not_split() -> Iterator[Any]:
    """Within, the group of the job is bound to no device; gives the one that it is bound to."""
    of_job: Any = dist.group.WORLD
    device, of_job.bound_device_id = of_job.bound_device_id, None
    try:
        yield device
    finally:
        of_job.bound_device_id = device


def give_back(group: Any) -> bool:
    """Whether `group` was borrowed: it is kept then for whoever borrows it next.

    Not where the process group of the job is another one by now: it has gone with the first.
    """
    if group is None or group not in _lent:
        return False
    of, key = _lent.pop(group)
    if of() is dist.group.WORLD:
        _kept[dist.group.WORLD][key].append(group)
    return True


def end(group: Any, *, failed: bool) -> None:
    """Destroy a group for good, or the process group of the job with all others (`None`).

    NCCL leaves once all collectives are over. After a failure of this rank they never are, so its
    groups are aborted then. Gloo closes its connections at once, and the others hear of it.
    """
    if failed and dist.get_backend(group) == "nccl":
        with suppress(RuntimeError, ValueError):  # the failure itself is what counts
            c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
_kept: WeakKeyDictionary[Any, dict[Key, list[Any]]] = WeakKeyDictionary()
_lent: WeakKeyDictionary[Any, tuple[ref[Any], Key]] = WeakKeyDictionary()
