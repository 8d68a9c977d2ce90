"""Calls of branches that run together, as one differentiable function of what they are given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from allranks.errors import RequestError
from allranks.torch.branching.drawing import generators_kept
from allranks.torch.branching.exchange import Exchange
from allranks.torch.branching.later import Later
from allranks.torch.branching.plan import Branch
from allranks.torch.data.collate import map_arguments, tensors_of_arguments
from allranks.torch.model.layers import Scope
from allranks.torch.parallel.pipeline.links import Received
from allranks.torch.parallel.pipeline.tensor_meta import Looks, laid_out


@dataclass(frozen=True)
class Around:
    """What there is around the branches. `shared` are the weights that a branch has in common with
    the rest of the model, or with a branch of another rank: their gradients are summed, too.

    `running` is entered around the branches of this rank; `is_apart` says whether a backward pass
    is the task's own.
    """

    exchange: Exchange
    scope: Scope
    shared: dict[int, list[nn.Parameter]]
    running: Callable[[], AbstractContextManager[None]]
    is_apart: Callable[[], bool]


@dataclass
class Call:
    """A call of a branch: what it was given, and what it is known to return."""

    branch: Branch
    forward: Callable[..., Any]
    arguments: Any
    key: Hashable
    versions: list[int]
    looks: Looks | None = None
    laters: list[Later] = field(default_factory=list)
    value: Any = None

    def tensors(self) -> list[Tensor]:
        """What went in."""
        return list(tensors_of_arguments(self.arguments))

    def check_unwritten(self, when: str) -> None:
        """Raise `RequestError` where something has written into what went in."""
        if versions_of(self.tensors()) != self.versions:
            raise _written(self.branch, when)


class Run:
    """One time that calls run together. `inputs` are the tensors that want a gradient, each once.

    `shared` are weights that the branches of these calls have in common with others.
    """

    def __init__(self, around: Around, calls: list[Call], first: int) -> None:
        self.around, self.calls, self._first = around, calls, first
        wanting = [t for call in calls for t in call.tensors() if t.requires_grad]
        self.inputs = list({id(t): t for t in wanting}.values())
        used = {call.branch.number: call.branch for call in calls}
        self._branches = [used[number] for number in sorted(used)]
        weights = [p for branch in self._branches for p in around.shared[branch.number]]
        self.shared = list({id(p): p for p in weights if p.requires_grad}.values())
        self._received = {id(t): Received(t.detach()) for t in self.inputs}
        self._own: list[tuple[int, Tensor]] = []
        self.wants: list[bool] = []

    def forward(self) -> list[Tensor]:
        """All outputs of all calls, one after another. Broadcasts them."""
        around, exchange = self.around, self.around.exchange
        values: dict[int, Any] = {}
        entered: dict[int, Tensor] = {}
        grad = torch.is_grad_enabled()
        with around.running(), generators_kept(around.scope):
            for number, call in enumerate(self.calls):
                if call.branch.home == exchange.line.rank:
                    values[number] = self._value(number, call, entered, grad=grad)
        own = {number: Looks.of(value) for number, value in values.items()}
        looks = exchange.agree([(call.branch, call.key) for call in self.calls], own)
        found: list[Tensor] = []
        for number, call in enumerate(self.calls):
            call.looks = looks[number]
            if number in values:
                tensors = list(tensors_of_arguments(values[number]))
                self._own += [(len(found) + at, t) for at, t in enumerate(tensors)]
                found += [self._leaving(call, tensor) for tensor in tensors]
            else:
                found += [tensor for tensor, _ in call.looks.tensors(exchange.line.device)]
            self.wants += [grad and bool(row[3]) for row in call.looks.rows]
            for tensor in found[len(found) - len(call.looks.rows) :]:
                exchange.spread(tensor, call.branch.home)
        self.calls = []  # they hold what comes of this: no cycle
        return found

    def _value(self, number: int, call: Call, entered: dict[int, Tensor], *, grad: bool) -> Any:
        """What a branch of this rank returns for its inputs, apart from the graph around it."""

        def enter(tensor: Tensor) -> Tensor:
            if not grad or not tensor.requires_grad:
                return tensor
            if id(tensor) not in entered:
                entered[id(tensor)] = self._received[id(tensor)].entering()
            return entered[id(tensor)]

        args, keywords = map_arguments(enter, call.arguments)
        if self.around.scope.pieces:
            self.around.scope.key_stage(1 + self._first + number)
        value = call.forward(*args, **keywords)
        call.check_unwritten("by it")
        return value

    @staticmethod
    def _leaving(call: Call, tensor: Tensor) -> Tensor:
        """An output as all ranks have it: laid out alike, and in memory of its own."""
        found = laid_out(tensor.detach())
        memory = {t.untyped_storage().data_ptr() for t in call.tensors() if t.numel()}
        return found.clone() if found.untyped_storage().data_ptr() in memory else found

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of `inputs` and of `shared`. All-reduces them."""
        pairs = [(t, gradients[at]) for at, t in self._own if t.requires_grad]
        pairs = [(t, gradient) for t, gradient in pairs if gradient is not None]
        with self._weights_apart() as of_weights:
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            of_inputs = [self._received[id(t)].gradient for t in self.inputs]
        return self._summed([*of_inputs, *of_weights], [*self.inputs, *self.shared])

    @contextmanager
    def _weights_apart(self) -> Iterator[list[Tensor | None]]:
        """Within, weights that others use too have no gradient; the list has what they got, after.

        In a backward pass of the task's own nothing is left on the weights of the branches.
        """
        own: list[nn.Parameter] = []
        if self.around.is_apart():
            own = [p for branch in self._branches for p in branch.module.parameters()]
        kept = [(p, p.grad) for p in {id(p): p for p in [*self.shared, *own]}.values()]
        for parameter, _ in kept:
            parameter.grad = None
        found: list[Tensor | None] = []
        try:
            yield found
        finally:
            found += [p.grad for p in self.shared]
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _summed(self, gradients: list[Tensor | None], of: list[Tensor]) -> list[Tensor | None]:
        """The sum over the ranks of each gradient; `None` where no rank has one."""
        found: list[Tensor | None] = [None] * len(of)
        for kind in dict.fromkeys(t.dtype for t in of):
            at = [number for number, t in enumerate(of) if t.dtype == kind]
            own = [gradients[number] for number in at]
            parts = [
                of[n].new_zeros(of[n].numel()) if g is None else g.detach().reshape(-1)
                for n, g in zip(at, own, strict=True)
            ]
            there = parts[0].new_tensor([float(g is not None) for g in own])
            whole = torch.cat([*parts, there])
            self.around.exchange.sum_(whole)
            *sums, there = whole.split([part.numel() for part in parts] + [len(at)])
            with self.around.exchange.line.reading():
                flags = there.abs().tolist()
            for number, total, is_there in zip(at, sums, flags, strict=True):
                found[number] = total.view(of[number].shape) if is_there else None
        return found


class Together(torch.autograd.Function):
    """The calls of a region as one function of what the branches are given."""

    @staticmethod
    def forward(ctx: Any, run: Run, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            found = run.forward()
        pairs = zip(found, run.wants, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, wants in pairs if not wants))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.run.backward(gradients))


def versions_of(tensors: list[Tensor]) -> list[int]:
    """How often each was written."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _written(branch: Branch, when: str) -> RequestError:
    return RequestError(
        asked="--strategy branches",
        found=f"what goes into {branch.name!r} is written in place {when}",
        why="other ranks have a tensor of their own there, and branches run when all are called",
        do="write into a copy: no inplace=True, no x += … on what branches are given",
    )
