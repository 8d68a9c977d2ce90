"""Communication between the ranks of a job: the process group, and the bytes sent through it.

The only file that calls collectives. It counts the bytes that this rank sends in every message,
under the standard algorithm for that collective. A collective that fails because a peer has left
raises `PeerLost`: this rank is a victim, and its error never hides the first fault.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any group: its defaults would keep that one
from torch import Tensor

from allranks.errors import FaultKind, PeerLost
from allranks.launcher.heartbeat import Heartbeat, SaveThreadHeartbeat
from allranks.launcher.processes.process import is_said
from allranks.torch.accelerator import is_accelerator
from allranks.torch.comm.counting_group import (
    all_gather_single,
    counting_group,
    leave_counting_group,
    reduce_scatter_single,
)
from allranks.torch.comm.rank_sync import GLANCE, LASTS, StoreBarrier
from allranks.torch.comm.subgroups import (
    FORMING,
    borrow,
    end,
    give_back,
    messages_of,
    new_group,
    packed,
    unpack,
    with_timeout,
)
from allranks.torch.comm.through_host import goes_through_host
from allranks.torch.model.reals import reals
from allranks.torch.shared_memory.in_place import share_memory, shared_zeros, sum_in_place

CPU = torch.device("cpu")
NOTHING = nullcontext()
KINDS = ("gradients", "outputs", "batchnorm", "rows", "control")
HAND_TAG = 2**30 + 2


# --- pending -------------------------------------------------------------------------------------
# A collective in flight, and the meaning of its errors.


TIMEOUT = timedelta(minutes=40)  # longer than most --hang-timeouts, which name missing ranks


@contextmanager
def in_exchange(
    heartbeat: Heartbeat | SaveThreadHeartbeat | None, computed: Any = None
) -> Iterator[None]:
    """Around a read of sums of all ranks: phase `exchange`, once `computed` has passed."""
    if computed is not None:
        computed.synchronize()
    before = "" if heartbeat is None else heartbeat.enter("exchange")
    try:
        yield
    finally:
        if heartbeat is not None:
            heartbeat.enter(before)


def translated(error: RuntimeError) -> RuntimeError | PeerLost:
    """Translate the error of a failed collective; Gloo names neither rank nor reason."""
    message = str(error)
    if is_said(FaultKind.TIMED_OUT, message):
        waited = f"{TIMEOUT.total_seconds():.0f} s"
        return PeerLost(
            f"another rank did not take part in a collective within {waited}: {message}"
        )
    return PeerLost(message) if is_said(FaultKind.PEER_LOST, message) else error


@dataclass
class Pending:
    """A collective in flight; `wait` returns when its result is available.

    With `store_barrier` a long wait checks there whether all ranks will join. `glance` is called
    often meanwhile, and raises if other ranks train now (`elastic`). `then` is called after the
    wait to compute the result. `timeout` replaces the default of the group, for a message.
    """

    work: Any = None
    heartbeat: Heartbeat | SaveThreadHeartbeat | None = None
    store_barrier: StoreBarrier | None = None
    then: Callable[[], object] | None = None
    glance: Callable[[], None] | None = None
    timeout: timedelta | None = None

    def wait(self) -> None:
        if self.work is None:
            return
        before = self.heartbeat.enter("exchange") if self.heartbeat is not None else ""
        try:
            if self.timeout is not None:
                self._wait_in_thread(self.timeout)
            elif self.store_barrier is not None or self.glance is not None:
                self._wait_and_look(before)
            else:
                self.work.wait()
        except RuntimeError as error:
            raise translated(error) from error
        if self.then is not None:
            self.then()
        if self.heartbeat is not None:
            self.heartbeat.enter(before)

    def _wait_in_thread(self, timeout: timedelta) -> None:
        """Wait in a thread, and glance meanwhile: a wait that times out closes the connections."""
        done: Future[None] = Future()

        def wait() -> None:
            try:
                self.work.wait(timeout)
                done.set_result(None)
            except RuntimeError as error:
                done.set_exception(error)

        threading.Thread(target=wait, name="allranks-message", daemon=True).start()
        while not futures.wait([done], GLANCE.total_seconds()).done:
            if self.glance is not None:
                self.glance()
        done.result()

    def _wait_and_look(self, phase: str) -> None:
        looked_at, lasts = time.monotonic(), LASTS if self.glance is None else GLANCE
        while not self.work.is_completed():
            begun = time.monotonic()
            try:
                self.work.wait(lasts)
                return
            except RuntimeError as error:  # a long wait, unless the collective itself has failed
                if self.work.is_completed():
                    break
                is_early = time.monotonic() - begun < lasts.total_seconds() / 2
                if is_early and isinstance(translated(error), PeerLost):
                    raise  # Gloo's reduce-scatter fails without being completed
            if self.glance is not None:
                self.glance()
                if time.monotonic() - looked_at < LASTS.total_seconds():
                    continue
                looked_at = time.monotonic()
            step = self.heartbeat.step if isinstance(self.heartbeat, Heartbeat) else -1
            if self.store_barrier is not None:
                self.store_barrier.look(f"in `{phase or 'exchange'}` of step {step}")
        self.work.wait()


# --- texts ---------------------------------------------------------------------------------------
# Texts of all ranks, gathered as tensors.


class Gathers(Protocol):
    """Every rank's `part`, in rank order, into `whole`."""

    def __call__(self, whole: Tensor, part: Tensor) -> Pending: ...


def texts_of_all(text: str, size: int, device: torch.device, gather: Gathers) -> list[str]:
    """The text of each of `size` ranks, in order; every rank calls this.

    Gathers the sizes, and then the texts, padded to the longest.
    """
    data = text.encode()
    sizes = torch.zeros(size, dtype=torch.int64, device=device)
    gather(sizes, torch.tensor([len(data)], device=device)).wait()
    part = torch.zeros(max(1, int(sizes.max())), dtype=torch.uint8, device=device)
    encoded = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    part[: len(data)] = encoded[: len(data)]
    whole = part.new_empty(size * part.numel())
    gather(whole, part).wait()
    rows = whole.cpu().numpy().reshape(size, -1)
    return [bytes(row[:length]).decode() for row, length in zip(rows, sizes.tolist(), strict=True)]


# --- comm ----------------------------------------------------------------------------------------
# The ranks of a group.


@dataclass
class Comm:
    """A group of ranks, and this rank's place in it. With `size` 1 nothing is ever sent.

    `sent_bytes` is by kind: `gradients` (the data of a step and the tally with it), `outputs` (of a
    loss over the batch), `batchnorm` (statistics over the whole batch), `rows` (of tables with a
    `max_norm`), `control` (everything else). `members` are the ranks of this group in the job, if
    it does not have all of them. `on_device`: their tensors lie on accelerators. `glance` is called
    in waits and passes, and raises where other ranks of an elastic job train now.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    sent_bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    owns_group: bool = False
    group: Any = None
    members: tuple[int, ...] | None = None
    heartbeat: Heartbeat | SaveThreadHeartbeat | None = None
    store_barrier: StoreBarrier | None = None
    skips_next: bool = False
    glance: Callable[[], None] | None = None
    _counting: list[Any] = field(default_factory=list, init=False)
    _borrowed: list[Any] = field(default_factory=list, init=False)
    on_device: bool = field(default=False, init=False)
    _waits_on_device: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.on_device = is_accelerator(self.device)
        self._waits_on_device = self.on_device and not goes_through_host(self.of_torch)

    def skip_next_collective(self) -> None:
        """Inject a fault: skip the next collective."""
        self.skips_next = True

    def leave(self, *, failed: bool = False) -> None:
        """Leave the process group, if it was made here, and all groups made from it.
        Always called.

        After a failure of this rank, ranks that wait for it get an error: those in `meet` from the
        store, the others because groups are closed or aborted (`subgroups`).
        """
        if failed:
            self.leave_barrier(failed=True)
        for group in self._counting:
            leave_counting_group(group)
        if dist.is_initialized():
            for group in [*self._borrowed, *([self.group] if self.owns_group else [])]:
                if failed or not give_back(group):
                    end(group, failed=failed)
        self._counting.clear()
        self._borrowed.clear()
        self.owns_group = False

    def _count(self, kind: str, sent_bytes: float) -> None:
        self.sent_bytes[kind] += sent_bytes

    def _begin(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        if self.store_barrier is not None and "group" not in kwargs:  # all ranks make this one
            self.store_barrier.begun += 1
        if self.skips_next:
            self.skips_next = False
            return Pending()
        kwargs.setdefault("group", self.group)
        work = self._begun(collective, *args, async_op=True, **kwargs)
        barrier = None if self._waits_on_device else self.store_barrier
        return Pending(work, self.heartbeat, barrier, glance=self.glance)

    def all_reduce(self, tensor: Tensor, kind: str = "gradients") -> Pending:
        """Sum `tensor` over all ranks, in place. Sends 2(N-1)/N of its bytes."""
        if self.size == 1:
            return Pending()
        self._count(kind, 2 * (self.size - 1) / self.size * tensor.nbytes)
        in_place = sum_in_place(self.of_torch, tensor)
        if in_place is not None:
            return self._begin(in_place)
        return self._begin(dist.all_reduce, reals(tensor) if tensor.is_complex() else tensor)

    def begin_sum(self, collective: Callable[..., Any], sent_bytes: float) -> Pending:
        """Begin a collective of all these ranks that is not torch's own; every rank calls this."""
        self._count("gradients", sent_bytes)
        return self._begin(collective)

    @property
    def is_one_queue(self) -> bool:
        """Whether messages run one after the other, in the order in which they are begun."""
        return self._waits_on_device

    @property
    def of_torch(self) -> Any:
        """The `torch.distributed` process group of these ranks."""
        return self.group if self.group is not None or self.size == 1 else dist.group.WORLD

    def zeros(self, count: int, like: Tensor) -> Tensor:
        """`count` zeros, in shared memory where the ranks have some; every rank calls this."""
        return shared_zeros(self.of_torch, count, like, self._begin)

    def pair(self, partner: int) -> Any:
        """The group of this rank and `partner`; both call this before `add_in_pair`."""
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

        Sends (N-1)/N of the whole. Gloo's own reduce-scatter all-reduces a copy of the whole;
        there an all-to-all is used instead, and each rank adds its parts in rank order.
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
        outgoing: Tensor,
        receive_sizes: list[int],
        give_sizes: list[int],
        kind: str = "gradients",
    ) -> Pending:
        """Send `outgoing`, split by `give_sizes`, to the ranks; receive their parts in `received`.

        Sends all parts but the one for this rank.
        """
        local_share = give_sizes[self.rank] / max(sum(give_sizes), 1)
        self._count(kind, outgoing.nbytes * (1 - local_share))
        return self._begin(dist.all_to_all_single, received, outgoing, receive_sizes, give_sizes)

    def broadcast(self, *tensors: Tensor, source: int = 0, kind: str = "control") -> None:
        """Copy `tensors` of rank `source` to all ranks, of any dtype and layout, in few messages.

        Counted as one copy, sent on by every rank but one.
        """
        if self.size == 1:
            return
        for ahead in messages_of(tensors):
            message = packed(ahead, read=self.rank == source)
            self._count(kind, message.nbytes * (self.size - 1) / self.size)
            self._begin(dist.broadcast, message, group_src=source).wait()
            if self.rank != source:
                unpack(message, ahead)

    def hand(self, *tensors: Tensor, source: int, to: Sequence[int]) -> None:
        """Copy `tensors` of rank `source` to the ranks `to`, as `broadcast`; only these call this.

        Sends all of their bytes to each.
        """
        for ahead in messages_of(tensors):
            message = packed(ahead, read=self.rank == source)
            if self.rank == source:
                size = message.nbytes
                for pending in [self.send(message, rank, HAND_TAG, control=size) for rank in to]:
                    pending.wait()
            else:
                self.receive(message, source, HAND_TAG).wait()
                unpack(message, ahead)

    def send(
        self, tensor: Tensor, to: int, tag: int, kind: str = "gradients", *, control: int = 0
    ) -> Pending:
        """Send `tensor`, which must not change meanwhile, to one rank. Sends all of its bytes.

        `control` of these bytes are counted as that kind.
        """
        self._count(kind, tensor.nbytes - control)
        self._count("control", control)
        return self._post(dist.isend, tensor, tag, group_dst=to)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Fill `tensor` with the message of rank `source` with the same `tag`."""
        return self._post(dist.irecv, tensor, tag, group_src=source)

    def exchange(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], tag: int
    ) -> list[Pending]:
        """Send tensors to some ranks and receive tensors from others, all at once.

        Both are lists of (rank, tensor). Sends all of `sends`, which must not change meanwhile.
        """
        self._count("gradients", sum(tensor.nbytes for _, tensor in sends))
        operations = [
            dist.P2POp(operation, tensor, group=self.group, tag=tag, group_peer=peer)
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        work = self._begun(dist.batch_isend_irecv, operations) if operations else []
        return [self._message(request) for request in work]

    def _post(self, message: Callable[..., Any], tensor: Tensor, tag: int, **peer: int) -> Pending:
        return self._message(self._begun(message, tensor, group=self.group, tag=tag, **peer))

    def _message(self, work: Any) -> Pending:
        """A message under way; it may take as long as a collective.

        torch sets a new timeout of a group for its collectives alone, and at a timeout Gloo closes
        all connections. Groups of an elastic job have a short one while they form.
        """
        timeout = None if self.glance is None else TIMEOUT
        return Pending(work, self.heartbeat, glance=self.glance, timeout=timeout)

    def _begun(self, message: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.heartbeat is not None:
            self.heartbeat.collective()
        try:
            return message(*args, **kwargs)
        except RuntimeError as error:
            raise translated(error) from error

    def reading(self) -> AbstractContextManager[None]:
        """Within, the host reads results of collectives: the heartbeat's phase is `exchange`.

        On a device `Pending.wait` does not block the host; the read does.
        """
        if self.size == 1 or not self._waits_on_device:
            return NOTHING
        return in_exchange(self.heartbeat)

    def barrier(self) -> None:
        """Block until every rank has called this."""
        if self.size > 1:
            token = torch.zeros(1, device=self.device)
            self.all_reduce(token, "control").wait()
            with self.reading():
                token.item()  # NCCL's wait does not block the host

    def meet(self, place: str) -> None:
        """Block until all ranks have reached `place`; every rank calls this.

        Raises `RequestError` as soon as it is certain that some ranks are elsewhere.
        """
        if self.store_barrier is None:
            return
        before = self.heartbeat.enter("exchange") if self.heartbeat is not None else ""
        step = self.heartbeat.step if isinstance(self.heartbeat, Heartbeat) else -1
        self.store_barrier.wait(place, step)
        if self.heartbeat is not None:
            self.heartbeat.enter(before)
        self.barrier()  # no rank leaves with the store before all have read the verdict

    def leave_barrier(self, *, failed: bool = False) -> None:
        """Tell ranks that wait in `meet` that this rank will not come."""
        if self.store_barrier is not None:
            self.store_barrier.leave(failed=failed)

    def add_reason_of_loss(self, error: BaseException | None) -> None:
        """If a peer was lost, add a note to `error` with the reason that the peer gave."""
        if self.store_barrier is None or not isinstance(error, PeerLost):
            return
        if why := self.store_barrier.why_lost():
            error.add_note(why)

    def gather_texts(self, text: str) -> list[str]:
        """Gather the texts of all ranks, in rank order; sends a size and N-1 times the longest."""
        if self.size == 1:
            return [text]
        with self.reading():
            gather = partial(self.all_gather, kind="control")
            return texts_of_all(text, self.size, self.device, gather)

    def gather_values(self, value: Any) -> list[Any]:
        """Gather a value of each rank as JSON, in rank order: see `gather_texts`."""
        return [json.loads(text) for text in self.gather_texts(json.dumps(value))]

    def subgroup(self, ranks: tuple[int, ...]) -> Comm:
        """A group of some of these ranks, this one included; each of `ranks` calls this.

        The caller calls `leave` at the end, unless the result is this `Comm`. Bytes count here.
        """
        if len(ranks) == self.size:
            return self
        rank, size = ranks.index(self.rank), len(ranks)
        ranks = tuple(self.members[r] for r in ranks) if self.members else ranks
        if size == 1:
            return Comm(0, 1, self.device, self.sent_bytes, heartbeat=self.heartbeat, members=ranks)
        group = self._formed(borrow(ranks, self._forming))
        return replace(self, rank=rank, size=size, owns_group=True, group=group, members=ranks)

    def counting_group(self, kind: str) -> Any:
        """A process group of these ranks for parts of torch that call collectives themselves.

        Every rank calls this; `leave` ends it. Bytes are counted here as `kind`. Its collectives
        update the heartbeat and raise the same errors as those of this class.
        """
        ranks = tuple(self.members or range(self.size))
        inner = self.group or (dist.group.WORLD if self.size > 1 else self._borrow(ranks))
        group = counting_group(inner, list(ranks), _OfTorch(self, kind), TIMEOUT)
        self._counting.append(group)
        return group

    def _borrow(self, ranks: tuple[int, ...]) -> Any:
        group = self._formed(borrow(ranks, self._forming))
        self._borrowed.append(group)
        return group

    def duplicate(self) -> Comm:
        """A new group of the same ranks, for messages while gradients are in flight (MPI_Comm_dup).

        Every rank calls this from the training thread, and `leave` at the end. Bytes count here.
        """
        if self.size == 1:
            return Comm(device=self.device, sent_bytes=self.sent_bytes, heartbeat=self.heartbeat)
        return replace(self, owns_group=True, group=self._new_group())

    def on_host(self) -> Comm:
        """A group of the same ranks for numbers that the host reads: on a device, over Gloo.

        Every rank calls this from the training thread, and `leave` at the end if the result is
        another `Comm`. Bytes count here.
        """
        if self.size == 1 or not self._waits_on_device:
            return self
        return replace(self, owns_group=True, group=self._new_group("gloo"), device=CPU)

    def aside(self) -> Comm:
        """A new group of the same ranks on the host, for a thread other than the training thread.

        Every rank calls this from the training thread, and `leave` at the end. Bytes are counted
        by the new `Comm`.
        """
        if self.size == 1:
            return Comm()
        heartbeat = (
            self.heartbeat.for_save_thread() if isinstance(self.heartbeat, Heartbeat) else None
        )
        group = self._new_group("gloo" if self.on_device else None)
        comm = Comm(self.rank, self.size, CPU, owns_group=True, group=group, heartbeat=heartbeat)
        comm.glance = self.glance
        return comm

    def _new_group(self, backend: str | None = None) -> Any:
        """Another group of the same ranks."""
        if self.members is None:
            return self._formed(new_group(range(self.size), self._forming, backend))
        return self._formed(borrow(self.members, self._forming, backend))

    @property
    def _forming(self) -> timedelta:
        """How long the ranks may take to form a group: not long where some may be lost."""
        return TIMEOUT if self.glance is None else FORMING

    def _formed(self, group: Any) -> Any:
        return group if self._forming == TIMEOUT else with_timeout(group, TIMEOUT)


@dataclass(frozen=True)
class _OfTorch:
    """Counts the collectives that torch makes itself (`CollectiveCounter`)."""

    comm: Comm
    kind: str

    def begin(self, sent_bytes: float, *, meets: bool) -> None:
        comm = self.comm
        comm._count(self.kind, sent_bytes)
        if meets and comm.members is None and comm.store_barrier is not None:
            comm.store_barrier.begun += 1  # all ranks of the job make this one
        if comm.heartbeat is not None:
            comm.heartbeat.collective()

    def wait(self, work: Any, *, meets: bool) -> None:
        comm = self.comm
        looks = meets and comm.members is None and not comm._waits_on_device
        barrier = comm.store_barrier if looks else None
        Pending(work, comm.heartbeat, barrier, glance=comm.glance).wait()

    def translated(self, error: RuntimeError) -> RuntimeError | PeerLost:
        return translated(error)


def _add_up(total: Tensor, parts: Tensor) -> None:
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
