"""Communication between the ranks of a job: the process group, and what was sent through it.

The only file that calls collectives. Bytes are counted here, for every message, as what this rank
sends under the field's algorithm for that collective. A collective that breaks because a peer went
away raises `PeerLost`: this rank is a victim, and its message never hides the first fault.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any group: its defaults would keep that one
from torch import Tensor

from allranks.errors import PeerLost
from allranks.launcher.heartbeat import Heartbeat, SaveThreadHeartbeat
from allranks.torch.accelerator import is_accelerator
from allranks.torch.comm.counting_group import (
    all_gather_single,
    counting_group,
    leave_counting_group,
    reduce_scatter_single,
)
from allranks.torch.comm.rank_sync import Meetings
from allranks.torch.comm.subgroups import (
    TIMEOUT,
    Pending,
    borrow,
    end,
    give_back,
    in_exchange,
    messages_of,
    new_group,
    packed,
    texts_of_all,
    translated,
    unpack,
)
from allranks.torch.comm.through_host import goes_through_host
from allranks.torch.model.reals import reals
from allranks.torch.shared_memory.in_place import share_memory, shared_zeros, sum_in_place

CPU = torch.device("cpu")
NOTHING = nullcontext()
KINDS = ("gradients", "outputs", "batchnorm", "rows", "control")


@dataclass
class Comm:
    """The ranks that work together, seen from one of them. With `size` 1 nothing is ever sent.

    `sent` is in bytes, by kind: `gradients` (the data of a step, with what rides on it),
    `outputs` (of a loss over the batch), `batchnorm` (statistics over the whole batch), `rows` (of
    tables with a `max_norm`), `control` (everything else). `members` are the ranks of the job that
    these are, where they are not all.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    sent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    owns_group: bool = False
    group: Any = None
    members: tuple[int, ...] | None = None
    heartbeat: Heartbeat | SaveThreadHeartbeat | None = None
    meetings: Meetings | None = None
    leave_out_next: bool = False
    _counting: list[Any] = field(default_factory=list, init=False)
    _borrowed: list[Any] = field(default_factory=list, init=False)
    _waits_on_device: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        through_host = goes_through_host(self.of_torch)
        self._waits_on_device = is_accelerator(self.device) and not through_host

    def leave_out_one(self) -> None:
        """A fault on purpose: the next collective is not made."""
        self.leave_out_next = True

    def leave(self, *, failed: bool = False) -> None:
        """Leave the process group, if it was made here, and all that were made of it.
        Always called.

        After a failure of this rank the others hear of it where they wait for it: from the store
        those that meet, and the others from groups that are closed, or aborted (`subgroups`).
        """
        if failed:
            self.come_no_more(failed=True)
        for group in self._counting:
            leave_counting_group(group)
        if dist.is_initialized():
            for group in [*self._borrowed, *([self.group] if self.owns_group else [])]:
                if failed or not give_back(group):
                    end(group, failed=failed)
        self._counting.clear()
        self._borrowed.clear()
        self.owns_group = False

    def _count(self, kind: str, sent: float) -> None:
        self.sent[kind] += sent

    def _begin(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        if self.meetings is not None and "group" not in kwargs:  # all ranks make this one
            self.meetings.begun += 1
        if self.leave_out_next:
            self.leave_out_next = False
            return Pending()
        kwargs.setdefault("group", self.group)
        work = self._begun(collective, *args, async_op=True, **kwargs)
        looks = not self._waits_on_device
        return Pending(work, self.heartbeat, self.meetings if looks else None)

    def all_reduce(self, tensor: Tensor, kind: str = "gradients") -> Pending:
        """Sum `tensor` over all ranks, in place. Sends 2(N-1)/N of its bytes."""
        if self.size == 1:
            return Pending()
        self._count(kind, 2 * (self.size - 1) / self.size * tensor.nbytes)
        in_place = sum_in_place(self.of_torch, tensor)
        return self._begin(in_place) if in_place else self._begin(dist.all_reduce, reals(tensor))

    def begin_sum(self, collective: Callable[..., Any], sent: float) -> Pending:
        """Make a collective of all these ranks that is none of torch's; each calls this."""
        self._count("gradients", sent)
        return self._begin(collective)

    @property
    def is_one_queue(self) -> bool:
        """Whether messages are made one after the other, in the order in which they are begun."""
        return self._waits_on_device

    @property
    def of_torch(self) -> Any:
        """The process group of these ranks, as torch knows it."""
        return self.group if self.group is not None or self.size == 1 else dist.group.WORLD

    def zeros(self, count: int, like: Tensor) -> Tensor:
        """`count` zeros, in memory of all ranks where they share some; every rank calls this."""
        return shared_zeros(self.of_torch, count, like, self._begin)

    def pair(self, partner: int) -> Any:
        """The group of this rank and `partner`; both call this, before they `add_in_pair`."""
        if self.size == 2 and self.members is None:
            return dist.group.WORLD
        ranks = self.members or range(self.size)
        return self._borrow(tuple(sorted((ranks[self.rank], ranks[partner]))))

    def add_in_pair(self, tensor: Tensor, pair: Any) -> Pending:
        """Sum `tensor` over the two ranks of `pair`, in place. Sends all of its bytes."""
        self._count("gradients", tensor.nbytes)
        return self._begin(dist.all_reduce, tensor, group=pair)

    def all_gather(self, whole: Tensor, part: Tensor, kind: str = "gradients") -> Pending:
        """Every rank's `part`, in rank order, into `whole`. Sends (N-1) times the part."""
        self._count(kind, (self.size - 1) * part.nbytes)
        return self._begin(all_gather_single, whole, part)

    def reduce_scatter(self, part: Tensor, whole: Tensor, kind: str = "gradients") -> Pending:
        """The sum over all ranks of their `whole`, cut evenly; `part` is this rank's.

        Sends (N-1)/N of the whole. That of Gloo all-reduces a copy of the whole: there each rank
        is sent its parts instead, and adds them in rank order.
        """
        self._count(kind, (self.size - 1) / self.size * whole.nbytes)
        if self._waits_on_device or share_memory(self.of_torch):
            return self._begin(reduce_scatter_single, part, whole)
        received = torch.empty_like(whole).view(-1)
        pending = self._begin(dist.all_to_all_single, received, whole.view(-1))
        pending.then = partial(_add_up, part.view(-1), received.view(self.size, -1))
        return pending

    def all_to_all(
        self,
        received: Tensor,
        given: Tensor,
        receive_sizes: list[int],
        give_sizes: list[int],
        kind: str = "gradients",
    ) -> Pending:
        """Send `given`, cut into `give_sizes`, to the ranks; `received` is what they sent.

        Sends all parts but the rank's own.
        """
        own = give_sizes[self.rank] / max(sum(give_sizes), 1)
        self._count(kind, given.nbytes * (1 - own))
        return self._begin(dist.all_to_all_single, received, given, receive_sizes, give_sizes)

    def broadcast(self, *tensors: Tensor, source: int = 0, kind: str = "control") -> None:
        """The `tensors` of rank `source` on all, whatever their types and layouts, in few messages.

        Counted as one copy sent on by each but one.
        """
        if self.size == 1:
            return
        for ahead in messages_of(tensors):
            message = packed(ahead, read=self.rank == source)
            self._count(kind, message.nbytes * (self.size - 1) / self.size)
            self._begin(dist.broadcast, message, group_src=source).wait()
            if self.rank != source:
                unpack(message, ahead)

    def send(
        self, tensor: Tensor, to: int, tag: int, kind: str = "gradients", *, control: int = 0
    ) -> Pending:
        """Send `tensor`, which must not change meanwhile, to one rank. Sends all of its bytes.

        So many of them as `control` says are counted as that.
        """
        self._count(kind, tensor.nbytes - control)
        self._count("control", control)
        return self._post(dist.isend, tensor, tag, group_dst=to)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Fill `tensor` with what rank `source` sends by the same `tag`."""
        return self._post(dist.irecv, tensor, tag, group_src=source)

    def exchange(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], tag: int
    ) -> list[Pending]:
        """Send tensors to some ranks, and fill others by what they send, all at once.

        Sends all bytes of `sends`, (rank, tensor) each, which must not change meanwhile.
        """
        self._count("gradients", sum(tensor.nbytes for _, tensor in sends))
        together = [
            dist.P2POp(way, tensor, group=self.group, tag=tag, group_peer=peer)
            for way, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        work = self._begun(dist.batch_isend_irecv, together) if together else []
        return [Pending(one, self.heartbeat) for one in work]

    def _post(self, message: Callable[..., Any], tensor: Tensor, tag: int, **peer: int) -> Pending:
        """A message, waited for in one piece: Gloo ends all connections where such a wait ends."""
        work = self._begun(message, tensor, group=self.group, tag=tag, **peer)
        return Pending(work, self.heartbeat)

    def _begun(self, message: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.heartbeat is not None:
            self.heartbeat.collective()
        try:
            return message(*args, **kwargs)
        except RuntimeError as error:
            raise translated(error) from error

    def reading(self) -> AbstractContextManager[None]:
        """Within, the host reads what these ranks have sent: it waits for them, in `exchange`.

        The wait of a collective on a device is that of the device, and the host's comes with the
        read.
        """
        if self.size == 1 or not self._waits_on_device:
            return NOTHING
        return in_exchange(self.heartbeat)

    def barrier(self) -> None:
        """Return when every rank has called this."""
        if self.size > 1:
            came = torch.zeros(1, device=self.device)
            self.all_reduce(came, "control").wait()
            with self.reading():
                came.item()  # NCCL's wait is that of the device

    def meet(self, place: str) -> None:
        """Return when all ranks came to `place`; every rank calls this.

        Raises `RequestError` where some are elsewhere, as soon as that is certain.
        """
        if self.meetings is None:
            return
        before = self.heartbeat.enter("exchange") if self.heartbeat is not None else ""
        step = self.heartbeat.step if isinstance(self.heartbeat, Heartbeat) else -1
        self.meetings.come(place, step)
        if self.heartbeat is not None:
            self.heartbeat.enter(before)
        self.barrier()  # none leaves with the store before all have heard

    def come_no_more(self, *, failed: bool = False) -> None:
        """This rank leaves without a meeting: those that wait at one need not."""
        if self.meetings is not None:
            self.meetings.leave(failed=failed)

    def tell_why_lost(self, error: BaseException | None) -> None:
        """Note on the error of who lost a peer what that one said as it left."""
        if self.meetings is None or not isinstance(error, PeerLost):
            return
        if why := self.meetings.why_lost():
            error.add_note(why)

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text on every rank, in order; sends a size and N-1 times the longest."""
        if self.size == 1:
            return [text]
        with self.reading():
            gather = partial(self.all_gather, kind="control")
            return texts_of_all(text, self.size, self.device, gather)

    def among(self, ranks: tuple[int, ...]) -> Comm:
        """Some of these ranks, this one too, on a group of their own; each of `ranks` calls this.

        Whoever calls it calls `leave` at the end, unless it is this one, which counts what is sent.
        """
        if len(ranks) == self.size:
            return self
        own, size = ranks.index(self.rank), len(ranks)
        ranks = tuple(self.members[rank] for rank in ranks) if self.members else ranks
        if size == 1:
            return Comm(device=self.device, sent=self.sent, heartbeat=self.heartbeat, members=ranks)
        group = borrow(ranks, TIMEOUT)
        return replace(self, rank=own, size=size, owns_group=True, group=group, members=ranks)

    def counting_group(self, kind: str) -> Any:
        """A process group of these ranks for parts of torch that call collectives themselves.

        Every rank calls this. What they send is counted here, as `kind`, and `leave` ends it. A
        collective there is a sign of life, and breaks, as one that is made here.
        """
        ranks = tuple(self.members or range(self.size))
        inner = self.group or (dist.group.WORLD if self.size > 1 else self._borrow(ranks))
        group = counting_group(inner, list(ranks), _OfTorch(self, kind), TIMEOUT)
        self._counting.append(group)
        return group

    def _borrow(self, ranks: tuple[int, ...]) -> Any:
        group = borrow(ranks, TIMEOUT)
        self._borrowed.append(group)
        return group

    def beside(self) -> Comm:
        """The same ranks on a group of their own, for what is sent while gradients are under way.

        Every rank calls this, from the thread that trains, and `leave` at the end. What is sent
        there is counted here.
        """
        if self.size == 1:
            return Comm(device=self.device, sent=self.sent, heartbeat=self.heartbeat)
        return replace(self, owns_group=True, group=self._new_group())

    def on_host(self) -> Comm:
        """The same ranks, for numbers that the host reads: these, unless it waits for a device.

        Every rank calls this, from the thread that trains, and `leave` at the end of another one.
        What is sent there is counted here.
        """
        if self.size == 1 or not self._waits_on_device:
            return self
        return replace(self, owns_group=True, group=self._new_group("gloo"), device=CPU)

    def aside(self) -> Comm:
        """The same ranks on a group of their own, over the host, for a thread beside the training.

        Every rank calls this, from the thread that trains, and `leave` at the end. What is sent
        there is counted there.
        """
        if self.size == 1:
            return Comm()
        heartbeat = (
            self.heartbeat.for_save_thread() if isinstance(self.heartbeat, Heartbeat) else None
        )
        group = self._new_group("gloo" if is_accelerator(self.device) else None)
        return Comm(self.rank, self.size, CPU, owns_group=True, group=group, heartbeat=heartbeat)

    def _new_group(self, backend: str | None = None) -> Any:
        """Another group of the same ranks."""
        if self.members is None:
            return new_group(range(self.size), TIMEOUT, backend)
        return borrow(self.members, TIMEOUT, backend)


@dataclass(frozen=True)
class _OfTorch:
    """What a counting group tells of a collective that torch makes itself (`counting.Watch`)."""

    comm: Comm
    kind: str

    def begin(self, sent: float, *, meets: bool) -> None:
        comm = self.comm
        comm._count(self.kind, sent)
        if meets and comm.members is None and comm.meetings is not None:
            comm.meetings.begun += 1  # all ranks of the job make this one
        if comm.heartbeat is not None:
            comm.heartbeat.collective()

    def wait(self, work: Any, *, meets: bool) -> None:
        looks = meets and self.comm.members is None and not self.comm._waits_on_device
        Pending(work, self.comm.heartbeat, self.comm.meetings if looks else None).wait()

    def translated(self, error: RuntimeError) -> RuntimeError | PeerLost:
        return translated(error)


def _add_up(total: Tensor, parts: Tensor) -> None:
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
