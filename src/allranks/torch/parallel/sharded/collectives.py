"""Reduce-scatters of the gradients of a unit of `fsdp`, in one of three ways.

Uncompressed; along the fixed tree; or compressed with error feedback, where a unit has residuals.
Every backward pass of a rank is summed separately.

    fsdp    every rank encodes the part of each other rank, with a residual for each; an all-to-all
            sends them to their owners, which add them in rank order
    hsdp    the parts are summed uncompressed in the group that holds a model; the sums of the
            groups are encoded, gathered by the ranks with the same part, and added in order

With `demo` under `hsdp` passes are summed uncompressed in a group. At the end of a step `demo` sums
this rank's parts over the ranks with the same parts: FlexDeMo, arXiv 2502.06728. `power-sgd`,
`one-bit` and `n-bit` are missing here: their second half needs the full sum on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.strategies.card import Picked
from allranks.strategies.compressed import PIECES, SIGNED
from allranks.strategies.shards import Shares
from allranks.torch.checkpoint.state import local
from allranks.torch.comm.comm import Comm
from allranks.torch.compression.codecs import Codec, ErrorFeedback, codec_of
from allranks.torch.data.batch import Batch
from allranks.torch.data.collate import tensors_in
from allranks.torch.parallel.data.compressed.gathered import Compressed, demo
from allranks.torch.parallel.data.reducer import Bucket
from allranks.torch.parallel.data.tree import ChunkTree, PassPlan
from allranks.torch.step.gradients import Gradients, one_number_a_row

AddPass = Callable[[Tensor, Tensor], None]
"""`add(total, gradients)` sums the gradients of one unit, (rank, part) flat, over all ranks.

Writes this rank's (part,) into `total`. Every rank calls it once in a pass. Torch adds the totals
of the passes.
"""


def _add_along_tree(tree: ChunkTree, total: Tensor, gradients: Tensor) -> None:
    """Over all passes of all ranks: the total is zero until the last pass."""
    summed = tree.add(gradients)
    if summed is None:
        total.zero_()
    else:
        total.copy_(summed)


class CompressedSum:
    """Compressed sums between owners, or between groups of `shards` if there are `replicas`.

    `weights` are those of the unit. Residuals, (messages, part), begin at zero with the first
    message, and again when other weights of the unit are trained.
    """

    def __init__(
        self, sums: CompressedSums, shards: Comm, replicas: Comm | None, weights: list[nn.Parameter]
    ) -> None:
        self.sums, self.shards, self.replicas, self.weights = sums, shards, replicas, weights
        self.trained: list[bool] = []
        self.feedbacks: list[ErrorFeedback] = []

    def add(self, total: Tensor, gradients: Tensor) -> None:
        peers = self.replicas
        if peers is not None or self.sums.is_plain:
            self.shards.reduce_scatter(total, gradients).wait()
        if self.sums.is_plain:
            if peers is not None:
                peers.all_reduce(total).wait()
        elif peers is not None:
            self._decode(self._gathered(self._encoded(total.view(1, -1)), peers), total)
        else:
            parts = gradients.view(self.shards.size, -1)
            self._decode(self._exchanged(self._encoded(parts)), total)

    def _encoded(self, parts: Tensor) -> Tensor:
        """The message of each part: uint8, (messages, bytes)."""
        trained = [parameter.requires_grad for parameter in self.weights]
        if trained != self.trained:
            self._begin(trained, torch.zeros_like(parts))
        pairs = zip(self.feedbacks, parts, strict=True)
        return torch.stack([feedback.encode(part) for feedback, part in pairs])

    def _begin(self, trained: list[bool], residual: Tensor) -> None:
        self.trained = trained
        self.feedbacks = [ErrorFeedback(self.sums.codec, row) for row in residual]
        for feedback, row in zip(self.feedbacks, residual, strict=True):
            feedback.residual.copy_(row)

    def _gathered(self, message: Tensor, peers: Comm) -> Tensor:
        if peers.size == 1:
            return message
        every = message.new_empty(peers.size * message.numel())
        peers.all_gather(every, message.view(-1)).wait()
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
        """The residuals of this rank."""
        if not self.feedbacks:
            return {}
        residual = torch.stack([feedback.residual for feedback in self.feedbacks])
        return {"trained": list(self.trained), "residual": residual}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        if state:
            self._begin(list(state["trained"]), state["residual"])


class CompressedSums:
    """The compressed sums of all units; the first `after` steps are uncompressed."""

    def __init__(self, codec: Codec, after: int) -> None:
        self.codec, self.after, self.steps = codec, after, 0
        self.is_off = False
        self.units: list[CompressedSum] = []

    @property
    def is_plain(self) -> bool:
        """Whether this step is summed uncompressed."""
        return self.is_off or self.steps < self.after

    def state(self) -> dict[str, Any]:
        """Steps and residuals, unit by unit: of this rank alone."""
        return {"steps": self.steps, "units": [unit.state() for unit in self.units]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned for the same units on as many ranks."""
        self.steps = int(state["steps"])
        for unit, unit_state in zip(self.units, state["units"], strict=True):
            unit.load_state(unit_state)


class UnitSums:
    """The sums of all units, by `reduce`; every rank of the mesh constructs one.

    `axes` are the group of ranks of `comm` that hold a model together, and the group of ranks with
    the same part of it. With `across` the sum over the second group is compressed, and made here
    (`replicas`). Otherwise torch makes it.
    """

    def __init__(
        self, reduce: Picked, comm: Comm, shards: int, axes: tuple[Comm, Comm], *, across: bool
    ) -> None:
        self.holders, replicas = axes
        self.plan = PassPlan(comm, shards, *axes) if reduce.name == "tree" else None
        self.compressed: CompressedSums | None = None
        if reduce.name in PIECES:
            self.compressed = CompressedSums(codec_of(reduce), reduce.options["after"])
        self.demo: Compressed | None = None
        if reduce.name in SIGNED:
            self.demo = demo(replicas, shards, **reduce.options)
        self.keeps_residuals = self.compressed is not None or self.demo is not None
        self.are_dropped = False  # whether the gradients of a pass are not summed, but lost
        self.replicas = replicas if across and self.keeps_residuals else None
        where = "across groups" if across else "to owners"
        self.name = f"{reduce.name} {where} of {self.holders.size}"  # others keep other residuals

    def of(self, weights: list[nn.Parameter]) -> AddPass:
        """The sum of another unit, which has these weights."""
        if self.plan is not None:
            return partial(_add_along_tree, self.plan.tree())
        if self.compressed is None:
            return lambda total, gradients: self.holders.reduce_scatter(total, gradients).wait()
        unit_sum = CompressedSum(self.compressed, self.holders, self.replicas, weights)
        self.compressed.units.append(unit_sum)
        return unit_sum.add

    def deal(self, shares: Shares) -> None:
        """Set the shards of each rank, between two steps."""
        if self.plan is not None:
            self.plan.shares = shares

    def begin(self, batch: Batch) -> None:
        """Begin a step; every rank calls this."""
        if self.plan is not None:
            self.plan.begin(batch)

    def lay_out(self, names: list[str], parameters: list[nn.Parameter]) -> None:
        """Set the trained parameters; residuals of earlier ones are kept by name."""
        if self.demo is None:
            return
        residuals = self.demo.state() if self.demo.buckets else {}
        self.parts = [(p, local(p)) for p in parameters if p.ndim]
        sizes = [part.numel() for _, part in self.parts]
        flat = self.parts[0][1].new_zeros(sum(sizes), requires_grad=False)
        rows = zip(flat.split(sizes), self.parts, strict=True)
        self.views = [row.view(part.shape) for row, (_, part) in rows]
        named = [name for name, p in zip(names, parameters, strict=True) if p.ndim]
        self.demo.prepare([Bucket(flat, flat, dict(zip(named, self.views, strict=True)))])
        self.demo.load_state(residuals)

    def end(self) -> None:
        """End the passes of a step; with `demo`, sum over groups here."""
        if self.plan is not None:
            self.plan.end()
        if self.demo is not None:
            gradients = [local(p.grad) if p.grad is not None else None for p, _ in self.parts]
            for view, gradient in zip(self.views, gradients, strict=True):
                view.zero_() if gradient is None else view.copy_(gradient)
            self.demo.launch(0, (0, 0), last=True)
            self.demo.finish()
            for view, gradient in zip(self.views, gradients, strict=True):
                if gradient is not None:
                    gradient.copy_(view)
        if self.compressed is not None:
            self.compressed.steps += 1

    @contextmanager
    def uncompressed(self) -> Iterator[None]:
        """Within, passes are summed uncompressed, and residuals do not change."""
        if self.compressed is None:
            yield
            return
        self.compressed.is_off = True
        try:
            yield
        finally:
            self.compressed.is_off = False

    def before_update(self, gradients: Gradients) -> None:
        """Prepare gradients for the update: with `demo`, replace them by signs."""
        if self.demo is not None:
            gradients.sign_()

    def own_state(self) -> dict[str, Any]:
        """The residuals of this rank, with the name of the sum; empty for uncompressed sums."""
        keeper = self.compressed or self.demo
        return {"reducer": {"name": self.name, "state": keeper.state()}} if keeper else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load what `own_state` returned, if it is of the same sum on as many ranks."""
        saved, keeper = state.get("reducer", {}), self.compressed or self.demo
        if keeper is not None and saved.get("name") == self.name:
            keeper.load_state(saved["state"])


# --- fsdp collectives ----------------------------------------------------------------------------
# The collectives of torch's `fully_shard`.
#
# They use `Comm`, so that bytes are counted, heartbeats are updated, and lost ranks are named.


At = Callable[[], AbstractContextManager[None]]


class Gather:
    """Gathers the weights of a unit, counted as `kind`; waits within the context `at`."""

    def __init__(self, shards: Comm, kind: Callable[[], str], at: At) -> None:
        self.shards, self.kind, self.at = shards, kind, at

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        """Memory for a message."""
        return torch.empty(*size, **options)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather the parts of all ranks; torch calls it by these names, and waits for `work`."""
        with self.at():
            pending = self.shards.all_gather(output_tensor, input_tensor, self.kind())
            return pending.work if async_op else pending.wait()


class Scatter(Gather):
    """Reduce-scatters the gradients of a unit by one of `sums`, or drops them.

    `weights` are those of the unit; `is_apart` tells whether code of the task is running.
    """

    def __init__(
        self,
        shards: Comm,
        kind: Callable[[], str],
        at: At,
        weights: list[nn.Parameter],
        sums: UnitSums,
        is_apart: Callable[[], bool],
    ) -> None:
        super().__init__(shards, kind, at)
        self.weights, self.is_apart = weights, is_apart
        self.sums, self.add = sums, sums.of(weights)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *_: Any, **__: Any
    ) -> Any:
        """Sum (rank, part) over the ranks into this rank's part; torch calls this."""
        if self.is_apart():
            raise _backward_in_forward()
        trained = [parameter for parameter in self.weights if parameter.requires_grad]
        if input_tensor.nbytes != sum(padded(p, self.shards.size) for p in trained):
            raise _unused()
        if self.sums.are_dropped:
            output_tensor.zero_()
            return
        with self.at():
            self.add(output_tensor, input_tensor)


class Filling:
    """Zero gradients for the gathered `weights` of a unit that a pass does not use.

    Torch has this since 2.13 (`set_reduce_scatter_unused_params`). Before, each rank sums only used
    weights, and ranks that use different weights would mix them.
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
    """The bytes of a weight whose first axis is padded to a multiple of `parts`."""
    rows = -(-parameter.shape[0] // parts) * parts
    return rows * math.prod(parameter.shape[1:]) * parameter.element_size()


def sizes_of(by_unit: Sequence[Sequence[Tensor]], parts: int) -> tuple[int, int, int]:
    """Padded bytes of the root (the last of `by_unit`), of other units, of trained weights."""
    *units, root = ([(padded(p, parts), p.requires_grad) for p in unit] for unit in by_unit)
    others = [row for rows in units for row in rows]
    trained = sum(size for size, is_trained in (*others, *root) if is_trained)
    return sum(size for size, _ in root), sum(size for size, _ in others), trained


def watch(
    gathered: Sequence[nn.Parameter], mark: Callable[[int], None], tables: Container[int]
) -> list[RemovableHandle]:
    """Call `mark` when a pass of this rank has finished the gradient of a gathered weight.

    Gradients are made dense; for `tables` (ids) each pass adds one number to a row.
    """

    def on_gradient(position: int, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        mark(position)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(on_gradient, position))
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
