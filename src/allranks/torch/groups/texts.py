"""Texts of all ranks, as collectives of numbers carry them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from allranks.torch.groups.pending import Pending


class Gathers(Protocol):
    """Every rank's `part`, in rank order, into `whole`."""

    def __call__(self, whole: Tensor, part: Tensor) -> Pending: ...


def texts_of_all(text: str, size: int, device: torch.device, gather: Gathers) -> list[str]:
    """The text of each of `size` ranks, in order; every rank calls this.

    Gathers a size, and then as many bytes as the longest has.
    """
    data = text.encode()
    sizes = torch.zeros(size, dtype=torch.int64, device=device)
    gather(sizes, torch.tensor([len(data)], device=device)).wait()
    part = torch.zeros(max(1, int(sizes.max())), dtype=torch.uint8, device=device)
    own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    part[: len(data)] = own[: len(data)]
    whole = part.new_empty(size * part.numel())
    gather(whole, part).wait()
    rows = whole.cpu().numpy().reshape(size, -1)
    return [bytes(row[:length]).decode() for row, length in zip(rows, sizes.tolist(), strict=True)]
