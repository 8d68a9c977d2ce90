"""How the gradients of a unit of `fsdp` are summed, for each rank its part: in one of three ways.

Plainly; along the fixed tree; or compressed, with error feedback, where a unit keeps what this rank
did not send of it. Every backward pass of a rank is summed by itself.

    fsdp    every rank encodes the part of each other rank, with a residual for each; an all-to-all
            gives them to their owners, who add them up in the order of the ranks
    hsdp    the parts are summed as they are in the group that holds the model; the sums of the
            groups are encoded, gathered by the ranks with the same part, and added up in order

With `demo` under `hsdp` passes are summed as they are in a group; at the end of a step `DeMo` is
given this rank's parts, and the ranks with the same ones: FlexDeMo, arXiv 2502.06728. `power-sgd`,
`one-bit` and `n-bit` are not here: their second half is made for a sum that every rank needs whole.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.strategies.card import Picked
from allranks.strategies.reductions.compressed import PIECES, SIGNED
from allranks.torch.checkpoint.tree import local
from allranks.torch.comm.comm import Comm
from allranks.torch.compression.codecs import Codec, codec_of
from allranks.torch.compression.error_feedback import ErrorFeedback
from allranks.torch.data.batch import Batch
from allranks.torch.data.collate import tensors_in
from allranks.torch.parallel.data.compressed.gathered import DeMo
from allranks.torch.parallel.data.reducer import Bucket
from allranks.torch.parallel.data.tree import ChunkTree, PassPlan
from allranks.torch.step.gradients import Gradients, one_number_a_row


class UnitSum(ABC):
    """Sums the gradients of one unit, pass by pass."""

    @abstractmethod
    def add(self, total: Tensor, given: Tensor) -> None:
        """Sum `given`, (rank, part) flat, over all ranks into `total`, this rank's (part,).

        Every rank calls this once in a pass. What comes out of each pass is added up by torch.
        """


class Plain(UnitSum):
    """A reduce-scatter over `shards`."""

    def __init__(self, shards: Comm) -> None:
        self.shards = shards

    def add(self, total: Tensor, given: Tensor) -> None:
        self.shards.reduce_scatter(total, given).wait()


class AlongTree(UnitSum):
    """The tree over all passes of all ranks: nothing comes out but after the last one."""

    def __init__(self, tree: ChunkTree) -> None:
        self.tree = tree

    def add(self, total: Tensor, given: Tensor) -> None:
        found = self.tree.add(given)
        if found is None:
            total.zero_()
        else:
            total.copy_(found)


class CompressedSum(UnitSum):
    """Encoded messages between owners, or between groups of `shards` where there are `replicas`.

    `held` are the weights of the unit. Residuals begin at zero with the first message, and again
    where other weights of the unit are trained: they are of all of it, (messages, part).
    """

    def __init__(
        self, sums: CompressedSums, shards: Comm, replicas: Comm | None, held: list[nn.Parameter]
    ) -> None:
        self.sums, self.shards, self.replicas, self.held = sums, shards, replicas, held
        self.trained: list[bool] = []
        self.feedbacks: list[ErrorFeedback] = []

    def add(self, total: Tensor, given: Tensor) -> None:
        peers = self.replicas
        if peers is not None or self.sums.is_plain:
            self.shards.reduce_scatter(total, given).wait()
        if self.sums.is_plain:
            if peers is not None:
                peers.all_reduce(total).wait()
        elif peers is not None:
            self._decode(self._gathered(self._encoded(total.view(1, -1)), peers), total)
        else:
            self._decode(self._exchanged(self._encoded(given.view(self.shards.size, -1))), total)

    def _encoded(self, parts: Tensor) -> Tensor:
        """The message of each part: uint8, (messages, bytes)."""
        trained = [parameter.requires_grad for parameter in self.held]
        if trained != self.trained:
            self._begin(trained, torch.zeros_like(parts))
        pairs = zip(self.feedbacks, parts, strict=True)
        return torch.stack([feedback.encode(part) for feedback, part in pairs])

    def _begin(self, trained: list[bool], residual: Tensor) -> None:
        self.trained = trained
        self.feedbacks = [ErrorFeedback(self.sums.codec, row) for row in residual]
        for feedback, row in zip(self.feedbacks, residual, strict=True):
            feedback.load_state({"residual": row})

    def _gathered(self, own: Tensor, peers: Comm) -> Tensor:
        if peers.size == 1:
            return own
        every = own.new_empty(peers.size * own.numel())
        peers.all_gather(every, own.view(-1)).wait()
        return every.view(peers.size, -1)

    def _exchanged(self, messages: Tensor) -> Tensor:
        received = torch.empty_like(messages)
        sizes = [messages.shape[1]] * self.shards.size
        self.shards.all_to_all(received.view(-1), messages.view(-1), sizes, sizes).wait()
        return received

    def _decode(self, messages: Tensor, total: Tensor) -> None:
        total.zero_()
        for message in messages:
            self.sums.codec.add_decoded(message, total)

    def state(self) -> dict[str, Any]:
        """What this rank did not send yet."""
        if not self.feedbacks:
            return {}
        residual = torch.stack([feedback.residual for feedback in self.feedbacks])
        return {"trained": list(self.trained), "residual": residual}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
        if state:
            self._begin(list(state["trained"]), state["residual"])


class CompressedSums:
    """Those of all units: one codec, and the steps in which it is not used yet."""

    def __init__(self, codec: Codec, after: int) -> None:
        self.codec, self.after, self.steps = codec, after, 0
        self.is_off = False
        self.units: list[CompressedSum] = []

    @property
    def is_plain(self) -> bool:
        """Whether this step is summed as it is."""
        return self.is_off or self.steps < self.after

    def state(self) -> dict[str, Any]:
        """Steps and residuals, unit by unit: of this rank alone."""
        return {"steps": self.steps, "units": [unit.state() for unit in self.units]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned, of the same units on as many ranks."""
        self.steps = int(state["steps"])
        for unit, kept in zip(self.units, state["units"], strict=True):
            unit.load_state(kept)


class UnitSums:
    """The sums of all units, as `reduce` says; every rank of the mesh makes one.

    `axes` are those of the ranks of `comm` that hold a model together, and of those with the same
    part of it. With `across` the sum over the second is what is compressed, and is made here:
    `replicas`. Torch makes it otherwise.
    """

    def __init__(
        self, reduce: Picked, comm: Comm, shards: int, axes: tuple[Comm, Comm], *, across: bool
    ) -> None:
        self.holders, replicas = axes
        self.plan = PassPlan(comm, shards, *axes) if reduce.name == "tree" else None
        self.compressed: CompressedSums | None = None
        if reduce.name in PIECES:
            self.compressed = CompressedSums(codec_of(reduce), reduce.options["after"])
        self.demo: DeMo | None = None
        if reduce.name in SIGNED:
            self.demo = DeMo(replicas, shards, **reduce.options)
        self.keeps_residuals = self.compressed is not None or self.demo is not None
        self.replicas = replicas if across and self.keeps_residuals else None
        where = "across groups" if across else "to owners"
        self.name = f"{reduce.name} {where} of {self.holders.size}"  # others keep other residuals

    def of(self, held: list[nn.Parameter]) -> UnitSum:
        """The sum of one more unit, which has these weights."""
        if self.plan is not None:
            return AlongTree(self.plan.tree())
        if self.compressed is None:
            return Plain(self.holders)
        one = CompressedSum(self.compressed, self.holders, self.replicas, held)
        self.compressed.units.append(one)
        return one

    def begin(self, batch: Batch) -> None:
        """A step begins; every rank calls this."""
        if self.plan is not None:
            self.plan.begin(batch)

    def lay_out(self, names: list[str], parameters: list[nn.Parameter]) -> None:
        """These are trained from here on: what was not sent of those before is kept by name."""
        if self.demo is None:
            return
        kept = self.demo.state() if self.demo.buckets else {}
        self.parts = [(p, local(p)) for p in parameters if p.ndim]
        sizes = [part.numel() for _, part in self.parts]
        flat = self.parts[0][1].new_zeros(sum(sizes), requires_grad=False)
        rows = zip(flat.split(sizes), self.parts, strict=True)
        self.views = [row.view(part.shape) for row, (_, part) in rows]
        named = [name for name, p in zip(names, parameters, strict=True) if p.ndim]
        self.demo.prepare([Bucket(flat, flat, dict(zip(named, self.views, strict=True)))])
        self.demo.load_state(kept)

    def end(self) -> None:
        """All passes of a step are summed; with `demo` over a group, and here over all groups."""
        if self.plan is not None:
            self.plan.end()
        if self.demo is not None:
            held = [local(p.grad) if p.grad is not None else None for p, _ in self.parts]
            for view, own in zip(self.views, held, strict=True):
                view.zero_() if own is None else view.copy_(own)
            self.demo.launch(0, (0, 0), last=True)
            self.demo.finish()
            for view, own in zip(self.views, held, strict=True):
                if own is not None:
                    own.copy_(view)
        if self.compressed is not None:
            self.compressed.steps += 1

    @contextmanager
    def uncompressed(self) -> Iterator[None]:
        """Within, passes are summed as they are, and what was not sent yet stays as it is."""
        if self.compressed is None:
            yield
            return
        self.compressed.is_off = True
        try:
            yield
        finally:
            self.compressed.is_off = False

    def before_update(self, gradients: Gradients) -> None:
        """Leave what the update is made of: with `demo` signs."""
        if self.demo is not None:
            gradients.sign_()

    def own_state(self) -> dict[str, Any]:
        """What this rank did not send, by the name of the sum; nothing of plain ones."""
        keeper = self.compressed or self.demo
        return {"reducer": {"name": self.name, "state": keeper.state()}} if keeper else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take up what `own_state` returned of the same sum on as many ranks; else nothing."""
        kept, keeper = state.get("reducer", {}), self.compressed or self.demo
        if keeper is not None and kept.get("name") == self.name:
            keeper.load_state(kept["state"])


# --- fsdp collectives ----------------------------------------------------------------------------
# The collectives that torch's `fully_shard` is given.
#
# They are those of `Comm`, so that they are counted, are signs of life, and say who is lost.


At = Callable[[], AbstractContextManager[None]]


class Gather:
    """Gathers the weights of a unit; `kind` says what for, and within `at` it waits."""

    def __init__(self, shards: Comm, kind: Callable[[], str], at: At) -> None:
        self.shards, self.kind, self.at = shards, kind, at

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        """Memory for what is sent or received."""
        return torch.empty(*size, **options)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Send this rank's parts to all; torch calls it with these names, and waits for `work`."""
        with self.at():
            pending = self.shards.all_gather(output_tensor, input_tensor, self.kind())
            return pending.work if async_op else pending.wait()


class Scatter(Gather):
    """Sums the gradients of a unit, for each rank its part, as `sums` does.

    `held` are the weights of the unit; `is_apart` says whether code of the task is running.
    """

    def __init__(
        self,
        shards: Comm,
        kind: Callable[[], str],
        at: At,
        held: list[nn.Parameter],
        sums: UnitSum,
        is_apart: Callable[[], bool],
    ) -> None:
        super().__init__(shards, kind, at)
        self.held, self.sums, self.is_apart = held, sums, is_apart

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *_: Any, **__: Any
    ) -> Any:
        """Sum (rank, part) over the ranks into this rank's part; torch calls it so."""
        if self.is_apart():
            raise _backward_in_forward()
        trained = [parameter for parameter in self.held if parameter.requires_grad]
        if input_tensor.nbytes != sum(padded(p, self.shards.size) for p in trained):
            raise _unused()
        with self.at():
            self.sums.add(output_tensor, input_tensor)


class Filling:
    """Zeros for the gathered `weights` of a unit that a pass does not use.

    Torch has this since 2.13 (`set_reduce_scatter_unused_params`). Before, each rank sums what it
    has, and ranks that use different weights would add one to another.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.weights: list[Tensor] = []
        self.hook = unit.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._fill)

    def _fill(self, gradient: Tensor) -> None:
        for weight in self.weights:
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)


def padded(parameter: Tensor, parts: int) -> int:
    """The bytes of a weight whose first axis is made a multiple of `parts`."""
    rows = -(-parameter.shape[0] // parts) * parts
    return rows * math.prod(parameter.shape[1:]) * parameter.element_size()


def sizes_of(held: Sequence[Sequence[Tensor]], parts: int) -> tuple[int, int, int]:
    """The padded bytes of the root (the last of `held`), of all other units, of what is trained."""
    *units, root = ([(padded(p, parts), p.requires_grad) for p in unit] for unit in held)
    rest = [row for rows in units for row in rows]
    trained = sum(size for size, is_trained in (*rest, *root) if is_trained)
    return sum(size for size, _ in root), sum(size for size, _ in rest), trained


def watch(
    gathered: Sequence[nn.Parameter], mark: Callable[[int], None], tables: Container[int]
) -> list[RemovableHandle]:
    """Call `mark` when a pass of this rank has finished the gradient of a gathered weight.

    It is dense then; of `tables` (their ids) each pass adds one number to a row.
    """

    def seen(position: int, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        mark(position)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(seen, position))
        for position, parameter in enumerate(gathered)
    ]
    rows = [p.register_hook(one_number_a_row) for p in gathered if id(p) in tables]
    return [*hooks, *rows]


def _backward_in_forward() -> RequestError:
    return RequestError(
        asked="weights that are cut over the ranks",
        found="a backward pass in forward or loss of the task",
        why="it would sum its gradients over the ranks, and let go of weights that are in use",
        do="--strategy ddp",
    )


def _unused() -> RequestError:
    return RequestError(
        asked="weights that are cut over the ranks",
        found=f"a weight that a pass of this rank did not use, with torch {torch.__version__}",
        why="its fully_shard sums what is there, so ranks would sum different weights",
        do="torch 2.13 or newer, or --strategy ddp",
    )
