"""The loops of the codecs in C (`native/`), where they were compiled and numbers lie in memory.

They give the bytes of the torch code beside each call, tens of times faster; only bounds and means
may differ in their last bits, because they are summed in float64 here. Where there is no library,
on other devices and for other types, the torch code is what runs.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from allranks.torch.native.built import built

LIBRARY = built("allranks.torch.compression._codecs")
TYPES = (torch.float32, torch.float64)


def kernels(numbers: Tensor, *more: Tensor) -> ModuleType | None:
    """The library, if it takes these numbers, and the memory of `more`, as they lie."""
    if LIBRARY is None or numbers.dtype not in TYPES:
        return None
    fits = all(one.device.type == "cpu" and one.is_contiguous() for one in (numbers, *more))
    return LIBRARY if fits else None


def is_double(numbers: Tensor) -> bool:
    """Which of the two types the numbers have."""
    return numbers.dtype == torch.float64
