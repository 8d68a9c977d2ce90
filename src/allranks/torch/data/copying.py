"""Copies a batch to the device while the device computes with the one before.

On an accelerator, pinned memory is copied on a separate stream, so neither the host nor the
computing stream waits for it. On the host, and for data that is on the device already, there is
nothing to copy, only to cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import allranks.torch.accelerator as accelerator
from allranks.torch.data.collate import map_to_device, tensors_in
from allranks.torch.data.sources import as_it_is
from allranks.torch.model.precision import Precision


@dataclass(frozen=True)
class AsyncCopy:
    """Collated data that is being copied; the event `there` marks its arrival (`None`: arrived)."""

    data: Any
    there: Any | None


class Copying:
    """Places collated data as configured: `begin` in any thread, `finish` in the training one."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._stream: Any | None = None
        if accelerator.is_accelerator(precision.device):
            self._stream = accelerator.new_stream(precision.device)

    def begin(self, data: Any) -> AsyncCopy:
        """Start copying `data`; returns before it has arrived."""
        if self._stream is None:
            return AsyncCopy(self._precision.to_device(data), None)
        if any(map(accelerator.holds, tensors_in(data))):  # cast in the order of its producer
            producer = accelerator.current_stream(self._precision.device)  # of this thread
            return AsyncCopy(self._precision.to_device(data), producer.record_event())
        accelerator.use(self._stream.device)  # each thread has its own, at first device 0
        with accelerator.on_stream(self._stream):
            # uncast: the host would wait for a cast here
            device = self._precision.device
            moved = map_to_device(self._moved, as_it_is, data, device, pin=True)
            return AsyncCopy(self._precision.to_device(moved), self._stream.record_event())

    def finish(self, begun: AsyncCopy) -> Any:
        """The placed data: later work of the current stream waits until it has arrived."""
        if begun.there is None:
            return begun.data
        computing = accelerator.current_stream(self._precision.device)
        computing.wait_event(begun.there)
        for tensor in tensors_in(begun.data):
            tensor.record_stream(computing)  # keeps its memory from reuse while that computes
        return begun.data

    def now(self, data: Any) -> Any:
        """Place `data` for the next computation; on an accelerator the host does not wait."""
        return self.finish(self.begin(data))

    def _moved(self, tensor: Tensor) -> Tensor:
        return accelerator.pinned(tensor).to(self._precision.device, non_blocking=True)
