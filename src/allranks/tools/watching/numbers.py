"""Digests of tensors, of rows of a batch, and of the states of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any
from zlib import crc32

MOST_TENSORS = 4


def digest_of(torch: Any, tensor: Any) -> int | None:
    """CRC-32 of the bytes of a plain tensor; None for one that is in parts, or has no memory."""
    if hasattr(tensor, "to_local") or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return crc32(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else 0


def tensors_in(torch: Any, data: Any, depth: int = 3) -> Iterable[Any]:
    """The tensors of a batch, in their order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif depth and isinstance(data, dict):
        for value in data.values():
            yield from tensors_in(torch, value, depth - 1)
    elif depth and isinstance(data, list | tuple):
        for value in data:
            yield from tensors_in(torch, value, depth - 1)


def rows_of(torch: Any, data: Any, size: int) -> list[list[int]]:
    """For each of `size` samples of a batch the digests of its rows in the first tensors."""
    tensors = [t for t in tensors_in(torch, data) if t.dim() and t.shape[0] == size]
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"][:MOST_TENSORS]
    return [[digest_of(torch, tensor[i]) or 0 for tensor in tensors] for i in range(size)]


def random_states(torch: Any, device: str = "cpu") -> dict[str, int]:
    """Digests of the generators that a script may draw from: torch's, Python's, NumPy's."""
    found = {"torch": crc32(memoryview(torch.get_rng_state().numpy()))}
    if device not in ("cpu", "meta"):
        state = torch.get_device_module(device).get_rng_state()
        found[f"torch on {device}"] = crc32(memoryview(state.cpu().numpy()))
    found["random"] = crc32(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state = numpy.random.get_state()
        found["numpy.random"] = crc32(state[1].tobytes() + bytes(str(state[2]), "ascii"))
    return found
