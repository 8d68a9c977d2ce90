"""Calls of branches that wait, and then run at the same time: each rank its own.

    forward     each rank runs the calls of its branches; all outputs are broadcast
    backward    each rank goes back through its branches; the gradients of what all branches were
                given are all-reduced, once

A call returns `Later` tensors. The first operation on one of them closes the region: all calls that
wait are run as one differentiable function, with its own backward passes within. Every rank goes
through the same forward, so all of them close it at the same place. What a branch returns is told
the first time that it is called with inputs of such shapes; that time nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from allranks.errors import RequestError
from allranks.torch.branching.later import Later, real
from allranks.torch.branching.plan import Branch
from allranks.torch.branching.run import Around, Call, Run, Together, versions_of
from allranks.torch.data.collate import tensors_of_arguments

Mode = tuple[bool, bool, bool, torch.dtype]


class Calls:
    """The calls that wait on this rank; those before them in this forward pass are counted."""

    def __init__(self, around: Around) -> None:
        self.around, self.exchange = around, around.exchange
        self._waiting: list[Call] = []
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
        call = Call(branch, forward, arguments, key, versions_of(tensors))
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
            run = Run(self.around, calls, self._made)
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
