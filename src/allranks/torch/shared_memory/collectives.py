"""The collectives of a shared-memory group that all ranks make alike: sums, copies, barriers.

Torch's own declarations of these methods are narrower than what it calls them with.
"""

# mypy: disable-error-code="override, assignment"
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from allranks.torch.shared_memory.operands import (
    Call,
    codes,
    is_reducible,
    listed,
    numbers_in,
    operation_of,
    root_of,
)
from allranks.torch.shared_memory.posting import Posting


class Collectives(Posting):
    """Methods as torch calls them: lists of tensors, one per device, hence of one."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, operation = listed(tensors), operation_of(opts)
        if not all(is_reducible(tensor, operation) for tensor in tensors):
            return self.gloo().allreduce(tensors, opts)
        call = Call()
        for tensor in tensors:
            self._sum_into(call, tensor, operation)
        return self._posted(call, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        if not all(is_reducible(tensor, operation_of(opts)) for tensor in tensors):
            return self.gloo().allreduce_coalesced(tensors, opts)
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """The sum lies in the `tensors` of the root alone; the others keep their values."""
        tensors, operation = listed(tensors), operation_of(opts)
        if not all(is_reducible(tensor, operation) for tensor in tensors):
            return self.gloo().reduce(tensors, opts)
        call = Call()
        for tensor in tensors:
            if self.own == root_of(opts):
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

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors, root, call = listed(tensors), root_of(opts), Call()
        for tensor in tensors:
            memory = call.given(tensor) if self.own == root else call.taken(tensor)
            if nbytes := memory.nbytes:
                address = memory.data_ptr()
                call.ops.append(self.library_group.broadcast(address, nbytes, root))
        return self._posted(call, tensors, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        call = Call()
        for whole, part in zip(outputs, inputs, strict=True):
            self._check_cut(whole, part)
            self._gather(call, call.taken(whole), part)
        return self._posted(call, list(outputs), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, Tensor):  # torch has a short form, too
            outputs, inputs = [outputs], [inputs]
        call = Call()
        for wholes, part in zip(outputs, inputs, strict=True):
            self._gather_apart(call, wholes, part)
        return self._posted(call, [tensor for wholes in outputs for tensor in wholes], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """`outputs` has one list per rank: what that rank gave, tensor by tensor."""
        call = Call()
        for index, part in enumerate(inputs):
            self._gather_apart(call, [of_rank[index] for of_rank in outputs], part)
        return self._posted(call, [tensor for of_rank in outputs for tensor in of_rank], opts)

    def _gather(self, call: Call, whole: Tensor, part: Tensor) -> None:
        if nbytes := part.nbytes:
            addresses = call.given(part).data_ptr(), whole.data_ptr()
            call.ops.append(self.library_group.all_gather(*addresses, nbytes))

    def _gather_apart(self, call: Call, wholes: Sequence[Tensor], part: Tensor) -> None:
        if len(wholes) != self.count or any(one.nbytes != part.nbytes for one in wholes):
            sizes = [one.numel() for one in wholes]
            raise RuntimeError(
                f"all_gather: {self.count} ranks give {part.numel()} values each, "
                f"and what takes them has {sizes}"
            )
        if part.nbytes:
            self._gather(call, call.apart(wholes), part)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        operation, call = operation_of(opts), Call()
        if not all(is_reducible(tensor, operation) for tensor in inputs):
            return self.gloo().reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        for part, whole in zip(outputs, inputs, strict=True):
            self._check_cut(whole, part)
            self._sum_cut(call, part, call.given(whole), operation)
        return self._posted(call, list(outputs), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Each rank gives one tensor per rank; they may be of several sizes."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        operation, call = operation_of(opts), Call()
        if not all(is_reducible(tensor, operation) for parts in inputs for tensor in parts):
            return self.gloo().reduce_scatter(outputs, inputs, opts)
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

    def barrier(self, opts: Any = None) -> Any:
        return self._posted(Call([self.library_group.barrier()]), [], opts)

    if hasattr(dist.ProcessGroup, "all_gather_single"):  # since torch 2.13
        all_gather_single = _allgather_base
        all_gather_single_coalesced = allgather_into_tensor_coalesced
        reduce_scatter_single = _reduce_scatter_base
        reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _copying(to: Tensor, values: Tensor) -> Callable[[], object]:
    return lambda: to.detach().copy_(values.view(to.shape))
