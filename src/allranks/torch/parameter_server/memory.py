"""Memory that a worker and a server of one host share: what is pushed and pulled lies there.

The worker makes it and tells the server where it is; both then say in a message only that the
numbers are there. A worker writes its next gradient only when it has pulled, and a server answers
the messages of one worker in their order, so nothing is read while it changes.

    | the gradient: written by the worker, summed by the server | the weights: by the server |

In step, but with update=worker, the server has its own weights where workers of its host read them:
they change when all parts of a step are there. Who is at a part that another one has brought, or
that a restart hands out anew, may read numbers of two versions; what it finds is dropped. In its
first pass a worker has pages of its own where it writes, so that a model which writes its weights
is told of that; from then on it cannot write there: it would be ended by the kernel.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from allranks.launcher.nodes.channel import Message
from allranks.torch.parameter_server.flat import ALIGNED, FlatLayout
from allranks.torch.shared_memory.segment import WRITES, Segment, host_identity

NAME = "allranks-parameter-server"
LOOKS = 3


class ReadWeights:
    """The weights of one server, which workers of its host read where they lie."""

    def __init__(self, layout: FlatLayout, segment: Segment) -> None:
        self.flat = layout.new(_mapped(segment))
        self.said: Message = {"host": host_identity(), "where": segment.where}

    @classmethod
    def made(cls, layout: FlatLayout) -> ReadWeights | None:
        """New ones, of zeros; `None` where no memory can be shared."""
        if not host_identity():
            return None
        try:
            return cls(layout, Segment.made(max(1, layout.nbytes), NAME))
        except OSError:
            return None

    @classmethod
    def opened(cls, layout: FlatLayout, said: Message, access: str) -> ReadWeights | None:
        """Those of a server, which said this; `None` where they are out of reach."""
        segment = _opened(said, max(1, layout.nbytes), access)
        if segment is None:
            return None
        found = cls(layout, segment)
        segment.hide()
        return found

    def is_as(self, other: ReadWeights) -> bool:
        """Whether nothing was written here alone: a server may just be writing, so look again."""
        return any(torch.equal(self.flat.raw, other.flat.raw) for _ in range(LOOKS))


class SharedNumbers:
    """The gradient and the weights of one server, for one worker."""

    def __init__(self, layout: FlatLayout, segment: Segment) -> None:
        half, whole = segment.nbytes // 2, _mapped(segment)
        self._segment = segment
        self.gradient, self.weights = layout.new(whole[:half]), layout.new(whole[half:])

    def hide(self) -> None:
        """Nobody else can open it from now on."""
        self._segment.hide()


def size_of(layout: FlatLayout) -> int:
    return 2 * -(-max(1, layout.nbytes) // ALIGNED) * ALIGNED


def offered(layout: FlatLayout) -> tuple[SharedNumbers | None, Message]:
    """New memory for a server of this host, and what to say of it; to be hidden once it has it."""
    host = host_identity()
    if not host:
        return None, {}
    try:
        segment = Segment.made(size_of(layout), NAME)
        return SharedNumbers(layout, segment), {"host": host, "where": segment.where}
    except OSError:
        return None, {}


def taken(layout: FlatLayout, offer: Message) -> SharedNumbers | None:
    """The memory that a worker offers; `None` where it is on another host, or out of reach."""
    segment = _opened(offer, size_of(layout), WRITES)
    return None if segment is None else SharedNumbers(layout, segment)


def _opened(said: Message, nbytes: int, access: str) -> Segment | None:
    """The segment that another process said this of; `None` where it cannot be opened from here."""
    if not said.get("host") or said["host"] != host_identity():
        return None
    try:
        return Segment.opened(str(said["where"]), nbytes, access)
    except (OSError, ValueError):
        return None


def _mapped(segment: Segment) -> memoryview:
    """Its bytes, which stay mapped as long as a tensor lies there."""
    memory: Any = (ctypes.c_ubyte * segment.nbytes).from_address(segment.address)
    memory.segment = segment
    return memoryview(memory).cast("B")
