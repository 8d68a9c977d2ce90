"""Buffers that the model itself writes in its forward pass: kept, so that a bad step can be undone.

The engine's own (BatchNorm) change only with an update; these change before anybody knows whether
the step is good. Which ones are written is seen in the first step, and watched from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allranks.on_torch.data import Batch
from allranks.on_torch.layers import shard_norms

Copies = list[tuple[nn.Module, str, Tensor, Tensor]]
"""Module, name in it, the buffer itself, and a copy of what it held."""


class UserBuffers:
    """`begin` and `end` around the forward passes of a step; `undo` puts back what they wrote.

    A buffer that is written for the first time in a later step is put back from the step after it
    on. Costs nothing in a model whose buffers are all the engine's.
    """

    def __init__(self, model: nn.Module) -> None:
        own = {id(buffer) for norm in shard_norms(model) for buffer in norm.buffers()}
        self._slots = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in own
        ]
        self.written: set[str] = set()
        self._watched = self._slots
        self._kept: Copies = []
        self._before: list[tuple[Tensor | None, int]] = []

    def copies(self) -> Copies:
        """What all of these buffers hold now, for `put_back`."""
        return _copies(self._slots)

    def begin(self) -> None:
        """A step begins."""
        if not self._slots:
            return
        self._kept = _copies(self._watched)
        self._before = [_version(module, name) for _, module, name in self._slots]

    def end(self, batch: Batch) -> None:
        """The forward passes of the step are done."""
        if not self._slots:
            return
        for (full, module, name), (buffer, version) in zip(self._slots, self._before, strict=True):
            if module._buffers[name] is not buffer or _version(module, name)[1] != version:
                self.written.add(full)
        if batch.own_samples:
            self._watched = [slot for slot in self._slots if slot[0] in self.written]

    def undo(self) -> None:
        """The buffers hold what they held before the step."""
        put_back(self._kept)


def _version(module: nn.Module, name: str) -> tuple[Tensor | None, int]:
    """A buffer, and how often it was written."""
    buffer = module._buffers[name]
    return buffer, -1 if buffer is None else buffer._version


def _copies(slots: list[tuple[str, nn.Module, str]]) -> Copies:
    found = ((module, name, module._buffers[name]) for _, module, name in slots)
    return [(module, name, b, b.detach().clone()) for module, name, b in found if b is not None]


@torch.no_grad()
def put_back(copies: Copies) -> None:
    """Let every buffer be the tensor that it was, and hold what it held."""
    for module, name, buffer, content in copies:
        buffer.copy_(content)
        module._buffers[name] = buffer
