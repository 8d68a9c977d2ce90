"""The collectives of a shared-memory group that all ranks make alike: sums, copies, barriers.

Torch's own declarations of these methods are narrower than what it calls them with.
"""

# mypy: disable-error-code="override, assignment, attr-defined"
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from allranks.torch.shared_memory.operands import (
    Call,
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
from allranks.torch.shared_memory.posting import Posting, collective


class Collectives(Posting):
    """Methods as torch calls them: lists of tensors, one per device, hence of one.

    A list of several, where torch takes none per call, goes to Gloo, which adds them up or refuses.
    """

    @collective("all_reduce", 1, c10d.AllreduceOptions)
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        tensors, operation = listed(tensors), operation_of(opts)
        if len(tensors) != 1 or not is_reducible(tensors[0], operation):
            return self.gloo().allreduce(tensors, opts)
        call = Call()
        self._sum_into(call, tensors[0], operation)
        return self._posted(call, tensors, opts)

    @collective("allreduce_coalesced", 1, c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        tensors, operation = listed(tensors), operation_of(opts)
        if not are_reducible(tensors, operation):
            return self.gloo().allreduce_coalesced(tensors, opts)
        call = Call(copies=overlap(tensors))
        for tensor in tensors:
            self._sum_into(call, tensor, operation)
        return self._posted(call, tensors, opts)

    @collective("reduce", 1, c10d.ReduceOptions)
    def reduce(self, tensors: Any, opts: Any) -> Any:
        """The sum lies in the tensor of the root alone; the others keep their values."""
        tensors, operation = listed(tensors), operation_of(opts)
        if len(tensors) != 1 or not is_reducible(tensors[0], operation):
            return self.gloo().reduce(tensors, opts)
        call, (tensor,) = Call(), tensors
        if self.own == root_of(opts, self.count):
            self._sum_into(call, tensor, operation)
        else:
            target = call.scratch(tensor, tensor.numel())
            self._sum(call, call.given(tensor), target, operation)
        return self._posted(call, tensors, opts)

    def _sum_into(self, call: Call, tensor: Tensor, operation: str) -> None:
        memory = call.taken(tensor, reads=True)
        self._sum(call, memory, memory, operation)

    def _sum(self, call: Call, source: Tensor, target: Tensor, operation: str) -> None:
        if count := numbers_in(source):
            kinds = codes(self.library, source, operation)
            addresses = source.data_ptr(), target.data_ptr()
            call.ops.append(self.library_group.all_reduce(*addresses, count, *kinds))

    @collective("broadcast", 1, c10d.BroadcastOptions)
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        tensors, root, call = listed(tensors), root_of(opts, self.count), Call()
        if len(tensors) != 1:
            return self.gloo().broadcast(tensors, opts)
        memory = call.given(tensors[0]) if self.own == root else call.taken(tensors[0])
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
        call = Call(copies=self._must_copy(outputs, inputs))
        for whole, part in zip(outputs, inputs, strict=True):
            self._check_cut(whole, part)
            self._gather(call, call.taken(whole), part)
        return self._posted(call, list(outputs), opts)

    @collective("all_gather", 2, c10d.AllgatherOptions)
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if isinstance(inputs, Tensor):  # torch has a short form, too
            outputs, inputs = [outputs], [inputs]
        return self._gathered_apart(outputs, inputs, opts)

    @collective("all_gather", 2, c10d.AllgatherOptions)
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """`outputs` has one list per rank: what that rank gave, tensor by tensor."""
        return self._gathered_apart(list(zip(*outputs, strict=True)), inputs, opts)

    def _gathered_apart(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if len(inputs) == 1:
            (wholes,), (part,) = outputs, inputs
            check_parts("all_gather", wholes, part, self.count)
            there = in_one_piece(wholes)
            if there is not None and part.is_contiguous() and self._fits(there, part):
                call = Call(kept=(there, wholes))
                self._gather(call, there, part)
                return self._posted(call, list(wholes), opts)
        every, not_own = list[Tensor](), list[Tensor]()
        for wholes, part in zip(outputs, inputs, strict=True):
            check_parts("all_gather", wholes, part, self.count)
            every += wholes
            if wholes[self.own].data_ptr() != part.data_ptr():
                not_own.append(part)
        call = Call(copies=overlap(every, not_own))
        for wholes, part in zip(outputs, inputs, strict=True):
            if part.nbytes:
                self._gather(call, call.apart(wholes), part)
        return self._posted(call, every, opts)

    def _must_copy(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> bool:
        """Whether tensors overlap, but for a part that lies at its place of its whole."""
        if len(parts) == 1 and parts[0].is_contiguous() and wholes[0].is_contiguous():
            return not self._fits(wholes[0], parts[0])
        apart = [
            part
            for whole, part in zip(wholes, parts, strict=True)
            if part.data_ptr() != whole.data_ptr() + self.own * part.nbytes
        ]
        return overlap(wholes, apart)

    def _fits(self, whole: Tensor, part: Tensor) -> bool:
        """Whether a part lies outside of its whole or at its place; both without gaps.

        `whole` begins where it does, and is as long as the parts of all ranks.
        """
        begin, nbytes = part.data_ptr() - whole.data_ptr(), part.nbytes
        return not -nbytes < begin < nbytes * self.count or begin == self.own * nbytes

    def _gather(self, call: Call, whole: Tensor, part: Tensor) -> None:
        if nbytes := part.nbytes:
            addresses = call.given(part).data_ptr(), whole.data_ptr()
            call.ops.append(self.library_group.all_gather(*addresses, nbytes))

    @collective("_reduce_scatter_base", 2, c10d.ReduceScatterOptions)
    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        return self._cut_sums([output], [input], opts)

    @collective("reduce_scatter_tensor_coalesced", 2, c10d.ReduceScatterOptions)
    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._cut_sums(outputs, inputs, opts)

    def _cut_sums(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        operation = operation_of(opts)
        if not are_reducible(inputs, operation):
            return self.gloo().reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        call = Call(copies=self._must_copy(inputs, outputs))
        for part, whole in zip(outputs, inputs, strict=True):
            self._check_cut(whole, part)
            self._sum_cut(call, part, call.given(whole), operation)
        return self._posted(call, list(outputs), opts)

    @collective("reduce_scatter", 2, c10d.ReduceScatterOptions)
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Each rank gives one tensor per rank; they may be of several sizes."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        operation = operation_of(opts)
        every = [tensor for parts in inputs for tensor in parts]
        if not are_reducible(every, operation):
            return self.gloo().reduce_scatter(outputs, inputs, opts)
        call = Call()
        if overlap(outputs, every):  # which may overlap each other: they are only read
            call.copies = overlap(outputs) or any(overlap([one], outputs) for one in every)
        for part, parts in zip(outputs, inputs, strict=True):
            sizes = [one.numel() for one in parts]
            whole = call.together(parts)
            if len(set(sizes)) == 1:
                self._sum_cut(call, part, whole, operation)
            else:
                sums = call.scratch(part, sum(sizes))
                self._sum(call, call.together([*parts, part[:0]]), sums, operation)
                call.afterwards.append(_copying(part, sums.split(sizes)[self.own]))
        return self._posted(call, list(outputs), opts)

    def _sum_cut(self, call: Call, part: Tensor, whole: Tensor, operation: str) -> None:
        if count := numbers_in(part):
            addresses = whole.data_ptr(), call.taken(part).data_ptr()
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
        return self._posted(Call([self.library_group.barrier()]), [], opts)

    if hasattr(dist.ProcessGroup, "all_gather_single"):  # since torch 2.13
        all_gather_single = _allgather_base
        all_gather_single_coalesced = allgather_into_tensor_coalesced
        reduce_scatter_single = _reduce_scatter_base
        reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _copying(to: Tensor, values: Tensor) -> Callable[[], object]:
    return lambda: write(to, values)
