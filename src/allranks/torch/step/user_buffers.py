"""Buffers that the model writes in its forward pass: copied, so that a bad step can be undone.

The engine's own buffers (BatchNorm) change only with an update. These change before it is known
whether the step is good. The first step shows which ones are written; they are watched from then
on. In a Keras model, whose layers have no buffers, the weights that are not trained are watched.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.data.batch import Batch
from allranks.torch.model.layers import every_layer, shard_norms

Holder = dict[str, Tensor | None]
"""Where buffers are by name: those of one module, or of a Keras model."""

Copy = tuple[Holder, str, Tensor, Tensor]
"""Holder, name in it, the buffer itself, and a copy of its content."""
Copies = list[Copy]


class UserBuffers:
    """`begin` and `end` enclose the forward passes of a step; `undo` restores what they wrote.

    A buffer that is first written in a later step is restored only from the step after it on.
    Where none `are_there` but the engine's own, they need not be called.
    """

    def __init__(self, model: nn.Module) -> None:
        own_ids = {id(b) for norm in shard_norms(model) for b in norm.running_statistics()}
        self._slots = [
            (f"{path}.{name}" if path else name, holder, name)
            for path, holder in _holders(model)
            for name, buffer in holder.items()
            if buffer is not None and id(buffer) not in own_ids
        ]
        self.are_there = bool(self._slots)
        self.written: set[str] = set()
        self._watched = self._slots
        self._kept: Copies = []
        self._versions: dict[int, int] = {}
        self._before: list[tuple[Tensor | None, int]] = []

    def copies(self) -> Copies:
        """Copies of the current contents of these buffers, for `put_back`."""
        return _copies(self._slots)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Each of these buffers with its name in the model."""
        for full, holder, name in self._slots:
            if (buffer := holder[name]) is not None:
                yield full, buffer

    def begin(self) -> None:
        """A step begins."""
        self._kept = _copies(self._watched)
        self._versions = {id(buffer): buffer._version for _, _, buffer, _ in self._kept}
        self._before = [_version(holder, name) for _, holder, name in self._slots]

    def end(self, batch: Batch) -> None:
        """The forward passes of the step are done."""
        for (full, holder, name), (buffer, version) in zip(self._slots, self._before, strict=True):
            if holder[name] is not buffer or _version(holder, name)[1] != version:
                self.written.add(full)
        if batch.own_samples:
            self._watched = [slot for slot in self._slots if slot[0] in self.written]

    def agree(self, names: Container[str]) -> None:
        """Count buffers that other ranks have written as written here, too."""
        self.written |= {name for name, _, _ in self._slots if name in names}

    @torch.no_grad()
    def write_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a buffer that forward has replaced into its tensor of `tensors`, and use that."""
        for full, holder, name in self._slots:
            tensor, now = tensors.get(full), holder[name]
            if tensor is not None and now is not None and now is not tensor:
                tensor.copy_(now)
                holder[name] = tensor

    def undo(self) -> None:
        """Restore the contents that the buffers had before the step."""
        put_back(self._kept)

    @torch.no_grad()
    def undo_where(self, skip: Tensor) -> None:
        """The same if `skip` is 1, which only the device reads."""
        for holder, name, buffer, content in self._kept:
            now = holder[name]
            if now is None or now.shape != buffer.shape or now.dtype != buffer.dtype:
                if bool(skip):  # this rank waits
                    put_back([(holder, name, buffer, content)])
            elif now is not buffer or now._version != self._versions[id(buffer)]:
                now.copy_(torch.where(skip > 0, content, now))


def _holders(model: nn.Module) -> Iterator[tuple[str, Holder]]:
    """The dicts that hold the buffers of a model, each with its path."""
    for path, module in model.named_modules():
        yield path, module._buffers
    known: set[int] = set()
    for layer in every_layer(model):
        frozen: Any = getattr(layer, "non_trainable_variables", ())  # of Keras
        new = {v.path: v.value for v in frozen if id(v.value) not in known}
        known.update(id(value) for value in new.values())
        yield "", new


def _version(holder: Holder, name: str) -> tuple[Tensor | None, int]:
    """A buffer, and how often it was written."""
    buffer = holder[name]
    return buffer, -1 if buffer is None else buffer._version


def _copies(slots: list[tuple[str, Holder, str]]) -> Copies:
    current = ((holder, name, holder[name]) for _, holder, name in slots)
    return [(holder, name, b, b.detach().clone()) for holder, name, b in current if b is not None]


@torch.no_grad()
def put_back(copies: Copies) -> None:
    """Restore each buffer: the same tensor as before, with its former content."""
    for holder, name, buffer, content in copies:
        buffer.copy_(content)
        holder[name] = buffer


def written_in_forward(names: list[str]) -> RequestError:
    """What to say under `bitwise` of buffers that a forward pass writes."""
    return RequestError(
        asked="--bitwise",
        found=f"the model writes {', '.join(names)} in its forward pass",
        why="what is written follows the samples of one rank",
        do="compute it from parameters, or drop --bitwise",
    )
