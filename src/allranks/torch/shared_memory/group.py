"""A process group of torch whose ranks share a host: its collectives run in memory they all map.

Torch calls it as it calls Gloo, from Python and from C++: `dist`, DDP, FSDP2, DTensor, pipelining.
Whatever is not contiguous goes through flat memory; complex numbers are two real ones; truth values
are summed by `or`. What the library lacks (bitwise operations, sparse tensors, means of integers)
goes to a Gloo group of the same ranks, which is made when all of them first need it.
"""

from __future__ import annotations

from allranks.torch.shared_memory.collectives import Collectives
from allranks.torch.shared_memory.messages import Messages
from allranks.torch.shared_memory.posting import Named, Posting, untraced_methods
from allranks.torch.shared_memory.work import SharedMemoryWork


class SharedMemoryGroup(Collectives, Messages):
    """The ranks of a group in one host, as torch knows a group."""


for _class in (SharedMemoryWork, Named, Posting, Collectives, Messages):
    untraced_methods(_class)
