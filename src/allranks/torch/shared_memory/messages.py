"""Sends and receives of a shared-memory group, and the collectives that are made of them.

A message of the user carries the user's tag. A collective that is made of messages takes a tag that
no user has, and that counts such collectives: all ranks of a group make them in one order.

Torch's own declarations of these methods are narrower than what it calls them with.
"""

# mypy: disable-error-code="override, assignment, attr-defined"
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
    Call,
    check_parts,
    listed,
    overlap,
    root_of,
    seconds_in,
    write,
)
from allranks.torch.shared_memory.posting import Posting, collective
from allranks.torch.shared_memory.work import SAYS

OUR_TAGS = 1 << 61
ANY_RANK = -1


class Messages(Posting):
    """`_turn` counts the collectives of this group that are made of messages."""

    _turn = 0

    @collective("send", 3)
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        (tensor,), call = listed(tensors), Call()
        self._send(call, tensor, dstRank, tag, even_nothing=True)
        return self._posted(call, [tensor])

    @collective("recv", 3)
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        (tensor,), call = listed(tensors), Call()
        self._receive(call, tensor, srcRank, tag, even_nothing=True)
        return self._posted(call, [tensor])

    @collective("recvAnySource", 2)
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        (tensor,), call = listed(tensors), Call()
        self._receive(call, tensor, ANY_RANK, tag, even_nothing=True)
        return self._posted(call, [tensor])

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

    def _exchange(self, call: Call, taken: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Send each of `given` to the rank of its place, and fill `taken` by what they send."""
        tag = self._tag_of_turn()
        for distance in range(1, self.count):  # all begin with the next: none is asked by all
            source = (self.own - distance) % self.count
            self._receive(call, taken[source], source, tag)
            to = (self.own + distance) % self.count
            self._send(call, given[to], to, tag)
        write(taken[self.own], given[self.own])

    @collective("all_to_all", 2, c10d.AllToAllOptions)
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        if not len(output_tensors) == len(input_tensors) == self.count:
            raise RuntimeError(f"all_to_all: one tensor for each of {self.count} ranks")
        call = Call(copies=any(overlap([one], output_tensors) for one in input_tensors))
        given = [call.given(tensor) for tensor in input_tensors]
        self._exchange(call, output_tensors, given)
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
        """Cut along the first dimension: evenly, or as the sizes say."""
        whole = Call(copies=overlap([output], [input]))
        target, source, call = whole.taken(output), whole.given(input), Call()
        taken = self._cut(target, output_split_sizes)
        self._exchange(call, taken, self._cut(source, input_split_sizes))
        call.kept += whole.kept
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
        call = Call()
        if self.own != root:
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
        call = Call()
        if self.own != root:
            self._receive(call, part, root, tag)
            return self._posted(call, [part], opts)
        (parts,) = input_tensors
        check_parts("scatter", parts, part, self.count)
        call.copies = any(overlap([part], [one]) for one in parts)
        for rank, one in enumerate(parts):
            if rank != root:
                self._send(call, one, rank, tag)
        write(part, parts[root])
        return self._posted(call, [part], opts)

    @collective("monitored_barrier", 0)
    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when all ranks came; rank 0 raises and names the first, or all, that did not.

        Its errors begin as those of Gloo do: scripts look for these words.
        """
        seconds = self.seconds if timeout is None else seconds_in(timeout)
        came, tag = torch.zeros(1, dtype=torch.uint8), self._tag_of_turn()
        if self.own != 0:
            self._come(came, tag, seconds)
            return
        self._await_all(came, tag, seconds, wait_all_ranks)
        call = Call()
        for rank in range(1, self.count):
            self._send(call, came, rank, tag)
        self._posted(call, []).wait()

    def _await_all(self, came: Tensor, tag: int, seconds: float, wait_all_ranks: bool) -> None:
        """Rank 0 hears of each other one, the first to the last, until the time is up."""
        until, missing = time.monotonic() + seconds, list[int]()
        took = f"{seconds * 1000:g} ms"
        for rank in range(1, self.count):
            call = Call()
            self._receive(call, came, rank, tag)
            work, remaining = self._posted(call, []), until - time.monotonic()
            if work.drive(max(0.0, remaining)):
                if (error := work.exception()) is None:
                    continue
                lost = getattr(error, "job_rank", self.ranks[rank])  # and the whole group with it
                error.args = (f"{SAYS}Rank {lost} failed to pass monitoredBarrier: {error}",)
                raise error
            if remaining <= 0 and not wait_all_ranks:
                there = ", ".join(str(self.ranks[one]) for one in range(1, rank)) or "none"
                raise RuntimeError(
                    f"{SAYS}Rank {self.ranks[0]} timed out in monitoredBarrier after {took}: "
                    f"of the other ranks came {there}"
                )
            missing.append(rank)
            if not wait_all_ranks:
                break
        if missing:
            names = ", ".join(str(self.ranks[rank]) for rank in missing)
            ranks = "Ranks" if len(missing) > 1 else "Rank"
            raise RuntimeError(
                f"{SAYS}{ranks} {names} failed to pass monitoredBarrier in {took}: Timed out"
            )

    def _come(self, came: Tensor, tag: int, seconds: float) -> None:
        """Tell rank 0, and hear from it that all came."""
        call = Call()
        self._send(call, came, 0, tag)
        self._receive(call, came.clone(), 0, tag)
        try:
            self._posted(call, []).wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            own, root = self.ranks[self.own], self.ranks[0]
            error.args = (
                f"{SAYS}Rank {own} successfully reached monitoredBarrier, but received errors "
                f"while waiting for send/recv from rank {root}: {error}",
            )
            raise

    if hasattr(dist.ProcessGroup, "all_to_all_single"):  # since torch 2.13
        all_to_all_single = alltoall_base
