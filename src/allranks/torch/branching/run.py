"""Calls of branches that run in parallel, as one differentiable function of their inputs."""

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
from allranks.torch.parallel.pipeline.links import Received, TensorMeta, flat, laid_out

# --- lazy tensors --------------------------------------------------------------------------------
# A tensor that a branch has not computed yet: any operation on it waits, and uses the real one.


class LazyTensor(Tensor):
    """Stands for an output of a branch. Any operation on it calls `wait`, and uses the real one.

    Only an `autograd.Function`, which reads tensors beneath `__torch_function__`, gets the object
    itself. Its gradient would be lost, so it is refused.
    """

    real_value: Tensor | None
    wait: Callable[[], None]

    @staticmethod
    def make(
        like: Tensor, device: torch.device, wait: Callable[[], None], *, wants_gradient: bool
    ) -> LazyTensor:
        """A lazy tensor with the metadata of `like`; `wait` sets its `real_value`.

        Read by mistake, it is NaN.
        """
        nan = math.nan if like.is_floating_point() or like.is_complex() else 0
        empty = torch.full((), nan, dtype=like.dtype, device=device).expand(like.shape)
        lazy: Any = Tensor._make_subclass(LazyTensor, empty, wants_gradient)
        lazy.real_value, lazy.wait = None, wait
        if wants_gradient:
            with torch._C.DisableTorchFunctionSubclass():
                lazy.register_hook(_refuse)
        output: LazyTensor = lazy
        return output

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*real(args), **real(dict(kwargs or {})))


def real(value: Any) -> Any:
    """The same with real tensors; waits for those that are not computed yet."""
    if any(type(tensor) is LazyTensor for tensor in tensors_of_arguments(value)):
        return map_arguments(_real, value)
    return value


def _real(tensor: Tensor) -> Tensor:
    if type(tensor) is not LazyTensor:
        return tensor
    if tensor.real_value is None:
        tensor.wait()
    assert tensor.real_value is not None
    return tensor.real_value


def wait_before(module: nn.Module, args: Any, keywords: Any) -> Any:
    """A hook before the forward of a module without branches: makes its inputs real tensors."""
    return real(args), real(keywords)


def _refuse(_: Tensor) -> None:
    raise RequestError(
        asked="--strategy branches",
        found="an autograd.Function that forward applies to what a branch has returned",
        why="it does not wait for the real tensors, and its gradient would be lost",
        do="call it in a module of its own (an nn.Module whose forward applies it)",
    )


# --- drawing -------------------------------------------------------------------------------------
# Draws of user code in a branch do not affect draws elsewhere.


@contextmanager
def generators_kept(scope: Scope) -> Iterator[None]:
    """Restores the states of all generators afterwards.

    So the trunk draws the same on every rank, whichever branches ran there.
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
# The exchanges between the ranks of a line: outputs of branches, and gradients of inputs.


class BranchExchange:
    """The ranks that run branches. `broadcast_bytes` and `reduced_bytes` count whole tensors of
    steps; `known` has the metadata of the outputs of branches, by that of their inputs.
    """

    def __init__(self, line: Comm) -> None:
        self.line = line
        self.kind, self.broadcast_bytes, self.reduced_bytes = "control", 0, 0
        self.known: dict[Hashable, TensorMeta] = {}

    @contextmanager
    def opened(self, kind: str) -> Iterator[None]:
        """Within, passes send messages of this kind."""
        self.kind = kind
        try:
            yield
        finally:
            self.kind = "control"

    def agree(
        self, keys: Sequence[tuple[Branch, Hashable]], local: dict[int, TensorMeta]
    ) -> list[TensorMeta]:
        """The output metadata of each call; `local` has those of this rank, by number.

        All-gathers metadata that are not known yet (`control`).
        """
        for number, looks in local.items():
            branch, key = keys[number]
            known = self.known.get(key)
            if known is not None and known != looks:
                raise RequestError(
                    asked="--strategy branches",
                    found=f"{branch.name!r} returned {looks.text} for inputs of the shapes for "
                    f"which it had returned {known.text}"[:300],
                    why="the other ranks have allocated tensors of the first shapes",
                    do="let the shapes of a branch's outputs depend only on the shapes of its "
                    "inputs",
                )
        if any(key not in self.known for _, key in keys):
            mine = json.dumps({number: looks.text for number, looks in local.items()})
            for text in self.line.gather_texts(mine):
                for number, meta in json.loads(text).items():
                    self.known[keys[int(number)][1]] = TensorMeta(meta)
        return [self.known[key] for _, key in keys]

    def broadcast(self, tensor: Tensor, home: int) -> None:
        """Broadcast the tensor of rank `home`."""
        if self.kind == "gradients":
            self.broadcast_bytes += tensor.nbytes
        if tensor.numel():
            self.line.broadcast(flat(tensor), source=home, kind=self.kind)

    def sum_(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.kind == "gradients":
            self.reduced_bytes += tensor.nbytes
        self.line.all_reduce(tensor, self.kind).wait()


@dataclass(frozen=True)
class BranchContext:
    """The context of branches. `shared` are weights that a branch shares with the trunk, or with a
    branch of another rank: their gradients are summed, too.

    `running` is the context manager for the branches of this rank; `is_apart` says whether a
    backward pass is the task's own.
    """

    exchange: BranchExchange
    scope: Scope
    shared: dict[int, list[nn.Parameter]]
    running: Callable[[], AbstractContextManager[None]]
    is_apart: Callable[[], bool]


@dataclass
class BranchCall:
    """A call of a branch, with its arguments and the known metadata of its outputs."""

    branch: Branch
    forward: Callable[..., Any]
    arguments: Any
    key: Hashable
    versions: list[int]
    looks: TensorMeta | None = None
    lazy_outputs: list[LazyTensor] = field(default_factory=list)
    value: Any = None

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return list(tensors_of_arguments(self.arguments))

    def check_unwritten(self, when: str) -> None:
        """Raise `RequestError` if an argument was written in place."""
        if versions_of(self.tensors()) != self.versions:
            raise RequestError(
                asked="--strategy branches",
                found=f"what goes into {self.branch.name!r} is written in place {when}",
                why="other ranks have their own copy of it, and branches run after all have been "
                "called",
                do="write into a copy: no inplace=True, no x += … on the inputs of branches",
            )


class BranchRun:
    """One parallel run of calls. `inputs` are the tensors that require a gradient, each once.

    `shared` are weights that the branches of these calls share with others.
    """

    def __init__(self, around: BranchContext, calls: list[BranchCall], first: int) -> None:
        self.around, self.calls, self._first = around, calls, first
        wanting = [t for call in calls for t in call.tensors() if t.requires_grad]
        self.inputs = list({id(t): t for t in wanting}.values())
        used = {call.branch.number: call.branch for call in calls}
        self._branches = [used[number] for number in sorted(used)]
        weights = [p for branch in self._branches for p in around.shared[branch.number]]
        self.shared = list({id(p): p for p in weights if p.requires_grad}.values())
        self._received = {id(t): Received(t.detach()) for t in self.inputs}
        self._local_outputs: list[tuple[int, Tensor]] = []
        self.wants: list[bool] = []

    def forward(self) -> list[Tensor]:
        """The outputs of all calls, in order. Broadcasts them."""
        around, exchange = self.around, self.around.exchange
        values: dict[int, Any] = {}
        entered: dict[int, Tensor] = {}
        grad = torch.is_grad_enabled()
        with around.running(), generators_kept(around.scope):
            for number, call in enumerate(self.calls):
                if call.branch.home == exchange.line.rank:
                    values[number] = self._value(number, call, entered, grad=grad)
        local = {number: TensorMeta.of(value) for number, value in values.items()}
        looks = exchange.agree([(call.branch, call.key) for call in self.calls], local)
        outputs: list[Tensor] = []
        for number, call in enumerate(self.calls):
            call.looks = looks[number]
            if number in values:
                tensors = list(tensors_of_arguments(values[number]))
                self._local_outputs += [(len(outputs) + at, t) for at, t in enumerate(tensors)]
                outputs += [self._own_copy(call, tensor) for tensor in tensors]
            else:
                outputs += [tensor for tensor, _ in call.looks.tensors(exchange.line.device)]
            self.wants += [grad and bool(row[3]) for row in call.looks.rows]
            for tensor in outputs[len(outputs) - len(call.looks.rows) :]:
                exchange.broadcast(tensor, call.branch.home)
        self.calls = []  # they reference the outputs: avoid a cycle
        return outputs

    def _value(
        self, number: int, call: BranchCall, entered: dict[int, Tensor], *, grad: bool
    ) -> Any:
        """The output of a branch of this rank, detached from the graph around it."""

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
    def _own_copy(call: BranchCall, tensor: Tensor) -> Tensor:
        """An output in the layout of all ranks, in its own memory."""
        output = laid_out(tensor.detach())
        memory = {t.untyped_storage().data_ptr() for t in call.tensors() if t.numel()}
        return output.clone() if output.untyped_storage().data_ptr() in memory else output

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of `inputs` and of `shared`. All-reduces them."""
        pairs = [(t, gradients[at]) for at, t in self._local_outputs if t.requires_grad]
        pairs = [(t, gradient) for t, gradient in pairs if gradient is not None]
        with self._separate_weights() as of_weights:
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            of_inputs = [self._received[id(t)].gradient for t in self.inputs]
        return self._summed([*of_inputs, *of_weights], [*self.inputs, *self.shared])

    @contextmanager
    def _separate_weights(self) -> Iterator[list[Tensor | None]]:
        """Within, shared weights have no gradient; afterwards the list has those of this pass.

        In a backward pass of the task's own, no weight of the branches keeps a gradient of it.
        """
        of_task: list[nn.Parameter] = []
        if self.around.is_apart():
            of_task = [p for branch in self._branches for p in branch.module.parameters()]
        saved = [(p, p.grad) for p in {id(p): p for p in [*self.shared, *of_task]}.values()]
        for parameter, _ in saved:
            parameter.grad = None
        gradients: list[Tensor | None] = []
        try:
            yield gradients
        finally:
            gradients += [p.grad for p in self.shared]
            for parameter, gradient in saved:
                parameter.grad = gradient

    def _summed(self, gradients: list[Tensor | None], of: list[Tensor]) -> list[Tensor | None]:
        """The sum over the ranks of each gradient; `None` if no rank has one."""
        sums: list[Tensor | None] = [None] * len(of)
        for kind in dict.fromkeys(t.dtype for t in of):
            at = [number for number, t in enumerate(of) if t.dtype == kind]
            local = [gradients[number] for number in at]
            parts = [
                of[n].new_zeros(of[n].numel()) if g is None else g.detach().reshape(-1)
                for n, g in zip(at, local, strict=True)
            ]
            there = parts[0].new_tensor([float(g is not None) for g in local])
            whole = torch.cat([*parts, there])
            self.around.exchange.sum_(whole)
            *totals, there = whole.split([part.numel() for part in parts] + [len(at)])
            with self.around.exchange.line.reading():
                flags = there.abs().tolist()
            for number, total, is_there in zip(at, totals, flags, strict=True):
                sums[number] = total.view(of[number].shape) if is_there else None
        return sums


class ParallelCalls(torch.autograd.Function):
    """The calls of a region as one function of the inputs of the branches."""

    @staticmethod
    def forward(ctx: Any, run: BranchRun, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            outputs = run.forward()
        pairs = zip(outputs, run.wants, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, wants in pairs if not wants))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.run.backward(gradients))


def versions_of(tensors: list[Tensor]) -> list[int]:
    """The version counter of each tensor."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


# --- calls ---------------------------------------------------------------------------------------
# Calls of branches are deferred, and then run in parallel, each rank its own.
#
#     forward     each rank runs the calls of its branches; all outputs are broadcast
#     backward    each rank runs that of its branches; the gradients of the inputs of all branches
#                 are all-reduced, once
#
# A call returns lazy tensors. The first operation on one of them closes the region: all deferred
# calls run as one differentiable function, with their own backward passes within. All ranks run the
# same forward, so they close it at the same place. The first call of a branch with inputs of new
# shapes exchanges the metadata of its outputs, and is not deferred.


Mode = tuple[bool, bool, bool, torch.dtype]


class Calls:
    """The deferred calls on this rank, and a count of the calls in this forward pass."""

    def __init__(self, around: BranchContext) -> None:
        self.around, self.exchange = around, around.exchange
        self._waiting: list[BranchCall] = []
        self._calls_made = 0
        self._mode: Mode | None = None
        self._anchor = torch.zeros((), requires_grad=True)  # makes outputs differentiable

    def begin(self) -> None:
        """Begin a forward pass."""
        self._calls_made = 0
        self._waiting.clear()

    def call(self, branch: Branch, forward: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """The output of a branch; its tensors may be lazy."""
        if torch._C._current_graph_task_id() != -1:
            raise RequestError(
                asked="activation checkpointing around a branch",
                found=f"{branch.name!r} is called again during backward",
                why="the ranks exchange its outputs at each call",
                do="checkpoint within the branch: blocks(model) of the task",
            )
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
        call.lazy_outputs = [
            LazyTensor.make(like, device, self.close, wants_gradient=wants and mode[0])
            for like, wants in known.tensors(torch.device("meta"))
        ]
        return known.value(iter(call.lazy_outputs))

    def close(self) -> None:
        """Run all deferred calls; all ranks call this at the same place of the forward."""
        calls, self._waiting = self._waiting, []
        if not calls:
            return
        assert self._mode is not None
        for call in calls:
            call.check_unwritten("after it is called")
        with self._mode_again(self._mode):
            run = BranchRun(self.around, calls, self._calls_made)
            if torch.is_grad_enabled():
                apply: Any = ParallelCalls.apply
                outputs = iter(apply(run, self._anchor, *run.inputs, *run.shared))
            else:
                outputs = iter(run.forward())
        self._calls_made += len(calls)
        for call in calls:
            assert call.looks is not None
            values = [next(outputs) for _ in call.looks.rows]
            for lazy, tensor in zip(call.lazy_outputs, values, strict=False):
                lazy.real_value = tensor
            call.value = call.looks.value(iter(values))

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
    """Other arguments on which the output may depend: flags and strings, in their positions."""
    if isinstance(value, Mapping):
        return tuple((str(key), _words(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_words, value))
    return value if isinstance(value, (bool, str, type(None))) else type(value).__name__
