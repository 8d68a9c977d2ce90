"""Pieces of a micro-batch in flight through the parts of one model, in one process.

On CPU each piece has a thread, and takes the parts in turn:

    part 0   | piece 0 | piece 1 | piece 2 |
    part 1             | piece 0 | piece 1 | piece 2 |        and back again in backward

A part works on one piece at a time, and takes the pieces in their order, so that gradients add up
in one order whenever they are computed. The loss is of all pieces together: where it begins its
backward pass, each piece goes on with its own. On CUDA no thread is needed: what one thread
launches, piece after piece, the devices carry out side by side.
Huang et al. 2019, GPipe, arXiv 1811.06965, without its stages being a sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from allranks.torch.data.collate import replaced, tensors_in
from allranks.torch.model.layers import Scope, computed_again

END = 2**31


class Turns:
    """Who is at which part: one piece at a time, the pieces in order on each leg of their way."""

    def __init__(self, pieces: int) -> None:
        self._changed = threading.Condition()
        self._legs = [-1] * pieces
        self._at: dict[int, int] = {}

    def take(self, piece: int, part: int) -> None:
        """Leave the part where the piece is, and wait for its turn at another one."""
        with self._changed:
            leg = self._legs[piece] + 1
            self._go(piece, leg)
            self._changed.wait_for(lambda: self._is_free(piece, part, leg))
            self._at[part] = piece

    def end(self, piece: int) -> None:
        """The piece has come to its end, or has failed: nobody waits for it any more."""
        with self._changed:
            self._go(piece, END)

    def _go(self, piece: int, leg: int) -> None:
        self._at = {part: other for part, other in self._at.items() if other != piece}
        self._legs[piece] = leg
        self._changed.notify_all()

    def _is_free(self, piece: int, part: int, leg: int) -> bool:
        return part not in self._at and (piece == 0 or self._legs[piece - 1] > leg)


class InFlight:
    """A piece on its way: its thread, its scope, and the part where it is."""

    def __init__(self, number: int, scope: Scope, entered: Callable[[InFlight, int], None]) -> None:
        self.number, self.scope, self._entered = number, scope, entered
        self._name = f"piece-{number}"
        # always the same one, as for `dp`; until it is asked, its first product has other threads
        self.thread = ThreadPoolExecutor(1, self._name, torch.get_num_threads)
        self.part: int | None = None
        self.turns: Turns | None = None
        self.is_forward = True
        self._drawn: dict[int, int] = {}

    def go_to(self, part: int) -> None:
        """Take the turn at a part, unless it is there."""
        if part == self.part:
            return
        assert self.turns is not None
        self.turns.take(self.number, part)
        self.part = part
        self._entered(self, part)

    def cross(self, part: int, tensors: list[Tensor]) -> None:
        """Go to a part with what goes into it; backward goes back to where that was made."""
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
        """Whether the thread that asks is that of this piece."""
        return threading.current_thread().name == f"{self._name}_0"

    def run(self, turns: Turns, work: Callable[[], Any], *, is_forward: bool) -> Any:
        """`work`, in turns with the other pieces. Backward begins where forward has ended."""
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


def in_threads(pieces: Sequence[InFlight], works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What all of the works return; raises what the first that failed did, once all are done."""
    futures: list[Future[Any]] = [
        piece.thread.submit(work) for piece, work in zip(pieces, works, strict=True)
    ]
    wait(futures)
    return [future.result() for future in futures]


def apart(pieces: Sequence[InFlight], outputs: list[Any], done: Callable[[], None]) -> list[Any]:
    """The outputs of the pieces, such that backward goes through each piece in its own thread.

    `done` is called once they are through.
    """
    tensors = [[t for t in tensors_in(output) if t.requires_grad] for output in outputs]
    if not any(tensors):
        return outputs
    apply: Any = _Backward.apply
    anchor = torch.zeros((), requires_grad=True)  # what makes the outputs differentiable
    flat = apply(pieces, tensors, done, anchor, *(t.detach() for own in tensors for t in own))
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
        given, turns = iter(gradients), Turns(len(ctx.pieces))
        works: list[Callable[[], Any]] = []
        for piece, own in zip(ctx.pieces, ctx.outputs, strict=True):
            pairs = [(t, g) for t, g in ((t, next(given)) for t in own) if g is not None]
            works.append(_backward_of(piece, turns, pairs))
        try:
            in_threads(ctx.pieces, works)
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
