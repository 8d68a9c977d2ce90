"""Many tensors as few messages of plain bytes, for a broadcast: one type at a time, flat.

NCCL takes contiguous memory and the types that it can add: neither a transposed or expanded tensor
nor one of 16-bit integers. Bytes it always takes, and a model of 320 tensors goes in a few messages
instead of as many. What is large and lies in one piece is sent from where it is, without a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

MESSAGE_BYTES = 16 * 2**20


def messages_of(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors of each message: of one type, together no larger than a message, or alone."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    waiting_bytes: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        tensor = tensor.detach()
        kind, size = tensor.dtype, tensor.nbytes
        ahead = waiting.setdefault(kind, [])
        if ahead and waiting_bytes[kind] + size > MESSAGE_BYTES:
            yield ahead
            ahead = waiting[kind] = []
            waiting_bytes[kind] = 0
        ahead.append(tensor)
        waiting_bytes[kind] += size
    yield from (ahead for ahead in waiting.values() if ahead)


def packed(tensors: Sequence[Tensor], *, read: bool) -> Tensor:
    """One message for these tensors as bytes; its content is theirs only if they are `read`."""
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous() and not (first.is_conj() or first.is_neg()):
        return first.view(-1).view(torch.uint8)
    if read:
        flat = torch.cat([tensor.resolve_conj().resolve_neg().reshape(-1) for tensor in tensors])
    else:
        flat = first.new_empty(sum(tensor.numel() for tensor in tensors))
    return flat.view(torch.uint8)


def unpack(message: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write into the tensors what a message of their own has brought."""
    flat = message.view(tensors[0].dtype)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        if tensor.data_ptr() == part.data_ptr():
            continue
        part = part.view(tensor.shape)
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # expanded: what lies in memory is written once
                tensor, part = tensor.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
        tensor.copy_(part)
