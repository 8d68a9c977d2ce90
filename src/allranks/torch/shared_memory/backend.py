"""The backend "shared_memory" of torch: which group it creates for which ranks.

All ranks exchange their hosts and whether they have the library, and make the same decision. Ranks
of one host get a `SharedMemoryGroup`; those of several hosts a `HierarchicalGroup`, if some share a
host. Without shared memory all use Gloo, and `outcome_of` says why.

In a script of `allranks run --shared-memory`, which is unchanged, `in_place_of_gloo` lets
`init_process_group("gloo")`, or without a backend on a machine without accelerators, create a group
of this backend. Subgroups have the same backend, unless the script asks for Gloo by name.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

import allranks.torch.accelerator as accelerator
from allranks.torch.shared_memory import posting
from allranks.torch.shared_memory.collectives import SharedMemoryGroup
from allranks.torch.shared_memory.hierarchical import HierarchicalGroup
from allranks.torch.shared_memory.operands import (
    ProcessCard,
    exchange_texts,
    exchanged,
    hosts_of,
    own_card,
)
from allranks.torch.shared_memory.posting import BACKEND, Attached, Named
from allranks.torch.shared_memory.segment import NOT_BUILT, library

SHARED, HIERARCHICAL, GLOO = BACKEND, "hierarchical", "gloo"
Function = Callable[..., Any]


@dataclass(frozen=True)
class BackendChoice:
    """The backend asked for, the one used, and why they differ ("" if they do not)."""

    asked: str
    did: str
    why: str = ""

    def to_data(self) -> dict[str, str]:
        return asdict(self)


def register(fd: int = posting.NO_FILE) -> None:
    """Register the backend in torch, once in a process, for `init_process_group(BACKEND)`.

    Its first group of all ranks uses the memory file `fd`.
    """
    posting.offer_file(fd)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
        replace(c10d, "monitored_barrier", _monitored_barrier)
        replace(c10d, "_set_pg_timeout", _set_pg_timeout)
        if hasattr(c10d, "_maybe_attach_flight_recorder"):  # since torch 2.15
            replace(c10d, "_maybe_attach_flight_recorder", _attach_flight_recorder)
        _keep_works_for(torch._C._distributed_c10d.Reducer)


def replace(module: Any, name: str, by: Function) -> None:
    """Replace a function of torch in all modules that have it by this name.

    `by` is called with the original before the arguments.
    """
    original = getattr(module, name)
    replacement = functools.wraps(original)(functools.partial(by, original))
    for each in list(sys.modules.values()):
        if getattr(each, "__dict__", {}).get(name) is original:
            setattr(each, name, replacement)


def _monitored_barrier(
    original: Function,
    group: Any = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> Any:
    """Torch's function requires the name of Gloo; our groups have this barrier, too."""
    of = group or dist.group.WORLD
    if isinstance(of, Named):
        return of.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
    return original(group, timeout, wait_all_ranks)


def _set_pg_timeout(original: Function, timeout: timedelta | float, group: Any = None) -> None:
    """Torch's function supports only Gloo and NCCL."""
    of = group or dist.group.WORLD
    if isinstance(of, Named):
        of.set_timeout(timeout)  # type: ignore[arg-type]  # torch's own: a `timedelta`
    else:
        original(timeout, group)


def _attach_flight_recorder(original: Function, pg: Any, *args: Any, **named: Any) -> None:
    """Torch's function asks the C++ part of a group for its name; ours has none there."""
    if not isinstance(pg, Named):
        original(pg, *args, **named)


def _keep_works_for(reducer: Any) -> None:
    """Keep each work that DDP passes to C++ alive until the next one.

    C++ references only the C++ part of a work: the Python part would be freed.
    """
    original = reducer._set_forward_pass_work_handle

    def set_handle(self: Any, work: Any, *args: Any, **named: Any) -> None:
        _works[self] = work
        original(self, work, *args, **named)

    reducer._set_forward_pass_work_handle = set_handle


def outcome_of(group: Any = None) -> BackendChoice | None:
    """The choice for a group of this backend; by default for the job's own group."""
    group = group or dist.group.WORLD
    return _outcomes.get(group.group_name)


def backend_record(group: Any) -> dict[str, str]:
    """The `BackendChoice` of any of torch's groups as data, for records.

    Empty for `None`, the group of a single rank.
    """
    if group is None:
        return {}
    outcome, name = outcome_of(group), dist.get_backend(group)
    return (outcome or BackendChoice(name, name)).to_data()


def notes_on_backend(group: Any, requested: str) -> list[str]:
    """A note if a job `requested` a backend by name and another one is used."""
    choice = backend_record(group)
    if not requested or choice.get("asked") != requested or choice["did"] == requested:
        return []
    return [f"--backend {requested} was asked for, and {choice['did']} does it: {choice['why']}"]


def library_group_of(group: Any = None) -> Any:
    """The library's group behind one of torch's, for direct calls; `None` for other backends."""
    group = group or dist.group.WORLD
    return group.library_group if isinstance(group, SharedMemoryGroup) else None


def _make(options: Any, backend_options: Any) -> Any:
    """Create a group: torch calls this on every rank of it."""
    size = options.group_size
    ranks = list(options.global_ranks_in_group) or list(range(size))
    is_of_all = not options.global_ranks_in_group
    fd = posting.take_file() if is_of_all else posting.NO_FILE
    group, outcome = make_group(options.store, options.group_rank, size, options.timeout, ranks, fd)
    _outcomes[str(options.group_id)] = outcome
    return group


def make_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: Sequence[int],
    fd: int = posting.NO_FILE,
) -> tuple[Any, BackendChoice]:
    """Create a group of these `ranks` of the job; all of them call this with one `store`.

    `fd` is a memory file from the launcher, for all ranks of this host.
    """
    cannot = NOT_BUILT if library() is None else ""
    bell = "" if cannot else posting.enter()
    card = own_card(bell, cannot, fd)
    cards = exchanged(store, rank, size, card)
    why = next((f"rank {ranks[i]}: {c.cannot}" for i, c in enumerate(cards) if c.cannot), "")
    hosts = hosts_of(cards)
    if not why and len(hosts) == size > 1:
        why = f"its {size} ranks run on {size} hosts"
    if why:
        posting.drop(fd)
    else:
        attached, why = _attached(store, rank, hosts, cards, ranks, fd)
    if why:
        if bell:
            posting.leave()
        return ProcessGroupGloo(store, rank, size, timeout), BackendChoice(SHARED, GLOO, why)
    host = next(host for host in hosts if rank in host)
    inside = None
    if attached is None:
        posting.leave()
    else:
        position, members = host.index(rank), [ranks[member] for member in host]
        inside = SharedMemoryGroup(attached, position, store, timeout, members)
    if inside is not None and len(hosts) == 1:
        return inside, BackendChoice(SHARED, SHARED)
    why = f"its {size} ranks run on {len(hosts)} hosts"
    group = HierarchicalGroup(inside, hosts, rank, PrefixStore("hosts", store), timeout)
    return group, BackendChoice(SHARED, HIERARCHICAL, why)


def _attached(
    store: Any,
    rank: int,
    hosts: list[list[int]],
    cards: Sequence[ProcessCard],
    ranks: Sequence[int],
    fd: int,
) -> tuple[Attached | None, str]:
    """The memory of this host, or the reason why a rank of any host has none.

    `None` without a reason for a rank that is alone on its host.
    """
    index = next(i for i, host in enumerate(hosts) if rank in host)
    attached, failed = None, ""
    of_host = PrefixStore(f"host-{index}", store)
    try:
        if len(hosts) == 1 or len(hosts[index]) > 1:
            attached = posting.attached(of_host, rank, hosts[index], cards, fd)
        else:
            posting.drop(fd)
    except (OSError, RuntimeError) as error:
        failed = f"rank {ranks[rank]}: {error}"
    errors = exchange_texts(store, "attached", rank, len(cards), failed)
    if store.add("attached-read", 1) == len(cards):
        store.set("attached-by-all", "")
    if rank == 0:  # often it serves the store: its program may end while others still read
        store.wait(["attached-by-all"])
    if attached is not None:
        attached.segment.hide()
    why = next((text for text in errors if text), "")
    return (None if why else attached), why


_outcomes: dict[str, BackendChoice] = {}
_works: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


MEANT = ("gloo", "cpu:gloo")


def in_place_of_gloo(outcome: str) -> None:
    """Install it before the script begins; rank 0 writes the `BackendChoice` to `outcome`."""
    register()
    replace(c10d, "init_process_group", functools.partial(_init_process_group, outcome))


def _init_process_group(
    outcome: str, original: Callable[..., Any], backend: Any = None, *args: Any, **kwargs: Any
) -> None:
    if not _is_meant(backend, kwargs):
        original(backend, *args, **kwargs)
        return
    original(BACKEND, *args, **kwargs)
    choice = outcome_of()
    if dist.get_rank() == 0 and choice is not None:
        with open(f"{outcome}.part", "w") as file:
            json.dump(choice.to_data(), file)
        os.replace(f"{outcome}.part", outcome)


def _is_meant(backend: Any, more: dict[str, Any]) -> bool:
    if backend is None:
        has_device = any(accelerator.count(kind) for kind in accelerator.kinds())
        return not has_device and more.get("device_id") is None
    return str(backend).lower() in MEANT
