"""The backend "shared_memory" of torch: what it makes of ranks that share a host, or do not.

Every rank says where it runs and whether it has the library; all decide alike. Ranks of one host
get a `SharedMemoryGroup`; those of several hosts a `HierarchicalGroup`, if some share one. Where
the memory cannot be had, all use Gloo, and `outcome_of` says why.
"""

from __future__ import annotations

import functools
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

from allranks.torch.shared_memory import attaching
from allranks.torch.shared_memory.attaching import Attached
from allranks.torch.shared_memory.collectives import SharedMemoryGroup
from allranks.torch.shared_memory.hierarchical import HierarchicalGroup
from allranks.torch.shared_memory.library import NOT_BUILT, library
from allranks.torch.shared_memory.operands import (
    ProcessCard,
    exchanged,
    hosts_of,
    own_card,
    told_to_all,
)
from allranks.torch.shared_memory.posting import BACKEND, Named

SHARED, HIERARCHICAL, GLOO = BACKEND, "hierarchical", "gloo"


@dataclass(frozen=True)
class BackendChoice:
    """What was asked for a group, what was done, and why it differs ("" if it does not)."""

    asked: str
    did: str
    why: str = ""

    def to_data(self) -> dict[str, str]:
        return asdict(self)


def register(given: int = attaching.NOT_GIVEN) -> None:
    """Make the name known to torch, once in a process; `init_process_group(BACKEND)` works then.

    The first group of all ranks that is made of it uses the file in memory that is `given`.
    """
    attaching.hand_over(given)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
        replace(c10d, "monitored_barrier", _monitored_barrier)
        replace(c10d, "_set_pg_timeout", _set_pg_timeout)
        if hasattr(c10d, "_maybe_attach_flight_recorder"):  # since torch 2.15
            replace(c10d, "_maybe_attach_flight_recorder", _attach_flight_recorder)
        _keep_works_for(torch._C._distributed_c10d.Reducer)


def replace(module: Any, name: str, by: Callable[..., Any]) -> None:
    """Put a function in the place of one of torch's, wherever its modules have it by name.

    It is called with torch's own before the arguments.
    """
    own = getattr(module, name)
    new = functools.wraps(own)(functools.partial(by, own))
    for one in list(sys.modules.values()):
        if getattr(one, "__dict__", {}).get(name) is own:
            setattr(one, name, new)


def _monitored_barrier(
    own: Callable[..., Any],
    group: Any = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> Any:
    """Torch's asks for Gloo by its name, though a group of ours has one, too."""
    of = group or dist.group.WORLD
    if isinstance(of, Named):
        return of.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
    return own(group, timeout, wait_all_ranks)


def _set_pg_timeout(own: Callable[..., Any], timeout: timedelta | float, group: Any = None) -> None:
    """Torch's sets that of Gloo and NCCL alone."""
    of = group or dist.group.WORLD
    if isinstance(of, Named):
        of.set_timeout(timeout)  # type: ignore[arg-type]  # torch's own: a `timedelta`
    else:
        own(timeout, group)


def _attach_flight_recorder(own: Callable[..., Any], pg: Any, *args: Any, **named: Any) -> None:
    """Torch's asks the half of a group in C++ for its name, and ours has none there."""
    if not isinstance(pg, Named):
        own(pg, *args, **named)


def _keep_works_for(reducer: Any) -> None:
    """The works that DDP gives to C++ are kept for as long as it may ask them, until the next.

    C++ holds its own half of a work alone: the other would go with the last reference of Python.
    """
    own = reducer._set_forward_pass_work_handle

    def set_handle(self: Any, work: Any, *args: Any, **named: Any) -> None:
        _works[self] = work
        own(self, work, *args, **named)

    reducer._set_forward_pass_work_handle = set_handle


def outcome_of(group: Any = None) -> BackendChoice | None:
    """What became of a group that was made of this backend; of the job's own if none is given."""
    group = group or dist.group.WORLD
    return _outcomes.get(group.group_name)


def told_of(group: Any) -> dict[str, str]:
    """What was asked for any group of torch's, what was done, and why it differs: for records.

    Of no group, as one rank has, nothing.
    """
    if group is None:
        return {}
    outcome, name = outcome_of(group), dist.get_backend(group)
    return (outcome or BackendChoice(name, name)).to_data()


def notes_on_backend(group: Any, asked: str) -> list[str]:
    """What to say where a job `asked` for a backend by its name, and another one does its work."""
    told = told_of(group)
    if not asked or told.get("asked") != asked or told["did"] == asked:
        return []
    return [f"--backend {asked} was asked for, and {told['did']} does it: {told['why']}"]


def library_group_of(group: Any = None) -> Any:
    """The library's group behind one of torch's, for direct calls; `None` where Gloo does it."""
    group = group or dist.group.WORLD
    return group.library_group if isinstance(group, SharedMemoryGroup) else None


def _make(options: Any, backend_options: Any) -> Any:
    """What torch calls on every rank of a new group."""
    size = options.group_size
    ranks = list(options.global_ranks_in_group) or list(range(size))
    is_of_all = not options.global_ranks_in_group
    given = attaching.take_given() if is_of_all else attaching.NOT_GIVEN
    group, outcome = made(options.store, options.group_rank, size, options.timeout, ranks, given)
    _outcomes[str(options.group_id)] = outcome
    return group


def made(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: Sequence[int],
    given: int = attaching.NOT_GIVEN,
) -> tuple[Any, BackendChoice]:
    """A group of `ranks` of the job, and what it is; each of them calls this with a `store`.

    `given` is a file in memory that the launcher gave to all ranks of this host for it.
    """
    cannot = NOT_BUILT if library() is None else ""
    bell = "" if cannot else attaching.enter()
    card = own_card(bell, cannot, given)
    cards = exchanged(store, rank, size, card)
    why = next((f"rank {ranks[i]}: {one.cannot}" for i, one in enumerate(cards) if one.cannot), "")
    hosts = hosts_of(cards)
    if not why and len(hosts) == size > 1:
        why = f"its {size} ranks run on {size} hosts"
    if why:
        attaching.drop(given)
    else:
        attached, why = _attached(store, rank, hosts, cards, ranks, given)
    if why:
        if bell:
            attaching.leave()
        return ProcessGroupGloo(store, rank, size, timeout), BackendChoice(SHARED, GLOO, why)
    host = next(host for host in hosts if rank in host)
    inside = None
    if attached is None:
        attaching.leave()
    else:
        own, members = host.index(rank), [ranks[one] for one in host]
        inside = SharedMemoryGroup(attached, own, store, timeout, members)
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
    given: int,
) -> tuple[Attached | None, str]:
    """The memory of this host, if every rank has got its own, and else why not.

    One that is alone on its host, of several, needs none.
    """
    index = next(i for i, host in enumerate(hosts) if rank in host)
    attached, failed = None, ""
    of_host = PrefixStore(f"host-{index}", store)
    try:
        if len(hosts) == 1 or len(hosts[index]) > 1:
            attached = attaching.attached(of_host, rank, hosts[index], cards, given)
        else:
            attaching.drop(given)
    except (OSError, RuntimeError) as error:
        failed = f"rank {ranks[rank]}: {error}"
    said = told_to_all(store, "attached", rank, len(cards), failed)
    if attached is not None:
        attached.segment.hide()
    why = next((text for text in said if text), "")
    return (None if why else attached), why


_outcomes: dict[str, BackendChoice] = {}
_works: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
