"""`pull=layers`: forward begins with the first layers while the weights of the last ones come.

A server sends its weights as they lie, so first layers come first; a thread for each server puts
them where they belong. Before which call of a module a weight is needed, the first forward pass
shows, from weights that are all there: whatever operation reads a weight is seen where torch
dispatches it. Later passes wait before each of these calls for what it needs, and for all as soon
as they call other modules, or the same ones in another order. Before the loss all are there. So
what would read weights too early is a forward pass that makes the same calls and reads, between
two of them, a weight that it used to read later on.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allranks.launcher.nodes.channel import Disconnected
from allranks.torch.parameter_server.flat import Flat
from allranks.torch.parameter_server.links import Links


class Arriving:
    """The weights that come into `flats`, one for each server, and are read as `parameters`."""

    def __init__(
        self, flats: Sequence[Flat], parameters: Sequence[nn.Parameter], links: Links
    ) -> None:
        self._flats, self._links = flats, links
        self._whole = [p.detach() for p in parameters]
        self._pieces: list[list[tuple[int, int, int]]] = [[] for _ in parameters]
        for server, flat in enumerate(flats):
            for number, piece in enumerate(flat.layout.pieces):
                stop = flat.layout.starts[number] + flat.views[number].nbytes
                self._pieces[piece.position].append((server, number, stop))
        self._changed = threading.Condition()
        self._here = [flat.layout.nbytes for flat in flats]
        self._coming: list[Future[None]] = []
        self._missing = set[int]()
        self._threads = ThreadPoolExecutor(len(flats), "allranks-weights")

    def come(self, server: int, memory: memoryview) -> None:
        """From now on the weights of a server come into this memory."""
        self._here[server] = 0
        self._missing.update(piece.position for piece in self._flats[server].layout.pieces)
        self._coming.append(self._threads.submit(self._receive, server, memory))

    def _receive(self, server: int, memory: memoryview) -> None:
        def came(nbytes: int) -> None:
            with self._changed:
                self._here[server] = nbytes
                self._changed.notify()

        try:
            self._links.fill(server, memory, came)
        finally:
            with self._changed:
                self._changed.notify()

    @torch.no_grad()
    def wait_for(self, positions: Iterable[int]) -> None:
        """Have these weights; raises `Disconnected` where they do not come."""
        for position in self._missing.intersection(positions):
            for server, number, stop in self._pieces[position]:
                self._wait(server, stop)
                self._flats[server].write_piece(number, self._whole[position])
            self._missing.discard(position)

    def wait_for_all(self) -> None:
        """Have all weights."""
        self.wait_for(range(len(self._pieces)))
        for one in self._coming:
            one.result()
        self._coming.clear()

    def _wait(self, server: int, stop: int) -> None:
        with self._changed:
            while self._here[server] < stop:
                for one in self._coming:
                    if one.done():
                        one.result()  # raises for one that has failed
                self._changed.wait(1.0)

    def close(self) -> None:
        """The servers are left."""
        if self._coming:
            self._links.shut()
        for one in self._coming:
            with suppress(Disconnected):
                one.result()
        self._coming.clear()
        self._missing.clear()
        self._threads.shutdown()


class FirstLayers:
    """Forward passes of `model` that wait for the weights that they need next."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], arriving: Arriving
    ) -> None:
        self._parameters, self._arriving = parameters, arriving
        self._calls: list[nn.Module | None] = []
        self._needs: list[list[int]] = []
        """What is needed before each of the calls, beside what was before; first before any."""
        self._reads: _Reads | None = None
        self._counts = list[int]()
        self._is_on, self._at = False, 0
        self._hooks = [
            module.register_forward_pre_hook(self._before_call)
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # it has no hooks
        ]

    def __call__(self, forward: Callable[[], Any]) -> Any:
        """A forward pass that waits for what it needs; all weights are there when it is over."""
        self._is_on, self._at = True, 0
        try:
            if not self._needs:
                self._arriving.wait_for_all()
                return self._watched(forward)
            self._arriving.wait_for(self._needs[0])
            output = forward()
            self._arriving.wait_for_all()
            return output
        finally:
            self._is_on = False

    def _watched(self, forward: Callable[[], Any]) -> Any:
        self._calls, self._counts = [None], [0]
        self._reads = reads = _Reads(self._parameters)
        try:
            with reads:
                output = forward()
        finally:
            self._reads = None
        order = list(reads.found)
        ends = [*self._counts[1:], len(order)]
        self._needs = [order[a:b] for a, b in zip(self._counts, ends, strict=True)]
        self._needs[0] += [n for n in range(len(self._parameters)) if n not in reads.found]
        return output

    def _before_call(self, module: nn.Module, _: Any) -> None:
        if not self._is_on:
            return
        if self._reads is not None:
            self._calls.append(module)
            self._counts.append(len(self._reads.found))
            return
        self._at += 1
        if self._at < len(self._calls) and self._calls[self._at] is module:
            self._arriving.wait_for(self._needs[self._at])
        else:
            self._arriving.wait_for_all()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Reads(TorchDispatchMode):
    """Which parameters operations read: their positions, in the order of their first reading."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, None] = {}
        self._held = sorted((p.data_ptr(), n, p.nbytes) for n, p in enumerate(parameters))
        self._starts = [start for start, *_ in self._held]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._see(tensor.data_ptr())
        return func(*args, **(kwargs or {}))

    def _see(self, address: int) -> None:
        at = bisect_right(self._starts, address) - 1
        if at >= 0:
            start, position, nbytes = self._held[at]
            if address < start + nbytes:
                self.found[position] = None
