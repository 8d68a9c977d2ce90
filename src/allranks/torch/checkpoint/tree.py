"""What a tensor of a state may be, and how the manifest calls its type of number.

A state is taken apart and put together by `allranks.checkpoint.format`; here is what is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allranks.checkpoint import format as tree
from allranks.checkpoint.format import refused

DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "I32": torch.int32},
    **{"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32},
    **{"F64": torch.float64, "C64": torch.complex64, "C128": torch.complex128},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked by name, because importing the type takes a second."""
    return type(tensor).__module__.startswith("torch.distributed.tensor")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its own memory, not a copy. No communication."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def flatten(state: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values, and its tensors by path; every path begins with `prefix`.

    The tensors are those of the state, not copies; a meta tensor stands for one that another rank
    holds. Raises `RequestError` for what cannot be saved.
    """
    return tree.flatten(state, prefix, _tensor_of)


def _tensor_of(value: Any, path: str) -> Tensor | None:
    return _saveable(value, path) if isinstance(value, Tensor) else None


def _saveable(tensor: Tensor, path: str) -> Tensor:
    if tensor.dtype not in NAMES or tensor.layout != torch.strided:
        raise refused(path, f"a tensor of {tensor.dtype}, {tensor.layout}")
    placements: Any = getattr(tensor, "placements", ()) if is_dtensor(tensor) else ()
    if any(place.is_partial() for place in placements):
        raise refused(path, "a DTensor whose sum over the ranks was not taken")
    return tensor.detach().resolve_conj().resolve_neg()
