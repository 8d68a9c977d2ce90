"""A process group over several hosts: shared memory inside each, Gloo between their leaders.

All-reduce, broadcast, barrier and all-gather have two levels: a collective in the memory of each
host, one between the leaders of the hosts over the network, and a broadcast in each host. So a host
sends and receives each value once, not once per rank. Messages between two ranks of one host go
through memory. Everything else uses Gloo among all ranks.

One thread of the group makes both levels, call by call in the order of the program; torch waits for
it. The sums of the hosts are added in Gloo's order.
"""

# mypy: disable-error-code="override, assignment, attr-defined"
from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp

from allranks.torch.shared_memory.collectives import SharedMemoryGroup
from allranks.torch.shared_memory.operands import (
    check_parts,
    flat,
    is_reducible,
    listed,
    of_truth,
    operation_of,
    root_of,
    write,
)
from allranks.torch.shared_memory.posting import (
    Named,
    collective,
    gloo_group,
    untraced_methods,
)
from allranks.torch.shared_memory.work import FOR_EVER, SAYS, GroupWork, begin_event, seconds_in

LEADER = 0  # index among the ranks of a host


class StagedWork(GroupWork):
    """A call that the thread of its group makes; `tensors` are its results."""

    def __init__(self, done: Future[None], tensors: list[Tensor], seconds: float) -> None:
        super().__init__()
        self._done, self.tensors, self.seconds = done, tensors, seconds

    def wait(self, timeout: timedelta | float = FOR_EVER) -> bool:
        seconds = seconds_in(timeout) or self.seconds
        try:
            self._done.result(seconds)
        except NotYet:
            if self._done.done():
                raise
            raise RuntimeError(f"{SAYS}Timed out waiting {seconds:g} s; it goes on") from None
        return True

    def drive(self, seconds: float) -> bool:
        return self._done in wait([self._done], seconds).done

    def exception(self) -> Any:
        return self._done.exception() if self._done.done() else None

    def record(self, title: str) -> None:
        """Show it to the profiler from now on until it is over."""
        end = begin_event(title)
        self._done.add_done_callback(lambda _: end())


class _CallThread:
    """A thread that makes calls one after the other, until `end`.

    After a failure it calls `broken` and makes no more calls: the ranks of this host are out of
    step, and their collectives would not match.
    """

    def __init__(self, broken: Callable[[], object]) -> None:
        self._broken = broken
        self._error: BaseException | None = None
        self._calls = queue.SimpleQueue[tuple[Callable[[], object], Future[None]] | None]()
        name = "allranks-hierarchical"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, call: Callable[[], object]) -> Future[None]:
        done: Future[None] = Future()
        self._calls.put((call, done))
        return done

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, done = entry
            try:
                self._make(call)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            del entry, call, done  # do not keep their tensors alive until the next call

    def _make(self, call: Callable[[], object]) -> None:
        if self._error is not None:
            raise self._error
        try:
            with torch.no_grad():
                call()
        except BaseException as error:
            self._error = error
            self._broken()
            raise


class HierarchicalGroup(Named):
    """The ranks of several hosts. `hosts` are lists of ranks; `inside` is the group of this host.

    `inside` is `None` for a rank that is alone on its host.
    """

    def __init__(
        self,
        inside: SharedMemoryGroup | None,
        hosts: Sequence[Sequence[int]],
        rank: int,
        store: Any,
        timeout: timedelta,
    ) -> None:
        size = sum(len(host) for host in hosts)
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self.inside, self.hosts, self.seconds = inside, hosts, timeout.total_seconds()
        self.host = next(i for i, host in enumerate(hosts) if rank in host)
        self.my_rank, self.count = rank, size
        self._is_left, self._line = False, _CallThread(self._leave_host)
        leads = hosts[self.host][LEADER] == rank
        between, among_all = PrefixStore("leaders", store), PrefixStore("all", store)
        self.leaders: Any = None
        if leads:
            self.leaders = gloo_group(between, self.host, len(hosts), timeout)
        self.gloo = gloo_group(among_all, rank, size, timeout)

    def _leave_host(self) -> None:
        """Leave the group of this host, so that its other ranks get an error."""
        if self.inside is not None:
            self.inside.shutdown()

    def _staged(self, call: Callable[[], object], tensors: list[Tensor]) -> StagedWork:
        return StagedWork(self._line.add(call), tensors, self.seconds)

    def _broadcast_in_host(self, tensor: Tensor, root: int = LEADER) -> None:
        """Broadcast from `root` to the ranks of this host."""
        if self.inside is not None:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self.inside.broadcast([tensor], options).wait()

    @collective("all_reduce", 1, c10d.AllreduceOptions)
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        tensors, operation = listed(tensors), operation_of(opts)
        if len(tensors) != 1 or not is_reducible(tensors[0], operation):
            return self.gloo.allreduce(tensors, opts)
        return self._staged(partial(self._sum, tensors[0], operation), tensors)

    def _sum(self, tensor: Tensor, operation: str) -> None:
        memory = flat(tensor)
        if memory.dtype == torch.bool:
            memory, operation = memory.view(torch.uint8), of_truth(operation)
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(ReduceOp, {"mean": "SUM"}.get(operation, operation.upper()))
        if self.inside is not None:
            self.inside.allreduce([memory], options).wait()
        if self.leaders is not None and memory.numel():
            real = torch.view_as_real(memory) if memory.is_complex() else memory
            self.leaders.allreduce([real], options).wait()
        self._broadcast_in_host(memory)
        if operation == "mean":
            memory.div_(self.count)
        if memory.data_ptr() != tensor.data_ptr():
            write(tensor, memory.view(tensor.dtype))

    @collective("broadcast", 1, c10d.BroadcastOptions)
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        tensors, root = listed(tensors), root_of(opts, self.count)
        if len(tensors) != 1:
            return self.gloo.broadcast(tensors, opts)
        return self._staged(partial(self._broadcast, tensors[0], root), tensors)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        memory = flat(tensor)
        host = next(i for i, ranks in enumerate(self.hosts) if root in ranks)
        if host == self.host:
            self._broadcast_in_host(memory, self.hosts[host].index(root))
        if self.leaders is not None and memory.nbytes:
            options = dist.BroadcastOptions()
            options.rootRank = host
            self.leaders.broadcast([memory.view(-1).view(torch.uint8)], options).wait()
        if host != self.host:
            self._broadcast_in_host(memory)
        if memory.data_ptr() != tensor.data_ptr():
            write(tensor, memory)

    @collective("barrier", 0, c10d.BarrierOptions)
    def barrier(self, opts: Any) -> Any:
        came = torch.zeros(1)
        return self._staged(partial(self._sum, came, "sum"), [])

    @collective("_all_gather_base", 2, c10d.AllgatherOptions)
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        gather = partial(self._gather, output.view(self.count, -1), input)
        return self._staged(gather, [output])

    @collective("all_gather", 2, c10d.AllgatherOptions)
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(inputs) != 1:
            return self.gloo.allgather(outputs, inputs, opts)
        (wholes,), (part,) = outputs, inputs
        check_parts("all_gather", wholes, part, self.count)

        def gather() -> None:
            rows = part.new_empty(self.count, part.numel())
            self._gather(rows, part)
            for whole, row in zip(wholes, rows, strict=True):
                write(whole, row)

        return self._staged(gather, list(wholes))

    def _gather(self, rows: Tensor, part: Tensor) -> None:
        """Gather `part` of rank r into `rows[r]`; hosts may have different numbers of ranks."""
        part = flat(part).view(-1)
        most = max(len(host) for host in self.hosts)
        mine = part.new_zeros(most, part.numel())
        rows_of_host = mine[: len(self.hosts[self.host])]
        if self.inside is not None:
            self.inside._allgather_base(rows_of_host.view(-1), part).wait()
        else:
            rows_of_host[0] = part
        every = part.new_empty(len(self.hosts), most, part.numel())
        if self.leaders is not None and part.nbytes:
            bytes_of = [host.reshape(-1).view(torch.uint8) for host in every]
            self.leaders.allgather([bytes_of], [mine.view(-1).view(torch.uint8)]).wait()
        self._broadcast_in_host(every)
        for host, ranks in enumerate(self.hosts):
            for index, rank in enumerate(ranks):
                rows[rank].copy_(every[host, index])

    def _way_to(self, rank: int) -> tuple[Any, int]:
        """The group for messages with a rank, and its rank in that group."""
        host = self.hosts[self.host]
        if self.inside is not None and rank in host:
            return self.inside, host.index(rank)
        return self.gloo, rank

    @collective("send", 3)
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        group, to = self._way_to(dstRank)
        return group.send(tensors, to, tag)

    @collective("recv", 3)
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        group, source = self._way_to(srcRank)
        return group.recv(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        raise RuntimeError(
            f"{SAYS}a message of any rank may come through memory or over the network, and this "
            "group waits for one of them: name the rank that sends"
        )

    def set_timeout(self, timeout: timedelta | float) -> None:
        self.seconds = seconds_in(timeout)
        for group in (self.inside, self.leaders, self.gloo):
            if group is not None:
                group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        if self._is_left:
            return
        self._is_left = True
        self._line.end()
        self._leave_host()
        self.leaders = self.gloo = None

    def abort(self) -> None:
        self.shutdown()


def _of_gloo(name: str) -> Callable[..., Any]:
    def call(self: HierarchicalGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.gloo, name)(*args, **kwargs)

    return call


OF_GLOO = (
    *("allreduce_coalesced", "reduce", "allgather_coalesced", "gather", "scatter"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "monitored_barrier"),
)
for _name in OF_GLOO:
    if hasattr(dist.ProcessGroup, _name):  # torch renames them from version to version
        setattr(HierarchicalGroup, _name, _of_gloo(_name))
if hasattr(dist.ProcessGroup, "all_gather_single"):  # since torch 2.13
    HierarchicalGroup.all_gather_single = HierarchicalGroup._allgather_base
for _class in (StagedWork, HierarchicalGroup):
    untraced_methods(_class)
