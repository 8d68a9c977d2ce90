"""A process group of torch whose ranks share a host: its collectives run in memory they all map.

Torch calls it like Gloo, from Python and from C++: `dist`, DDP, FSDP2, DTensor, pipelining. It does
so with more forms of arguments than its declarations allow. Tensors which are not contiguous are
copied; complex numbers are two real ones; booleans are summed by `or`. What the library lacks
(bitwise operations, sparse tensors, means of integers) goes to a Gloo group of the same ranks,
created at its first use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from allranks.torch.shared_memory.operands import (
    PostedCall,
    are_reducible,
    check_parts,
    codes,
    in_one_piece,
    is_reducible,
    listed,
    numbers_in,
    operation_of,
    overlap,
    root_of,
    write,
)
from allranks.torch.shared_memory.posting import Named, Posting, collective, untraced_methods
from allranks.torch.shared_memory.work import SAYS, GroupWork, SharedMemoryWork, seconds_in

# mypy: disable-error-code="override, assignment, attr-defined"


OUR_TAGS = 1 << 61
ANY_RANK = -1


class SharedMemoryGroup(Posting):
    """The methods have torch's signatures: lists of tensors, one per device, so of length one.

    Longer lists go to Gloo, which adds them up or refuses.
    """

    _turn = 0
    """The number of collectives of this group so far which are made of messages."""

    @collective("all_reduce", 1, c10d.AllreduceOptions)
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        tensors, operation = listed(tensors), operation_of(opts)
        if len(tensors) != 1 or not is_reducible(tensors[0], operation):
            return self.gloo().allreduce(tensors, opts)
        call = PostedCall()
        self._sum_into(call, tensors[0], operation)
        return self._posted(call, tensors, opts)

    @collective("allreduce_coalesced", 1, c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        tensors, operation = listed(tensors), operation_of(opts)
        if not are_reducible(tensors, operation):
            return self.gloo().allreduce_coalesced(tensors, opts)
        call = PostedCall(copies=overlap(tensors))
        for tensor in tensors:
            self._sum_into(call, tensor, operation)
        return self._posted(call, tensors, opts)

    @collective("reduce", 1, c10d.ReduceOptions)
    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Only the root's tensor becomes the sum; others keep their values."""
        tensors, operation = listed(tensors), operation_of(opts)
        if len(tensors) != 1 or not is_reducible(tensors[0], operation):
            return self.gloo().reduce(tensors, opts)
        call, (tensor,) = PostedCall(), tensors
        if self.my_rank == root_of(opts, self.count):
            self._sum_into(call, tensor, operation)
        else:
            target = call.scratch(tensor, tensor.numel())
            self._sum(call, call.source(tensor), target, operation)
        return self._posted(call, tensors, opts)

    def _sum_into(self, call: PostedCall, tensor: Tensor, operation: str) -> None:
        memory = call.target(tensor, reads=True)
        self._sum(call, memory, memory, operation)

    def _sum(self, call: PostedCall, source: Tensor, target: Tensor, operation: str) -> None:
        if count := numbers_in(source):
            kinds = codes(self.library, source, operation)
            addresses = source.data_ptr(), target.data_ptr()
            call.ops.append(self.library_group.all_reduce(*addresses, count, *kinds))

    @collective("broadcast", 1, c10d.BroadcastOptions)
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        tensors, root, call = listed(tensors), root_of(opts, self.count), PostedCall()
        if len(tensors) != 1:
            return self.gloo().broadcast(tensors, opts)
        memory = call.source(tensors[0]) if self.my_rank == root else call.target(tensors[0])
        if nbytes := memory.nbytes:
            call.ops.append(self.library_group.broadcast(memory.data_ptr(), nbytes, root))
        return self._posted(call, tensors, opts)

    @collective("_all_gather_base", 2, c10d.AllgatherOptions)
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        return self._gathered([output], [input], opts)

    @collective("allgather_into_tensor_coalesced", 2, c10d.AllgatherOptions)
    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._gathered(outputs, inputs, opts)

    def _gathered(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        call = PostedCall(copies=self._must_copy(outputs, inputs))
        for whole, part in zip(outputs, inputs, strict=True):
            self._check_cut(whole, part)
            self._gather(call, call.target(whole), part)
        return self._posted(call, list(outputs), opts)

    @collective("all_gather", 2, c10d.AllgatherOptions)
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if isinstance(inputs, Tensor):  # torch also has a short form
            outputs, inputs = [outputs], [inputs]
        return self._gather_lists(outputs, inputs, opts)

    @collective("all_gather", 2, c10d.AllgatherOptions)
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """`outputs` has one list per rank: the tensors of that rank."""
        return self._gather_lists(list(zip(*outputs, strict=True)), inputs, opts)

    def _gather_lists(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if len(inputs) == 1:
            (wholes,), (part,) = outputs, inputs
            check_parts("all_gather", wholes, part, self.count)
            memory = in_one_piece(wholes)
            if memory is not None and part.is_contiguous() and self._fits(memory, part):
                call = PostedCall(keep_alive=[memory, wholes])
                self._gather(call, memory, part)
                return self._posted(call, list(wholes), opts)
        gathered, others = list[Tensor](), list[Tensor]()
        for wholes, part in zip(outputs, inputs, strict=True):
            check_parts("all_gather", wholes, part, self.count)
            gathered += wholes
            if wholes[self.my_rank].data_ptr() != part.data_ptr():
                others.append(part)
        call = PostedCall(copies=overlap(gathered, others))
        for wholes, part in zip(outputs, inputs, strict=True):
            if part.nbytes:
                self._gather(call, call.joint_target(wholes), part)
        return self._posted(call, gathered, opts)

    def _must_copy(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> bool:
        """Whether tensors overlap, apart from a part in its own place of its whole."""
        if len(parts) == 1 and parts[0].is_contiguous() and wholes[0].is_contiguous():
            return not self._fits(wholes[0], parts[0])
        others = [
            part
            for whole, part in zip(wholes, parts, strict=True)
            if part.data_ptr() != whole.data_ptr() + self.my_rank * part.nbytes
        ]
        return overlap(wholes, others)

    def _fits(self, whole: Tensor, part: Tensor) -> bool:
        """Whether a contiguous part is outside its whole, or in its own place of it.

        `whole` is contiguous from its first element, and as long as the parts of all ranks.
        """
        begin, nbytes = part.data_ptr() - whole.data_ptr(), part.nbytes
        return not -nbytes < begin < nbytes * self.count or begin == self.my_rank * nbytes

    def _gather(self, call: PostedCall, whole: Tensor, part: Tensor) -> None:
        if nbytes := part.nbytes:
            addresses = call.source(part).data_ptr(), whole.data_ptr()
            call.ops.append(self.library_group.all_gather(*addresses, nbytes))

    @collective("_reduce_scatter_base", 2, c10d.ReduceScatterOptions)
    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        return self._reduce_scatter([output], [input], opts)

    @collective("reduce_scatter_tensor_coalesced", 2, c10d.ReduceScatterOptions)
    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._reduce_scatter(outputs, inputs, opts)

    def _reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        operation = operation_of(opts)
        if not are_reducible(inputs, operation):
            return self.gloo().reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        call = PostedCall(copies=self._must_copy(inputs, outputs))
        for part, whole in zip(outputs, inputs, strict=True):
            self._check_cut(whole, part)
            self._sum_cut(call, part, call.source(whole), operation)
        return self._posted(call, list(outputs), opts)

    @collective("reduce_scatter", 2, c10d.ReduceScatterOptions)
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Each rank has one input per rank; the sizes may differ."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        operation = operation_of(opts)
        every = [tensor for parts in inputs for tensor in parts]
        if not are_reducible(every, operation):
            return self.gloo().reduce_scatter(outputs, inputs, opts)
        call = PostedCall()
        if overlap(outputs, every):  # inputs are only read, so they may overlap each other
            call.copies = overlap(outputs) or any(overlap([t], outputs) for t in every)
        for part, parts in zip(outputs, inputs, strict=True):
            sizes = [t.numel() for t in parts]
            whole = call.joint_source(parts)
            if len(set(sizes)) == 1:
                self._sum_cut(call, part, whole, operation)
            else:
                sums = call.scratch(part, sum(sizes))
                self._sum(call, call.joint_source([*parts, part[:0]]), sums, operation)
                call.afterwards.append(partial(write, part, sums.split(sizes)[self.my_rank]))
        return self._posted(call, list(outputs), opts)

    def _sum_cut(self, call: PostedCall, part: Tensor, whole: Tensor, operation: str) -> None:
        if count := numbers_in(part):
            addresses = whole.data_ptr(), call.target(part).data_ptr()
            kinds = codes(self.library, part, operation)
            call.ops.append(self.library_group.reduce_scatter(*addresses, count, *kinds))

    def _check_cut(self, whole: Tensor, part: Tensor) -> None:
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self.count:
            raise RuntimeError(
                f"{self.count} ranks have {part.numel()} values of {part.dtype} each, "
                f"and all together {whole.numel()} of {whole.dtype}"
            )

    @collective("barrier", 0, c10d.BarrierOptions)
    def barrier(self, opts: Any) -> Any:
        return self._posted(PostedCall([self.library_group.barrier()]), [], opts)

    # --- messages -------------------------------------------------------------------------
    # A message of the user has the user's tag. A collective made of messages has a tag outside the
    # user's range, from a count of such collectives: all ranks of a group make them in one order.

    @collective("send", 3)
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        (tensor,), call = listed(tensors), PostedCall()
        self._send(call, tensor, dstRank, tag, even_nothing=True)
        return self._posted(call, [tensor])

    @collective("recv", 3)
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        (tensor,), call = listed(tensors), PostedCall()
        self._receive(call, tensor, srcRank, tag, even_nothing=True)
        return self._posted(call, [tensor])

    @collective("recvAnySource", 2)
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        (tensor,), call = listed(tensors), PostedCall()
        self._receive(call, tensor, ANY_RANK, tag, even_nothing=True)
        return self._posted(call, [tensor])

    def _send(
        self, call: PostedCall, tensor: Tensor, to: int, tag: int, *, even_nothing: bool = False
    ) -> None:
        memory = call.source(tensor)
        if memory.nbytes or even_nothing:
            address = memory.data_ptr()
            call.ops.append(self.library_group.send(address, memory.nbytes, to, tag))

    def _receive(
        self, call: PostedCall, tensor: Tensor, source: int, tag: int, *, even_nothing: bool = False
    ) -> None:
        memory = call.target(tensor)
        if memory.nbytes or even_nothing:
            address = memory.data_ptr()
            call.ops.append(self.library_group.receive(address, memory.nbytes, source, tag))

    def _tag_of_turn(self) -> int:
        with self._lock:
            self._turn += 1
            return OUR_TAGS + self._turn

    def _exchange(self, call: PostedCall, into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Send `values[r]` to rank r, and receive its tensor for this rank into `into[r]`."""
        tag = self._tag_of_turn()
        for distance in range(1, self.count):  # each begins with its neighbour, to spread the load
            source = (self.my_rank - distance) % self.count
            self._receive(call, into[source], source, tag)
            to = (self.my_rank + distance) % self.count
            self._send(call, values[to], to, tag)
        write(into[self.my_rank], values[self.my_rank])

    @collective("all_to_all", 2, c10d.AllToAllOptions)
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        if not len(output_tensors) == len(input_tensors) == self.count:
            raise RuntimeError(f"all_to_all: one tensor for each of {self.count} ranks")
        call = PostedCall(copies=any(overlap([t], output_tensors) for t in input_tensors))
        sources = [call.source(tensor) for tensor in input_tensors]
        self._exchange(call, output_tensors, sources)
        return self._posted(call, list(output_tensors), opts)

    @collective("all_to_all", 4, c10d.AllToAllOptions)
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> Any:
        """Split along the first dimension: evenly, or by the sizes."""
        whole = PostedCall(copies=overlap([output], [input]))
        target, source, call = whole.target(output), whole.source(input), PostedCall()
        targets = self._cut(target, output_split_sizes)
        self._exchange(call, targets, self._cut(source, input_split_sizes))
        call.keep_alive += whole.keep_alive
        call.afterwards += whole.afterwards
        return self._posted(call, [output], opts)

    def _cut(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        rows = tensor.size(0) if tensor.dim() else 1
        sizes = list(sizes) or [rows // self.count] * self.count
        if len(sizes) != self.count or sum(sizes) != rows:
            raise RuntimeError(
                f"all_to_all: {rows} rows, and sizes {sizes} for {self.count} ranks: each rank has "
                "one, and together they are all rows"
            )
        return list(tensor.split(sizes)) if tensor.dim() else [tensor]

    @collective("gather", 2, c10d.GatherOptions)
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        """The root has one tensor per rank in `output_tensors[0]`; the others have none."""
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        (part,), root, tag = input_tensors, root_of(opts, self.count), self._tag_of_turn()
        call = PostedCall()
        if self.my_rank != root:
            self._send(call, part, root, tag)
            return self._posted(call, [], opts)
        (wholes,) = output_tensors
        check_parts("gather", wholes, part, self.count)
        is_there = wholes[root].data_ptr() == part.data_ptr()
        call.copies = overlap(wholes, [] if is_there else [part])
        for rank, whole in enumerate(wholes):
            if rank != root:
                self._receive(call, whole, rank, tag)
            elif call.copies:
                call.afterwards.append(partial(write, whole, part.clone()))
            else:
                write(whole, part)
        return self._posted(call, list(wholes), opts)

    @collective("scatter", 2, c10d.ScatterOptions)
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        """The root has one tensor per rank in `input_tensors[0]`; the others have none."""
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        (part,), root, tag = output_tensors, root_of(opts, self.count), self._tag_of_turn()
        call = PostedCall()
        if self.my_rank != root:
            self._receive(call, part, root, tag)
            return self._posted(call, [part], opts)
        (parts,) = input_tensors
        check_parts("scatter", parts, part, self.count)
        call.copies = any(overlap([part], [tensor]) for tensor in parts)
        for rank, tensor in enumerate(parts):
            if rank != root:
                self._send(call, tensor, rank, tag)
        write(part, parts[root])
        return self._posted(call, [part], opts)

    @collective("monitored_barrier", 0)
    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when all ranks arrived; rank 0 raises and names the first, or all, missing ones.

        Its errors begin like those of Gloo: scripts look for these words.
        """
        seconds = self.seconds if timeout is None else seconds_in(timeout)
        came, tag = torch.zeros(1, dtype=torch.uint8), self._tag_of_turn()
        if self.my_rank != 0:
            self._report_arrival(came, tag, seconds)
            return
        self._await_all(came, tag, seconds, wait_all_ranks)
        call = PostedCall()
        for rank in range(1, self.count):
            self._send(call, came, rank, tag)
        self._posted(call, []).wait()

    def _await_all(self, came: Tensor, tag: int, seconds: float, wait_all_ranks: bool) -> None:
        """On rank 0: wait for each other rank in order, until the timeout."""
        until, missing = time.monotonic() + seconds, list[int]()
        took = f"{seconds * 1000:g} ms"
        for rank in range(1, self.count):
            call = PostedCall()
            self._receive(call, came, rank, tag)
            work, remaining = self._posted(call, []), until - time.monotonic()
            if work.drive(max(0.0, remaining)):
                if (error := work.exception()) is None:
                    continue
                lost = getattr(error, "job_rank", self.ranks[rank])  # and the whole group with it
                error.args = (f"{SAYS}Rank {lost} failed to pass monitoredBarrier: {error}",)
                raise error
            if remaining <= 0 and not wait_all_ranks:
                there = ", ".join(str(self.ranks[peer]) for peer in range(1, rank)) or "none"
                raise RuntimeError(
                    f"{SAYS}Rank {self.ranks[0]} timed out in monitoredBarrier after {took}: "
                    f"of the other ranks came {there}"
                )
            missing.append(rank)
            if not wait_all_ranks:
                break
        if missing:
            names = ", ".join(str(self.ranks[rank]) for rank in missing)
            ranks = "Ranks" if wait_all_ranks else "Rank"  # as Gloo names them
            raise RuntimeError(
                f"{SAYS}{ranks} {names} failed to pass monitoredBarrier in {took}: Timed out"
            )

    def _report_arrival(self, came: Tensor, tag: int, seconds: float) -> None:
        """Report to rank 0, and wait for its reply that all arrived."""
        call = PostedCall()
        self._send(call, came, 0, tag)
        self._receive(call, came.clone(), 0, tag)
        try:
            self._posted(call, []).wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            my_rank, root = self.ranks[self.my_rank], self.ranks[0]
            error.args = (
                f"{SAYS}Rank {my_rank} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank {root}: {error}",
            )
            raise

    if hasattr(dist.ProcessGroup, "all_gather_single"):  # since torch 2.13
        all_gather_single = _allgather_base
        all_gather_single_coalesced = allgather_into_tensor_coalesced
        reduce_scatter_single = _reduce_scatter_base
        reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
        all_to_all_single = alltoall_base


for _class in (GroupWork, SharedMemoryWork, Named, Posting, SharedMemoryGroup):
    untraced_methods(_class)
