"""ZeRO: every rank has the full weights, and updates only its own rows of them.

zero1   gradients are summed once a step, as in `ddp`, but each rank gets the sums of its own rows
        only; the optimizer state is sharded in the same way
zero2   the same after every backward pass, so that no rank holds all gradients

A step is reduce-scatter, update, all-gather: as many bytes as the all-reduce of `ddp`. Between
updates the model is complete, as under `ddp`. Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from allranks.catalog import REDUCERS, load
from allranks.errors import RequestError
from allranks.job.place import Placed
from allranks.strategies.card import Workload
from allranks.strategies.mesh import SHARD
from allranks.strategies.reduction_tree import Span
from allranks.strategies.shards import Shares
from allranks.torch.comm.comm import Pending
from allranks.torch.data.batch import Batch, Leaf
from allranks.torch.model.reals import reals
from allranks.torch.parallel.data.buckets import InOrder
from allranks.torch.parallel.data.half import OwnRows, PackedBucket, own_rows, packed_buckets
from allranks.torch.parallel.data.reducer import Bucket, Reducer
from allranks.torch.parallel.data.tree import IN_FLIGHT, MeanSections, Sections, TreeSections
from allranks.torch.parallel.sharded.gradients import GradientParts
from allranks.torch.parallel.sharded.whole_optimizers import WholeUpdates
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import Strategy
from allranks.torch.strategies.layout import Cut, Layout, mesh_of


class ZeRO1(Strategy):
    """Reduce-scatter the gradients, update own rows, all-gather the weights."""

    can_run_ahead = has_whole_passes = True

    def parallelize(self, model: nn.Module) -> nn.Module:
        self._is_cut, self.passes = False, 1
        self.buckets: list[PackedBucket] = []
        self._with_rows = {n: p for n, p in model.named_parameters() if p.ndim}
        self._owned = OwnRows(list(self._with_rows.values()), self._own)
        named = self._with_rows.items()
        cuts = {name: Cut(torch.empty_like(p.detach(), device="meta")) for name, p in named}
        mesh = mesh_of(self.comm, [(SHARD, self.comm)]) if self.comm.size > 1 else None
        self.layout = Layout(self.comm, cuts, mesh)
        return model

    def prepare(self) -> None:
        self._cut_optimizer_state()
        summed = load(REDUCERS[self.context.options["reduce"]])
        self.summed: Reducer = summed(self.comm, self.task.shards)
        sections = TreeSections if self.shard_alone else MeanSections
        self.sections: Sections = sections(self.comm, self.task.shards)
        named, asked = self._with_rows, f"--strategy {self.name}"
        cuts = self.layout.cuts
        self.wholes = WholeUpdates(self.comm, self.step.optimizer, named, cuts, asked)
        self.layout.kept_whole = self.wholes.here

    def deal(self, shares: Shares) -> None:
        super().deal(shares)
        self.summed.deal(shares)
        self.sections.deal(shares)

    def _cut_optimizer_state(self) -> None:
        """Cut optimizer state that exists from the start to this rank's rows."""
        for parameter, state in self.step.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
                    state[name] = self._own(value).clone()

    def lay_out(self) -> None:
        """Parameters with rows are cut; scalars are summed in full, like the tally."""
        if self.comm.size > 1:  # groups may have been added
            self.wholes.find()
            self._check_bits()
        parameters, layout = self.step.parameters, self.step.layout
        self._laid_out = parameters
        cut = [position for position, p in enumerate(parameters) if p.ndim]
        self.buckets, bucket_of = self._packed([parameters[i] for i in cut])
        self.sections.prepare(self.buckets)
        self._order = InOrder(bucket_of, self._leave)
        self._turn = {position: i for i, position in enumerate(cut)}
        self.step.on_gradient = self._finished
        numbers = [p for p in parameters if not p.ndim]
        self._whole = [self._flat(reals(p.detach()).numel(), p) for p in numbers]
        self._numbers = [
            (p, torch.view_as_complex(flat[:2]) if p.is_complex() else flat[0])
            for p, flat in zip(numbers, self._whole, strict=True)
        ]
        self._whole.append(self._flat(layout.size, layout.like))
        self.summed.prepare([Bucket(flat, flat) for flat in self._whole])
        self.tally = layout.tally(self._whole[-1][: layout.size])

    def _packed(self, parameters: list[nn.Parameter]) -> tuple[list[PackedBucket], list[int]]:
        most = int(self.context.options["bucket_mb"] * 2**20)
        return packed_buckets(parameters, most, self.comm.size)

    def _check_bits(self) -> None:
        """Raise for 16 bits: torch rounds the last elements of a tensor in another way."""
        short = [
            n for n, p in zip(self.step.names, self.step.parameters, strict=True) if p.itemsize < 4
        ]
        if self.shard_alone and short:
            raise RequestError(
                asked=f"--strategy {self.name} with equal bits on any ranks",
                found=f"weights of 16 bits: {short[0]!r}",
                why="an update of some rows rounds them otherwise than an update of all",
                do="keep the weights in float32 (--precision bf16 does), or --strategy ddp",
            )

    def _flat(self, size: int, like: Tensor) -> Tensor:
        return self.summed.room(size, reals(like.detach()))

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        return self.summed.sum_apart(leaves)  # the caller lays out everything again

    # --- gradients ------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> Tally:
        for flat in self._whole:
            flat.zero_()
        for parameter in self.step.parameters:
            parameter.grad = None
        for parameter, view in self._numbers:
            parameter.grad = view
        self._leaf, self._is_last, self.passes = batch.leaves[-1], True, 0
        self._order.begin()
        last = batch.leaves[-1]
        self._micros = last.micros
        if self.each_pass:
            self._release_pass()
        release = None if self.each_pass else self._order.release
        for leaf in self.step.leaves(batch, self.tally, release):
            if leaf is not last:
                self._launch_leaf(leaf)
        while self.each_pass and self.passes < batch.passes:  # other ranks have more of them
            self.after_backward()
        if self.each_pass:
            self._order.begin()  # later backward passes do not belong to the step
        return self.tally

    def after_backward(self) -> None:
        if self.each_pass:
            self.passes += 1
            self._order.finish()
            self._order.begin()
            self._release_pass()

    def _release_pass(self) -> None:
        """Let the gradients of the next pass leave on the way, unless they are noted at its end."""
        if not any(map(self.step.observes, self._micros[self.passes : self.passes + 1])):
            self._order.release()

    def _finished(self, position: int) -> None:
        if position in self._turn:
            self._order.finished(self._turn[position])

    def _launch_leaf(self, leaf: Leaf) -> None:
        """Launch a leaf that is not the last; gradients are empty again."""
        last, self._leaf, self._is_last = self._leaf, leaf, False
        for number in range(len(self.buckets)):
            self._leave(number)
        for number in range(len(self._whole)):
            self.summed.launch(number, self._span, last=False)
        self._leaf, self._is_last = last, True

    def _leave(self, number: int) -> None:
        bucket = self.buckets[number]
        flat = bucket.packed([parameter.grad for parameter in bucket.parameters])
        for parameter in bucket.parameters:
            parameter.grad = None
        self.sections.launch(number, flat, self._span, last=self._is_last)

    @property
    def _span(self) -> tuple[int, int]:
        return self._leaf.shards.start, self._leaf.shards.stop

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        if not self.each_pass:
            self._order.finish()
        for number in range(len(self._whole)):
            self.summed.launch(number, self._span, last=True)
        parts = {id(parameter): view for parameter, view in self._numbers}
        sections = self.sections.finish()
        for bucket, section in zip(self.buckets, sections, strict=True):
            for parameter, part in bucket.parts(section, self.comm.rank):
                parts[id(parameter)] = part
        flats = [*sections, *(view for _, view in self._numbers)]
        self.summed.finish()
        parameters = self.step.parameters
        for parameter, _ in self._numbers:
            parameter.grad = None
        rows = [parts[id(parameter)] for parameter in parameters]
        exact = self.shard_alone
        return local, GradientParts(parameters, rows, self._own, flats, self.comm, exact=exact)

    # --- weights --------------------------------------------------------------------------

    def _own(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a full tensor; all of it, if it has no dimensions."""
        return own_rows(tensor, self.comm.size, self.comm.rank) if tensor.ndim else tensor

    @contextmanager
    def owned(self, *, writes: bool = False) -> Iterator[None]:
        if self._is_cut:
            yield
            return
        parameters = self._owned.parameters
        if self._owned.refresh():
            for bucket in self.buckets:
                bucket.forget()
        whole, local_rows = self._owned.whole, self._owned.rows
        gradients = [parameter.grad for parameter in parameters]
        self._is_cut = True
        for parameter, rows in zip(parameters, local_rows, strict=True):
            parameter.grad = None
            parameter.data = rows
        try:
            yield
        finally:
            self._is_cut = False
            for parameter, weight, gradient in zip(parameters, whole, gradients, strict=True):
                parameter.grad = None
                parameter.data = weight
                parameter.grad = gradient
        if writes:
            buckets, _ = self._packed(list(self._with_rows.values()))
            self._gather(buckets, "control")

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        if self.step.parameters is not self._laid_out:  # unfrozen in this step
            self.lay_out()
        with self.owned():
            for parameter, part in zip(gradients.parameters, gradients.tensors(), strict=True):
                parameter.grad = part
            with self.wholes.gathered():
                yield
            for parameter in gradients.parameters:
                parameter.grad = None
        self._gather(self.buckets, "gradients")

    @torch.no_grad()
    def _gather(self, buckets: Iterable[PackedBucket], kind: str) -> None:
        """Copy all rows from their owners to all ranks."""
        if self.comm.size == 1:
            return
        in_flight: deque[tuple[PackedBucket, Tensor, Pending]] = deque()

        def receive() -> None:
            bucket, flat, pending = in_flight.popleft()
            pending.wait()
            bucket.unpack(flat)

        for bucket in buckets:
            section = bucket.section_of(self.comm.rank)
            flat = bucket.room()
            in_flight.append((bucket, flat, self.comm.all_gather(flat, section, kind)))
            if len(in_flight) > IN_FLIGHT:
                receive()
        while in_flight:
            receive()

    # --- bytes and state ------------------------------------------------------------------

    def workload(self) -> Workload:
        """Bytes of buckets with padding, of full sums, and of parts to owners and back."""
        cut = sum(bucket.nbytes for bucket in self.buckets)
        whole, passes = sum(flat.nbytes for flat in self._whole), self.passes
        return self.work(
            cut, whole, self.wholes.most_sent(), passes=passes if self.each_pass else 1
        )

    def placement(self, *, updated: bool) -> list[Placed]:
        rows = super().placement(updated=updated)
        return rows if not self.each_pass else [self._without_whole_gradient(row) for row in rows]

    def _without_whole_gradient(self, row: Placed) -> Placed:
        cut = self.layout.cuts.get(row.name)
        if not row.gradient_bytes or cut is None:
            return row
        return replace(row, gradient_bytes=self._own(cut.like).nbytes)

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return ((name, tensors[name].detach()) for name in sorted(tensors))


class ZeRO2(ZeRO1):
    """As `zero1`, but gradients are reduce-scattered after every backward pass."""

    counts_passes = True

    @property
    def each_pass(self) -> bool:
        """False for the fixed tree, whose leaves need full gradients, as in `zero1`."""
        return not self.shard_alone
