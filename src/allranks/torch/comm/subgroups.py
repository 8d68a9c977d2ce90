"""Process groups of some ranks of a job, made once and lent again.

The ranks of such a group find each other under its name in the store of the job. Torch counts all
groups of a process in that name, and ranks that are in more groups than others would count further,
and hang. So each is named here by its ranks and by how many groups of the same ranks there were. A
group that is left is kept for the next that asks for the same ranks, for as long as the process
group of the job is there.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from allranks.errors import FaultKind, PeerLost
from allranks.launcher.heartbeat import Heartbeat, SaveThreadHeartbeat
from allranks.launcher.processes.process import is_said
from allranks.torch.comm.rank_sync import LASTS, Meetings

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


# --- flattened -----------------------------------------------------------------------------------
# Many tensors as few messages of plain bytes, for a broadcast: one type at a time, flat.
#
# NCCL takes contiguous memory and the types that it can add: neither a transposed or expanded
# tensor nor one of 16-bit integers. Bytes it always takes, and a model of 320 tensors goes in a few
# messages instead of as many. What is large and lies in one piece is sent from where it is, without
# a copy.


MESSAGE_BYTES = 16 * 2**20


def messages_of(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors of each message: of one type, together no larger than a message, or alone."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    waiting_bytes: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        tensor = tensor.detach()
        kind, size = tensor.dtype, tensor.nbytes
        ahead = waiting.setdefault(kind, [])
        if ahead and waiting_bytes[kind] + size > MESSAGE_BYTES:
            yield ahead
            ahead = waiting[kind] = []
            waiting_bytes[kind] = 0
        ahead.append(tensor)
        waiting_bytes[kind] += size
    yield from (ahead for ahead in waiting.values() if ahead)


def packed(tensors: Sequence[Tensor], *, read: bool) -> Tensor:
    """One message for these tensors as bytes; its content is theirs only if they are `read`."""
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous() and not (first.is_conj() or first.is_neg()):
        return first.view(-1).view(torch.uint8)
    if read:
        flat = torch.cat([tensor.resolve_conj().resolve_neg().reshape(-1) for tensor in tensors])
    else:
        flat = first.new_empty(sum(tensor.numel() for tensor in tensors))
    return flat.view(torch.uint8)


def unpack(message: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write into the tensors what a message of their own has brought."""
    flat = message.view(tensors[0].dtype)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        if tensor.data_ptr() == part.data_ptr():
            continue
        part = part.view(tensor.shape)
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # expanded: what lies in memory is written once
                tensor, part = tensor.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
        tensor.copy_(part)


# --- pending -------------------------------------------------------------------------------------
# A collective under way, and what its error means.


TIMEOUT = timedelta(minutes=40)  # longer than --hang-timeout usually is: it names who is missing


@contextmanager
def in_exchange(
    heartbeat: Heartbeat | SaveThreadHeartbeat | None, computed: Any = None
) -> Iterator[None]:
    """Around a read of sums of all ranks: in `exchange`, once the own part is `computed`."""
    if computed is not None:
        computed.synchronize()
    before = "" if heartbeat is None else heartbeat.enter("exchange")
    try:
        yield
    finally:
        if heartbeat is not None:
            heartbeat.enter(before)


def translated(error: RuntimeError) -> RuntimeError | PeerLost:
    """The error that says what a broken collective means; Gloo names neither rank nor reason."""
    message = str(error)
    if is_said(FaultKind.TIMED_OUT, message):
        waited = f"{TIMEOUT.total_seconds():.0f} s"
        return PeerLost(
            f"another rank did not take part in a collective within {waited}: {message}"
        )
    return PeerLost(message) if is_said(FaultKind.PEER_LOST, message) else error


@dataclass
class Pending:
    """A collective under way; `wait` returns when its result is there.

    With `meetings` a wait that lasts asks there whether all ranks will come. `then` makes the
    result of what has arrived.
    """

    work: Any = None
    heartbeat: Heartbeat | SaveThreadHeartbeat | None = None
    meetings: Meetings | None = None
    then: Callable[[], object] | None = None

    def wait(self) -> None:
        if self.work is None:
            return
        before = self.heartbeat.enter("exchange") if self.heartbeat is not None else ""
        try:
            if self.meetings is None:
                self.work.wait()
            else:
                self._wait_and_look(self.meetings, before)
        except RuntimeError as error:
            raise translated(error) from error
        if self.then is not None:
            self.then()
        if self.heartbeat is not None:
            self.heartbeat.enter(before)

    def _wait_and_look(self, meetings: Meetings, phase: str) -> None:
        while not self.work.is_completed():
            begun = time.monotonic()
            try:
                self.work.wait(LASTS)
                return
            except RuntimeError as error:  # it lasts, unless the collective itself has failed
                if self.work.is_completed():
                    break
                is_early = time.monotonic() - begun < LASTS.total_seconds() / 2
                if is_early and isinstance(translated(error), PeerLost):
                    raise  # Gloo's reduce-scatter fails without being completed
            step = self.heartbeat.step if isinstance(self.heartbeat, Heartbeat) else -1
            meetings.look(f"in `{phase or 'exchange'}` of step {step}")
        self.work.wait()


# --- texts ---------------------------------------------------------------------------------------
# Texts of all ranks, as collectives of numbers carry them.


class Gathers(Protocol):
    """Every rank's `part`, in rank order, into `whole`."""

    def __call__(self, whole: Tensor, part: Tensor) -> Pending: ...


def texts_of_all(text: str, size: int, device: torch.device, gather: Gathers) -> list[str]:
    """The text of each of `size` ranks, in order; every rank calls this.

    Gathers a size, and then as many bytes as the longest has.
    """
    data = text.encode()
    sizes = torch.zeros(size, dtype=torch.int64, device=device)
    gather(sizes, torch.tensor([len(data)], device=device)).wait()
    part = torch.zeros(max(1, int(sizes.max())), dtype=torch.uint8, device=device)
    own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    part[: len(data)] = own[: len(data)]
    whole = part.new_empty(size * part.numel())
    gather(whole, part).wait()
    rows = whole.cpu().numpy().reshape(size, -1)
    return [bytes(row[:length]).decode() for row, length in zip(rows, sizes.tolist(), strict=True)]
