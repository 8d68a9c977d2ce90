"""A shared-memory group of one host: its engine and segment, the work and timeout of its calls.

A process has one engine and one bell, the page on which it sleeps, from its first group to its
last. A group has a segment: rank 0 creates it and sends its place, the others open it. All ranks
map the bells of all. Then the ranks exchange errors, so that all make the same decision. Gloo is
the fallback for calls which the library lacks.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from allranks.strategies.reduction_tree import merges
from allranks.torch.shared_memory.operands import (
    PostedCall,
    ProcessCard,
    in_one_form,
    seconds_of,
)
from allranks.torch.shared_memory.segment import Segment, library
from allranks.torch.shared_memory.work import SharedMemoryWork, at_rest, end_soon, seconds_in

NO_FILE = -1
ONLY_OURS = 2  # references: the attribute, and the argument of getrefcount
STOPPED_S = 2400.0  # as long as a wait may last: a stopped process may be continued
SEGMENT = "memfd:allranks-segment"  # what the launcher's file is called in /proc


@dataclass
class _Process:
    """The engine of this process and its bell, while it has groups."""

    engine: Any = None
    bell: Segment | None = None
    groups: int = 0
    fd: int = NO_FILE
    had_file: bool = False
    most_ranks: int = 1
    retired: list[Attached] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Attached:
    """A group of the library: `group` makes collectives in this memory.

    `ranks` are its members in the torch group.
    """

    group: Any
    segment: Segment
    bells: list[Segment]
    ranks: tuple[int, ...]


def offer_file(fd: int) -> None:
    """Use a memory file from the launcher for the next group of all ranks, once.

    Ignores a number without such a file: a child process may have inherited the variable alone.
    """
    with suppress(OSError):
        is_ours = fd >= 0 and SEGMENT in os.readlink(f"/proc/self/fd/{fd}")
        if is_ours and not _process.had_file:
            _process.fd, _process.had_file = fd, True


def take_file() -> int:
    """The file of `offer_file`, for the first caller; `NO_FILE` afterwards."""
    fd, _process.fd = _process.fd, NO_FILE
    return fd


def drop(fd: int) -> None:
    if fd != NO_FILE:
        os.close(fd)


def loaded() -> Any:
    """The library, which must be there."""
    native = library()
    assert native is not None
    return native


def enter() -> str:
    """Ensure an engine, for one more group; returns the place of this process's bell."""
    with _process.lock:
        if _process.engine is None:
            native = loaded()
            bell = Segment.create(native.BELL_BYTES, "allranks-bell")
            _process.engine, _process.bell = native.Engine(bell.address, STOPPED_S), bell
        _process.groups += 1
        assert _process.bell is not None
        return _process.bell.where


def leave(attached: Attached | None = None) -> None:
    """Free a group and its memory; with the last group also the engine, its thread and bell.

    If a thread still returns from an op of the group, the memory is freed later.
    """
    with _process.lock:
        if attached is not None:
            _process.retired.append(attached)
        _process.groups -= 1
        if _process.groups == 0:
            _process.engine = None
            if _process.bell is not None:
                _process.bell.hide()
            _process.bell = None
            end_soon()
    del attached
    _free_retired()


def _free_retired() -> None:
    """Free the left groups and their memory, except those whose ops are still referenced."""
    if not _process.retired:
        return
    with _process.lock:
        for each in list(_process.retired):
            if sys.getrefcount(each.group) <= ONLY_OURS:  # an op holds its group
                _process.retired.remove(each)
                each.group = None  # before its memory


at_rest.append(_free_retired)


def attached(
    store: Any,
    rank: int,
    ranks: Sequence[int],
    cards: Sequence[ProcessCard],
    fd: int = NO_FILE,
) -> Attached:
    """The memory of these `ranks` of a group, all on one host; `rank` is one of them.

    Uses the file `fd` if all have it, else closes it. Raises `OSError` or `RuntimeError`, also in
    the ranks which wait for the memory: the error is sent by `store`.
    """
    native, members = loaded(), [cards[member] for member in ranks]
    position, size = list(ranks).index(rank), len(ranks)
    nbytes = native.segment_bytes(size)
    segment = _segment(store, position, members, nbytes, fd)
    bells = [
        Segment.open(card.bell, native.BELL_BYTES)
        for index, card in enumerate(members)
        if index != position
    ]
    for bell in bells:
        bell.hide()
    own_bell = _process.bell
    assert own_bell is not None
    bells.insert(position, own_bell)
    _process.most_ranks = max(_process.most_ranks, size)
    group = native.Group(
        _process.engine,
        segment.address,
        position,
        size,
        tuple(bell.address for bell in bells),
        tuple(card.pid for card in members),
        merges(tuple((leaf, leaf + 1) for leaf in range(size)), size),
        _process.most_ranks > len({core for card in cards for core in card.cores}),
    )
    return Attached(group, segment, bells, tuple(ranks))


def _segment(
    store: Any, position: int, members: Sequence[ProcessCard], nbytes: int, fd: int
) -> Segment:
    files = {card.given for card in members}
    if len(files) == 1 and "" not in files:  # all have the same one from their launcher
        return Segment.within(fd, nbytes)
    drop(fd)
    if position == 0:
        try:
            segment = Segment.create(nbytes, "allranks-group")
        except OSError as error:
            store.set("segment", f"! {error}")
            raise
        store.set("segment", segment.where)
        return segment
    where = store.get("segment").decode()
    if where.startswith("!"):
        raise OSError(where[2:])
    return Segment.open(where, nbytes)


_process = _Process()
_left_to_the_parent: list[_Process] = []


def _forget() -> None:
    """After a fork the child's engine has no thread, and its bell is the parent's."""
    global _process
    _left_to_the_parent.append(_process)  # not freed: that would wait for a thread
    _process = _Process()


os.register_at_fork(after_in_child=_forget)


BACKEND = "shared_memory"


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A Gloo group with all of torch's methods; all its ranks call this."""
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


Method = TypeVar("Method", bound=Callable[..., Any])


def untraced(method: Method) -> Method:
    """Make `torch.compile` call a method like one in C++: neither traced nor compiled.

    Like `torch.compiler.disable`, but without a wrapper, and without an import of the compiler.
    """
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    method._torchdynamo_disable_msg = "a process group"  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    never = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(method.__code__, never)
    return method


def untraced_methods(of: type) -> type:
    """Make all methods of a class untraced."""
    for value in vars(of).values():
        if isinstance(value, types.FunctionType):
            untraced(value)
    return of


def collective(title: str, count: int, kind: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a collective: it accepts `count` arguments, and options in any form of torch.

    The method gets an object of options of that `kind` as its last argument; without a kind, the
    arguments of the call. The profiler shows `title` while it runs. The form that `dist` uses is
    tested first, as this overhead is part of every step.
    """
    usual, most = kind and kind(), count + 1

    def decorate(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, opts: Any = None, **named: Any) -> Any:
            if not (named or profiler._is_profiler_enabled):
                if opts is None:
                    if len(args) == most and type(args[-1]) is kind:
                        self.calls += 1
                        return method(self, *args)
                elif len(args) == count and type(opts) is kind:
                    self.calls += 1
                    return method(self, *args, opts)
            if opts is not None:
                named["opts"] = opts
            return in_any_form(self, args, named)

        def in_any_form(self: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if kind is not None:
                only_tensors = len(args) == count and not named
                args = (*args, usual) if only_tensors else in_one_form(kind, count, args, named)
                named = {}
            self.calls += 1
            if not profiler._is_profiler_enabled:
                return method(self, *args, **named)
            with profiler.record_function(f"c10d::{method.__name__.rstrip('_')}_"):
                work = method(self, *args, **named)
            if hasattr(work, "record"):
                work.record(f"{BACKEND}:{title}")
            return work

        return untraced(call)

    return decorate


class Named(dist.ProcessGroup):
    """Attributes which torch expects of a group: name, devices, backend, store, call count."""

    _name = _desc = ""
    _store: Any = None
    calls = 0

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's own asks for a backend
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:  # torch calls it so
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """The backend for a device: this group itself."""
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def _set_sequence_number_for_group(self) -> None:
        self.calls = 0


class _Coalesced(threading.local):
    """The works of this thread since `_start_coalescing`; `None` outside of that."""

    works: list[Any] | None = None


class Posting(Named):
    """A group of ranks on one host. `library_group` is the library's, for direct calls.

    `ranks` are its members in the job. `under_way` references each work until it is over.
    """

    def __init__(
        self, attached: Attached, rank: int, store: Any, timeout: timedelta, ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, len(attached.ranks))  # type: ignore[call-arg]
        self.library = loaded()
        self.lost_class = self.library.PeerLost
        self.library_group = attached.group
        self._attached: Attached | None = attached
        self.ranks, self.under_way = tuple(ranks), set[Any]()
        self.my_rank, self.count = rank, len(attached.ranks)  # rank() and size() cross into C++
        self.seconds = timeout.total_seconds()
        self._store, self._pid, self._is_left = store, os.getpid(), False
        self._gloo: Any = None
        self._lock, self._coalesced = threading.Lock(), _Coalesced()
        _alive.add(self)

    def _posted(self, call: PostedCall, tensors: list[Tensor], opts: Any = None) -> Any:
        """The work of a call; after `_start_coalescing` it becomes part of a larger one."""
        work = SharedMemoryWork(self, call, tensors, seconds_of(opts, self.seconds))
        if (works := self._coalesced.works) is not None:
            works.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced.works = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """One work for all calls of this thread since `_start_coalescing`."""
        works, self._coalesced.works = self._coalesced.works or [], None
        call = PostedCall(
            [op for work in works for op in work.ops],
            works,
            [work.wait for work in works],
        )
        return self._posted(call, [tensor for work in works for tensor in work.tensors])

    def gloo(self) -> Any:
        """A Gloo group of the same ranks, for calls the library lacks; all ranks call this."""
        with self._lock:
            if self._gloo is None:
                store = PrefixStore("gloo", self._store)
                timeout = timedelta(seconds=self.seconds)
                self._gloo = gloo_group(store, self.my_rank, self.count, timeout)
            return self._gloo

    def set_timeout(self, timeout: timedelta | float) -> None:
        self.seconds = seconds_in(timeout)
        if self._gloo is not None:
            self._gloo.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group: ranks which wait for this one get an error at once. Frees the memory."""
        if self._is_left or self._pid != os.getpid():
            return
        self._is_left = True
        self.library_group.leave()
        self._gloo = None
        for work in list(self.under_way):  # all are over now, with or without an error
            work.drive(0)
        self.library_group = _ClosedGroup()
        attached, self._attached = self._attached, None
        leave(attached)

    def abort(self) -> None:
        self.shutdown()


class _ClosedGroup:
    """Replaces the library's group after this process has left it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this process has left the shared-memory group")


_alive: WeakSet[Posting] = WeakSet()


@atexit.register
def _leave_all() -> None:
    """Leave all groups at the end of the program, so that other ranks get an error."""
    for group in list(_alive):
        group.shutdown()
