"""Model parallelism in one process: parts of the model on several devices, one after the other.

    part 0 (cuda:0)    embedding, blocks 0-5     the inputs are here, and the loss
    part 1 (cuda:1)    blocks 6-11, head         activations come over, the output goes back

The forward of the model does not change: before a placed module is called, a hook moves its inputs
to its device. Gradients and optimizer state are on the device of their weights. With `split` a
micro-batch is split into pieces, so that one device works on a piece while the next device works on
the piece before. BatchNorm and dropout belong to the shard, and pieces are whole shards: the result
is the same.

Random numbers of user code in forward (`F.dropout`) come from one generator for each device. With
`split` on CPU several threads share one generator: only there they differ from one process.
Single-Machine Model Parallel, a tutorial of PyTorch, does the same by hand.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import allranks.torch.accelerator as accelerator
from allranks.errors import Explained, RequestError
from allranks.job.place import Placed
from allranks.torch.data.batch import (
    Batch,
    ShareUse,
    check_first_batch,
    gathered,
    samples_in,
    scattered,
    shares_of,
)
from allranks.torch.data.collate import (
    map_arguments,
    map_tensors,
    replaced,
    tensors_in,
    tensors_of_arguments,
)
from allranks.torch.model.activation_checkpointing import Recomputed, recomputed
from allranks.torch.model.layers import OfShard, Scope, computed_again, every_layer, own_kind
from allranks.torch.model.partition import DeviceMap, balanced, by_hand, seconds_of, units_of
from allranks.torch.parallel.data.single import Single
from allranks.torch.step.losses import forward
from allranks.torch.step.passes import UNRELATED, unrelated_input
from allranks.torch.step.tally import Tally
from allranks.torch.strategies.base import StrategyContext
from allranks.torch.strategies.dp import in_threads

# --- in flight -----------------------------------------------------------------------------------
# Pieces of a micro-batch in flight through the parts of one model, in one process.
#
# On CPU each piece has a thread, and runs through the parts in turn:
#
#     part 0   | piece 0 | piece 1 | piece 2 |
#     part 1             | piece 0 | piece 1 | piece 2 |        and back again in backward
#
# A part works on one piece at a time, in the order of the pieces, so that the order of additions is
# fixed. The loss is of all pieces; in its backward pass each piece continues in its own thread. On
# CUDA no threads are needed: one thread launches piece after piece, and the devices run
# concurrently.
# Huang et al. 2019, GPipe, arXiv 1811.06965, without its stages being a sequence.


END = 2**31


class Turns:
    """The piece at each part: one at a time, and in order on each leg."""

    def __init__(self, pieces: int) -> None:
        self._changed = threading.Condition()
        self._legs = [-1] * pieces
        self._at: dict[int, int] = {}

    def acquire(self, piece: int, part: int) -> None:
        """Leave the current part of the piece, and wait for its turn at another one."""
        with self._changed:
            leg = self._legs[piece] + 1
            self._go(piece, leg)
            self._changed.wait_for(lambda: self._is_free(piece, part, leg))
            self._at[part] = piece

    def end(self, piece: int) -> None:
        """End the piece, also after an error: others no longer wait for it."""
        with self._changed:
            self._go(piece, END)

    def _go(self, piece: int, leg: int) -> None:
        self._at = {part: other for part, other in self._at.items() if other != piece}
        self._legs[piece] = leg
        self._changed.notify_all()

    def _is_free(self, piece: int, part: int, leg: int) -> bool:
        return part not in self._at and (piece == 0 or self._legs[piece - 1] > leg)


class InFlight:
    """A piece in flight: its thread, its scope, and its current part."""

    def __init__(self, number: int, scope: Scope, entered: Callable[[InFlight, int], None]) -> None:
        self.number, self.scope, self._entered = number, scope, entered
        self._name = f"piece-{number}"
        # always the same, as in `dp`; it sets its number of threads before the first product
        self.thread = ThreadPoolExecutor(1, self._name, torch.get_num_threads)
        self.part: int | None = None
        self.turns: Turns | None = None
        self.is_forward = True
        self._drawn: dict[int, int] = {}

    def go_to(self, part: int) -> None:
        """Wait for the turn at a part, unless the piece is there."""
        if part == self.part:
            return
        assert self.turns is not None
        self.turns.acquire(self.number, part)
        self.part = part
        self._entered(self, part)

    def cross(self, part: int, tensors: list[Tensor]) -> None:
        """Go to a part with its inputs; backward returns to the part that made them."""
        came_from = self.part
        self.go_to(part)
        if came_from is None:
            return

        def go_back(_: Tensor) -> None:
            if self.is_here() and not self.is_forward:
                self.go_to(came_from)

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(go_back)

    def is_here(self) -> bool:
        """Whether the current thread is that of this piece."""
        return threading.current_thread().name == f"{self._name}_0"

    def run(self, turns: Turns, work: Callable[[], Any], *, is_forward: bool) -> Any:
        """Run `work` in turns with other pieces. Backward begins at the last part of forward."""
        self.turns, self.is_forward = turns, is_forward
        try:
            if not is_forward:
                self._drawn = dict(self.scope.calls)
                there, self.part = self.part, None
                self.go_to(0 if there is None else there)
            result = work()
            if not is_forward and (self.scope.moments or self.scope.calls != self._drawn):
                raise computed_again()
            return result
        finally:
            turns.end(self.number)


def threaded_backward(
    pieces: Sequence[InFlight], outputs: list[Any], done: Callable[[], None]
) -> list[Any]:
    """The outputs of the pieces, whose backward runs each piece in its own thread.

    `done` is called at the end of that backward.
    """
    tensors = [[t for t in tensors_in(output) if t.requires_grad] for output in outputs]
    if not any(tensors):
        return outputs
    apply: Any = _Backward.apply
    anchor = torch.zeros((), requires_grad=True)  # makes the outputs differentiable
    flat = apply(pieces, tensors, done, anchor, *(t.detach() for row in tensors for t in row))
    cut = iter(flat)
    return [
        replaced(output, iter([next(cut) if t.requires_grad else t for t in tensors_in(output)]))
        for output in outputs
    ]


class _Backward(torch.autograd.Function):
    """The backward passes of all pieces, in their threads."""

    @staticmethod
    def forward(
        ctx: Any,
        pieces: Sequence[InFlight],
        outputs: list[list[Tensor]],
        done: Callable[[], None],
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.pieces, ctx.outputs, ctx.done = pieces, outputs, done
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        incoming, turns = iter(gradients), Turns(len(ctx.pieces))
        works: list[Callable[[], Any]] = []
        for piece, outputs in zip(ctx.pieces, ctx.outputs, strict=True):
            pairs = [(t, g) for t, g in ((t, next(incoming)) for t in outputs) if g is not None]
            works.append(_backward_of(piece, turns, pairs))
        try:
            in_threads([piece.thread for piece in ctx.pieces], works)
        finally:
            ctx.done()
        return (None, None, None, None, *(None for _ in gradients))


def _backward_of(
    piece: InFlight, turns: Turns, pairs: list[tuple[Tensor, Tensor]]
) -> Callable[[], Any]:
    def work() -> None:
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    return lambda: piece.run(turns, work, is_forward=False)


CUT = ShareUse("--strategy model-parallel:split", "the pieces in flight")
TWO_DEVICES = re.compile(r"to be on the same device|is not on the expected device")


class ModelParallel(Single):
    """Place parts of the model on devices; move activations; split micro-batches."""

    can_be_compiled = can_run_ahead = has_whole_passes = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        parts, device = context.options["parts"], self.comm.device
        self.built_with = dataclasses.replace(context.precision, device=torch.device("cpu"))
        self.devices = [device] * parts
        if accelerator.is_accelerator(device):
            self.devices = [torch.device(device.type, number) for number in range(parts)]
            context.scope.more_devices = tuple(self.devices[1:])
        self.split = context.options["split"]
        self.cuts_micro_batches = self.split > 1
        self._check_split()
        self._hooks: list[RemovableHandle] = []
        self._unchecked: Callable[[], None] = lambda: None
        if self.cuts_micro_batches:
            self._unchecked = check_first_batch(self.task, CUT)  # before data is opened
        self._holders: list[list[OfShard | Recomputed]] = [[] for _ in self.devices]
        self._here = threading.local()
        needs_threads = self.split > 1 and not accelerator.is_accelerator(device)
        self._pieces = [
            InFlight(number, Scope(context.scope.seed, device), self._set_scopes)
            for number in range(self.split if needs_threads else 0)
        ]

    def _check_split(self) -> None:
        if self.split > 1 and self.shard_alone:
            raise RequestError(
                asked=f"--strategy model-parallel:split={self.split} --bitwise",
                found="every shard goes through the model by itself",
                why="there is nothing to split: a piece is a shard at least",
                do="leave split out",
            )
        if self.split > self.task.shards:
            raise RequestError(
                asked=f"--strategy model-parallel:split={self.split}",
                found=f"shards = {self.task.shards}",
                why="a piece is made of whole shards, as BatchNorm and dropout belong to them",
                do=f"split={self.task.shards}, or --set shards={self.split} (another job)",
            )

    def parallelize(self, model: nn.Module) -> nn.Module:
        if any(hasattr(module, "_flatten_layers") for module in model.modules()):
            raise RequestError(
                asked=f"to place parts of {type(model).__name__} on devices",
                found="a Keras model",
                why="Keras calls its layers out of torch's sight, where nothing can be moved",
                do="--strategy ddp",
            )
        self.device_map = self._mapped(model)
        self._hold_scopes(model)
        return model

    def _mapped(self, model: nn.Module) -> DeviceMap:
        """Choose the device map, and place the model."""
        parts = len(self.devices)
        by_task = self.task.device_map(model)
        if by_task is not None:
            device_map = by_hand(model, by_task, parts)
            self._place(model, device_map)
            return device_map
        units = units_of(model, parts)
        device_map = balanced(units, [float(unit.nbytes) for unit in units], parts)
        self._place(model, device_map)
        if self.context.options["by"] == "cost":
            called = {n: unit.module for n, unit in enumerate(units) if unit.module is not None}
            precision, scope = self.context.precision, self.context.scope
            asked, blocks = f"--strategy {self.name}:by=cost", list(called.values())
            seconds = seconds_of(blocks, model, self.task, scope, precision, asked)
            costs = dict(zip(called, seconds, strict=True))
            device_map = balanced(units, [costs.get(n, 0.0) for n in range(len(units))], parts)
            self._place(model, device_map)
        return device_map

    def _place(self, model: nn.Module, device_map: DeviceMap) -> None:
        """Move modules to their devices, and register hooks that move their inputs."""
        self._remove_hooks()
        device_map.place(self.devices)
        looked_up = self.context.scope.looked_up
        for layer in every_layer(model):
            if isinstance(layer, OfShard) and layer.index in looked_up:
                marks: Any = layer
                looked_up[layer.index] = looked_up[layer.index].to(marks.weight.device)
        for unit, part in zip(device_map.units, device_map.parts, strict=True):
            if unit.module is None:
                continue
            enter = unit.module.register_forward_pre_hook(self._entering(part), with_kwargs=True)
            self._hooks.append(enter)
            if accelerator.is_accelerator(self.devices[part]):
                again = unit.module.register_forward_hook(self._first_again, always_call=True)
                self._hooks.append(again)
        self._hooks.append(model.register_forward_hook(self._leaving))

    def _entering(self, part: int) -> Callable[..., Any]:
        """The hook that moves the inputs of a module to the device of its part."""
        device = self.devices[part]

        def enter(module: nn.Module, args: Any, keywords: Any) -> Any:
            accelerator.use(device)  # new tensors of forward belong there too
            piece: InFlight | None = getattr(self._here, "piece", None)
            tensors = list(tensors_of_arguments((args, keywords)))
            if piece is not None and piece.is_forward and piece.part != part:
                piece.cross(part, tensors)
            if all(tensor.device == device for tensor in tensors):
                return None
            return map_arguments(lambda t: t.to(device, non_blocking=True), (args, keywords))

        return enter

    def _first_again(self, module: nn.Module, args: Any, output: Any) -> None:
        """Make the first device current again, whatever the module did."""
        accelerator.use(self.devices[0])

    def _leaving(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Move the output of the model to the first device, where the labels are."""
        first = self.devices[0]
        if all(tensor.device == first for tensor in tensors_in(output)):
            return None
        return map_tensors(lambda tensor: tensor.to(first, non_blocking=True), output)

    def _hold_scopes(self, model: nn.Module) -> None:
        """Collect the layers of each part that use the scope of the current piece."""
        parts: dict[int, int] = {}
        for unit, part in zip(self.device_map.units, self.device_map.parts, strict=True):
            parts |= {id(module): part for module in (unit.module or nn.Identity()).modules()}
        for module in every_layer(model):
            block = recomputed(module)
            holders = [h for h in (module, block) if isinstance(h, (OfShard, Recomputed))]
            if not holders or not self._pieces:
                continue
            if id(module) not in parts:
                raise RequestError(
                    asked=f"--strategy model-parallel:split={self.split}",
                    found=f"a {own_kind(module).__name__} that is in no part as a whole",
                    why="it follows the piece that goes through it, which is in one part at a time",
                    do="name it, or what it is in, in device_map(model); or leave split out",
                )
            self._holders[parts[id(module)]] += holders

    def _set_scopes(self, piece: InFlight, part: int) -> None:
        """Let the layers of a part use the scope of a piece."""
        for holder in self._holders[part]:
            holder.scope = piece.scope

    def _follow_whole(self) -> None:
        """Let all layers use the scope of the micro-batch again."""
        for holder in (holder for holders in self._holders for holder in holders):
            holder.scope = self.context.scope

    def prepare(self) -> None:
        for piece in self._pieces:
            piece.scope.looked_up = self.context.scope.looked_up

    def forward_backward(self, batch: Batch) -> Tally:
        with (
            Explained(TWO_DEVICES, _on_two_devices),
            Explained(UNRELATED, lambda _: unrelated_input(f"--strategy {self.name}")),
        ):
            return super().forward_backward(batch)

    def eval_step(self, data: Any, forward: Callable[[Callable[..., Any], Any], Any]) -> Any:
        with Explained(TWO_DEVICES, _on_two_devices):
            return super().eval_step(data, forward)

    def forward(self, data: Any) -> Any:
        """The output of a micro-batch, perhaps in pieces: threads on CPU, launches on CUDA."""
        scope, first = self.context.scope, self.devices[0]
        moment = scope.moment()
        shares = shares_of(scope.pieces, self.split) if self.cuts_micro_batches else ()
        if len(shares) <= 1:
            return super().forward(data)
        parts = scattered(data, moment.samples, shares, [first] * len(shares), CUT)
        if self._pieces:
            outputs = self._threaded(shares, parts)
        else:
            outputs = []
            for share, part in zip(shares, parts, strict=True):
                scope.enter(moment.step, share, samples_in(share))
                outputs.append(forward(self.task, self.step.call, part))
            scope.pieces, scope.samples = moment.pieces, moment.samples
        return gathered(outputs, shares, first, CUT)

    def _threaded(self, shares: list[Any], parts: list[Any]) -> list[Any]:
        pieces = self._pieces[: len(shares)]
        step, turns, is_grad = self.context.scope.step, Turns(len(shares)), torch.is_grad_enabled()
        for piece, share in reversed(list(zip(pieces, shares, strict=True))):
            piece.part = None  # the first piece last: the process draws as in `single`
            piece.scope.moments.clear()
            piece.scope.enter(step, share, samples_in(share))

        works = [
            partial(piece.run, turns, partial(self._run, piece, part, is_grad), is_forward=True)
            for piece, part in zip(pieces, parts, strict=True)
        ]
        try:
            outputs = in_threads([piece.thread for piece in pieces], works)
        finally:
            self._follow_whole()
        for piece in pieces:
            self.context.scope.merge_moments(piece.scope)
        return threaded_backward(pieces, outputs, self._follow_whole)

    def _run(self, piece: InFlight, part: Any, is_grad: bool) -> Any:
        """Run in the thread of the piece, with the grad mode and autocast of the caller."""
        self._here.piece = piece
        with torch.set_grad_enabled(is_grad), self.context.precision.autocast():
            return forward(self.task, self.step.call, part)

    def placement(self, *, updated: bool) -> list[Placed]:
        """The tensors of each part."""
        rows, part_of = super().placement(updated=updated), self.device_map.part_of
        return [dataclasses.replace(row, part=part_of(row.name)) for row in rows]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        """End the threads, and remove all hooks."""
        for piece in self._pieces:
            piece.thread.shutdown()
        self._remove_hooks()
        self._unchecked()
        super().close()


def _on_two_devices(line: str) -> RequestError:
    return RequestError(
        asked="--strategy model-parallel",
        found=f"tensors on two devices: {line}",
        why="what goes into a placed module is brought to its device, and the output to the "
        "first one; what forward or loss puts together itself is not",
        do="move one beside the other there (x.to(y.device)), or place what makes them in one "
        "part: device_map(model) of the task",
    )
