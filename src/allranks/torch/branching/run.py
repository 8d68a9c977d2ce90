"""Calls of branches that run together, as one differentiable function of what they are given."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import allranks.torch.accelerator as accelerator
from allranks.errors import RequestError
from allranks.torch.branching.plan import Branch
from allranks.torch.comm.comm import Comm
from allranks.torch.data.collate import map_arguments, tensors_of_arguments
from allranks.torch.model.layers import Scope
from allranks.torch.parallel.pipeline.links import Received
from allranks.torch.parallel.pipeline.tensor_meta import TensorMeta, flat, laid_out

# --- later ---------------------------------------------------------------------------------------
# A tensor that a branch has not computed yet: whoever looks at it waits, and gets the real one.


class Later(Tensor):
    """Stands for an output of a branch. Any operation on it calls `wait`, and takes what came.

    Only what reads tensors beneath `__torch_function__` sees the object itself: an
    `autograd.Function` that is applied to it. Its gradient would go nowhere, so it is refused.
    """

    found: Tensor | None
    wait: Callable[[], None]

    @staticmethod
    def make(
        like: Tensor, device: torch.device, wait: Callable[[], None], *, wants_gradient: bool
    ) -> Later:
        """One that is there (`found`) once `wait` has returned; `like` it but for the numbers.

        Read by mistake, it is NaN.
        """
        nan = math.nan if like.is_floating_point() or like.is_complex() else 0
        empty = torch.full((), nan, dtype=like.dtype, device=device).expand(like.shape)
        made: Any = Tensor._make_subclass(Later, empty, wants_gradient)
        made.found, made.wait = None, wait
        if wants_gradient:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse)
        found: Later = made
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*real(args), **real(dict(kwargs or {})))


def real(value: Any) -> Any:
    """The same with the real tensors; waits for those that are not there yet."""
    if any(type(tensor) is Later for tensor in tensors_of_arguments(value)):
        return map_arguments(_real, value)
    return value


def _real(tensor: Tensor) -> Tensor:
    if type(tensor) is not Later:
        return tensor
    if tensor.found is None:
        tensor.wait()
    assert tensor.found is not None
    return tensor.found


def wait_before(module: nn.Module, args: Any, keywords: Any) -> Any:
    """A hook before the forward of a module that holds no branch: it is given real tensors."""
    return real(args), real(keywords)


def _refuse(_: Tensor) -> None:
    raise RequestError(
        asked="--strategy branches",
        found="an autograd.Function that forward applies to what a branch has returned",
        why="it takes tensors without waiting for them, and its gradient would be lost",
        do="call it in a module of its own (an nn.Module whose forward applies it)",
    )


# --- drawing -------------------------------------------------------------------------------------
# What user code draws in a branch is apart from what it draws elsewhere.


@contextmanager
def generators_kept(scope: Scope) -> Iterator[None]:
    """Within, anything may be drawn; afterwards all generators are where they were.

    The rest of the model draws the same on every rank then, whichever branches ran there.
    """
    devices = list(filter(accelerator.is_accelerator, {scope.device, *scope.more_devices}))
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = [accelerator.rng_state(device) for device in devices]
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        for device, state in zip(devices, on_devices, strict=True):
            accelerator.set_rng_state(state, device)


# --- exchange ------------------------------------------------------------------------------------
# What the ranks of a line exchange for branches: what these return, and gradients of inputs.


class BranchExchange:
    """The ranks that run branches. `sent` and `reduced` count the bytes of whole tensors that steps
    have broadcast and all-reduced; `known` is what branches return, by what they are given.
    """

    def __init__(self, line: Comm) -> None:
        self.line = line
        self.kind, self.sent, self.reduced = "control", 0, 0
        self.known: dict[Hashable, TensorMeta] = {}

    @contextmanager
    def opened(self, kind: str) -> Iterator[None]:
        """Within, passes go through the model; what they send is of that kind."""
        self.kind = kind
        try:
            yield
        finally:
            self.kind = "control"

    def agree(
        self, keys: Sequence[tuple[Branch, Hashable]], own: dict[int, TensorMeta]
    ) -> list[TensorMeta]:
        """What each call returns; `own` are those of this rank, by number.

        Sends what was not known yet (`control`).
        """
        for number, looks in own.items():
            branch, key = keys[number]
            known = self.known.get(key)
            if known is not None and known != looks:
                raise _changed(branch, known, looks)
        if any(key not in self.known for _, key in keys):
            mine = json.dumps({number: looks.text for number, looks in own.items()})
            for text in self.line.gather_texts(mine):
                for number, told in json.loads(text).items():
                    self.known[keys[int(number)][1]] = TensorMeta(told)
        return [self.known[key] for _, key in keys]

    def spread(self, tensor: Tensor, home: int) -> None:
        """The tensor of rank `home` on all."""
        if self.kind == "gradients":
            self.sent += tensor.nbytes
        if tensor.numel():
            self.line.broadcast(flat(tensor), source=home, kind=self.kind)

    def sum_(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.kind == "gradients":
            self.reduced += tensor.nbytes
        self.line.all_reduce(tensor, self.kind).wait()


def _changed(branch: Branch, known: TensorMeta, looks: TensorMeta) -> RequestError:
    return RequestError(
        asked="--strategy branches",
        found=f"{branch.name!r} returned {looks.text} for inputs of the shapes for which it had "
        f"returned {known.text}"[:300],
        why="the other ranks have made room for what came the first time",
        do="let the shapes that a branch returns follow from the shapes of its inputs",
    )


@dataclass(frozen=True)
class Around:
    """What there is around the branches. `shared` are the weights that a branch has in common with
    the rest of the model, or with a branch of another rank: their gradients are summed, too.

    `running` is entered around the branches of this rank; `is_apart` says whether a backward pass
    is the task's own.
    """

    exchange: BranchExchange
    scope: Scope
    shared: dict[int, list[nn.Parameter]]
    running: Callable[[], AbstractContextManager[None]]
    is_apart: Callable[[], bool]


@dataclass
class BranchCall:
    """A call of a branch: what it was given, and what it is known to return."""

    branch: Branch
    forward: Callable[..., Any]
    arguments: Any
    key: Hashable
    versions: list[int]
    looks: TensorMeta | None = None
    laters: list[Later] = field(default_factory=list)
    value: Any = None

    def tensors(self) -> list[Tensor]:
        """What went in."""
        return list(tensors_of_arguments(self.arguments))

    def check_unwritten(self, when: str) -> None:
        """Raise `RequestError` where something has written into what went in."""
        if versions_of(self.tensors()) != self.versions:
            raise _written(self.branch, when)


class BranchRun:
    """One time that calls run together. `inputs` are the tensors that want a gradient, each once.

    `shared` are weights that the branches of these calls have in common with others.
    """

    def __init__(self, around: Around, calls: list[BranchCall], first: int) -> None:
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
        own = {number: TensorMeta.of(value) for number, value in values.items()}
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

    def _value(
        self, number: int, call: BranchCall, entered: dict[int, Tensor], *, grad: bool
    ) -> Any:
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
    def _leaving(call: BranchCall, tensor: Tensor) -> Tensor:
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
    def forward(ctx: Any, run: BranchRun, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
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


# --- calls ---------------------------------------------------------------------------------------
# Calls of branches that wait, and then run at the same time: each rank its own.
#
#     forward     each rank runs the calls of its branches; all outputs are broadcast
#     backward    each rank goes back through its branches; the gradients of what all branches were
#                 given are all-reduced, once
#
# A call returns `Later` tensors. The first operation on one of them closes the region: all calls
# that wait are run as one differentiable function, with its own backward passes within. Every rank
# goes through the same forward, so all of them close it at the same place. What a branch returns is
# told the first time that it is called with inputs of such shapes; that time nothing waits.


Mode = tuple[bool, bool, bool, torch.dtype]


class Calls:
    """The calls that wait on this rank; those before them in this forward pass are counted."""

    def __init__(self, around: Around) -> None:
        self.around, self.exchange = around, around.exchange
        self._waiting: list[BranchCall] = []
        self._made = 0
        self._mode: Mode | None = None
        self._anchor = torch.zeros((), requires_grad=True)  # what makes outputs differentiable

    def begin(self) -> None:
        """A forward pass begins."""
        self._made = 0
        self._waiting.clear()

    def call(self, branch: Branch, forward: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """What a branch returns: all of it may be `Later`."""
        if torch._C._current_graph_task_id() != -1:
            raise _again(branch)
        arguments, mode = real((args, keywords)), self._mode_now()
        if mode != self._mode:
            self.close()
            self._mode = mode
        tensors = list(tensors_of_arguments(arguments))
        looks = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        key = branch.number, branch.module.training, mode, looks, _words(arguments)
        call = BranchCall(branch, forward, arguments, key, versions_of(tensors))
        self._waiting.append(call)
        known = self.exchange.known.get(key)
        if known is None:
            self.close()
            return call.value
        call.looks = known
        device = self.exchange.line.device
        call.laters = [
            Later.make(like, device, self.close, wants_gradient=wants and mode[0])
            for like, wants in known.tensors(torch.device("meta"))
        ]
        return known.value(iter(call.laters))

    def close(self) -> None:
        """Run all calls that wait; every rank calls this at the same place of its forward."""
        calls, self._waiting = self._waiting, []
        if not calls:
            return
        assert self._mode is not None
        for call in calls:
            call.check_unwritten("after it is called")
        with self._mode_again(self._mode):
            run = BranchRun(self.around, calls, self._made)
            if torch.is_grad_enabled():
                apply: Any = Together.apply
                found = iter(apply(run, self._anchor, *run.inputs, *run.shared))
            else:
                found = iter(run.forward())
        self._made += len(calls)
        for call in calls:
            assert call.looks is not None
            own = [next(found) for _ in call.looks.rows]
            for later, tensor in zip(call.laters, own, strict=False):
                later.found = tensor
            call.value = call.looks.value(iter(own))

    def _mode_now(self) -> Mode:
        kind = self.exchange.line.device.type
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return grad, inference, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    @contextmanager
    def _mode_again(self, mode: Mode) -> Iterator[None]:
        grad, inference, casts, kind = mode
        device = self.exchange.line.device.type
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(device, kind, enabled=casts),
        ):
            yield


def _words(value: Any) -> Hashable:
    """What else may decide over what a branch returns: flags and words, where they stand."""
    if isinstance(value, Mapping):
        return tuple((str(key), _words(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_words, value))
    return value if isinstance(value, (bool, str, type(None))) else type(value).__name__


def _again(branch: Branch) -> RequestError:
    return RequestError(
        asked="activation checkpointing around a branch",
        found=f"{branch.name!r} is called again during backward",
        why="the ranks exchange what it returns, each time that it is called",
        do="checkpoint within the branch: blocks(model) of the task",
    )
