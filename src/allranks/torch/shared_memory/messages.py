"""Sends and receives of a shared-memory group, and the collectives that are made of them.

A message of the user carries the user's tag. A collective that is made of messages takes a tag that
no user has, and that counts such collectives: all ranks of a group make them in one order.

Torch's own declarations of these methods are narrower than what it calls them with.
"""

# mypy: disable-error-code="override, assignment"
from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from allranks.torch.shared_memory.operands import Call, flat, listed, root_of
from allranks.torch.shared_memory.posting import Posting
from allranks.torch.shared_memory.work import SAYS

OUR_TAGS = 1 << 61
ANY_RANK = -1


class Messages(Posting):
    """`_turn` counts the collectives of this group that are made of messages."""

    _turn = 0

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        (tensor,), call = listed(tensors), Call()
        self._send(call, tensor, dstRank, tag, even_nothing=True)
        return self._posted(call, [tensor])

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        (tensor,), call = listed(tensors), Call()
        self._receive(call, tensor, srcRank, tag, even_nothing=True)
        return self._posted(call, [tensor])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self.recv(tensors, ANY_RANK, tag)

    def _send(
        self, call: Call, tensor: Tensor, to: int, tag: int, *, even_nothing: bool = False
    ) -> None:
        memory = call.given(tensor)
        if memory.nbytes or even_nothing:
            address = memory.data_ptr()
            call.ops.append(self.library_group.send(address, memory.nbytes, to, tag))

    def _receive(
        self, call: Call, tensor: Tensor, source: int, tag: int, *, even_nothing: bool = False
    ) -> None:
        memory = call.taken(tensor)
        if memory.nbytes or even_nothing:
            address = memory.data_ptr()
            call.ops.append(self.library_group.receive(address, memory.nbytes, source, tag))

    def _tag_of_turn(self) -> int:
        with self._lock:
            self._turn += 1
            return OUR_TAGS + self._turn

    def _exchange(self, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Call:
        """Send each of `given` to the rank of its place, and fill `taken` by what they send."""
        call, tag = Call(), self._tag_of_turn()
        taken[self.own].detach().copy_(given[self.own])
        for distance in range(1, self.count):  # all begin with the next: none is asked by all
            source = (self.own - distance) % self.count
            self._receive(call, taken[source], source, tag)
            to = (self.own + distance) % self.count
            self._send(call, given[to], to, tag)
        return call

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        if not len(output_tensors) == len(input_tensors) == self.count:
            raise RuntimeError(f"all_to_all: one tensor for each of {self.count} ranks")
        call = self._exchange(output_tensors, input_tensors)
        return self._posted(call, list(output_tensors), opts)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Cut along the first dimension: evenly, or as the sizes say."""
        whole = Call()
        target, source = whole.taken(output), flat(input)
        taken = self._cut(target, output_split_sizes)
        call = self._exchange(taken, self._cut(source, input_split_sizes))
        call.kept += [whole.kept, source]
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

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """The root has one tensor per rank in `output_tensors[0]`; the others have none."""
        (part,), root = listed(input_tensors), root_of(opts)
        call, tag = Call(), self._tag_of_turn()
        if self.own != root:
            self._send(call, part, root, tag)
            return self._posted(call, [], opts)
        (wholes,) = output_tensors
        for rank, whole in enumerate(wholes):
            if rank == root:
                whole.detach().copy_(part)
            else:
                self._receive(call, whole, rank, tag)
        return self._posted(call, list(wholes), opts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """The root has one tensor per rank in `input_tensors[0]`; the others have none."""
        (part,), root = listed(output_tensors), root_of(opts)
        call, tag = Call(), self._tag_of_turn()
        if self.own != root:
            self._receive(call, part, root, tag)
            return self._posted(call, [part], opts)
        (parts,) = input_tensors
        for rank, one in enumerate(parts):
            if rank == root:
                part.detach().copy_(one)
            else:
                self._send(call, one, rank, tag)
        return self._posted(call, [part], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when all ranks came; rank 0 raises and names the first, or all, that did not."""
        patience = timeout or timedelta(seconds=self.seconds)
        came, tag = torch.zeros(1, dtype=torch.uint8), self._tag_of_turn()
        if self.own != 0:
            self._told(came, 0, tag, patience)
            return
        missing: list[int] = []
        for rank in range(1, self.count):
            call = Call()
            self._receive(call, came, rank, tag)
            if not self._posted(call, []).drive(0 if missing else patience.total_seconds()):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            names = ", ".join(str(self.ranks[rank]) for rank in missing)
            raise RuntimeError(
                f"{SAYS}timed out: ranks {names} did not come to the barrier within "
                f"{patience.total_seconds():g} s"
            )
        call = Call()
        for rank in range(1, self.count):
            self._send(call, came, rank, tag)
        self._posted(call, []).wait()

    def _told(self, came: Tensor, root: int, tag: int, patience: timedelta) -> None:
        call = Call()
        self._send(call, came, root, tag)
        self._receive(call, came.clone(), root, tag)
        self._posted(call, []).wait(patience)

    if hasattr(dist.ProcessGroup, "all_to_all_single"):  # since torch 2.13
        all_to_all_single = alltoall_base
