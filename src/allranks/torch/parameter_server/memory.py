"""Memory that a worker and a server of one host share: what is pushed and pulled lies there.

The worker creates it and sends the server its path; later messages only say that the numbers are
there. A worker writes its next gradient only after its pull, and a server answers the messages of
one worker in order, so nothing is read while it changes.

    | the gradient: written by the worker, summed by the server | the weights: by the server |
"""

from __future__ import annotations

import ctypes
from typing import Any

from allranks.launcher.nodes.channel import Message
from allranks.torch.parameter_server.flat import ALIGNED, FlatLayout
from allranks.torch.shared_memory.segment import Segment, host_identity

NAME = "allranks-parameter-server"


class SharedNumbers:
    """The gradient and the weights of one server, for one worker."""

    def __init__(self, layout: FlatLayout, segment: Segment) -> None:
        memory: Any = (ctypes.c_ubyte * segment.nbytes).from_address(segment.address)
        memory.segment = segment  # mapped as long as a tensor lies there
        half, whole = segment.nbytes // 2, memoryview(memory).cast("B")
        self._segment = segment
        self.gradient, self.weights = layout.new(whole[:half]), layout.new(whole[half:])

    @classmethod
    def offer(cls, layout: FlatLayout) -> tuple[SharedNumbers | None, Message]:
        """New memory for a server of this host, and how to open it; `hide` it once that is done."""
        host = host_identity()
        if not host:
            return None, {}
        try:
            segment = Segment.create(_size_of(layout), NAME)
        except OSError:
            return None, {}
        return cls(layout, segment), {"host": host, "where": segment.where}

    @classmethod
    def open(cls, layout: FlatLayout, offer: Message) -> SharedNumbers | None:
        """The memory of a worker's offer; `None` where it is on another host, or out of reach."""
        if not offer.get("host") or offer["host"] != host_identity():
            return None
        try:
            return cls(layout, Segment.open(str(offer["where"]), _size_of(layout)))
        except (OSError, ValueError):
            return None

    def hide(self) -> None:
        """Unlink the memory, so that no other process can open it."""
        self._segment.hide()


def _size_of(layout: FlatLayout) -> int:
    return 2 * -(-max(1, layout.nbytes) // ALIGNED) * ALIGNED
