"""The digest of a model: equal exactly when every bit of every parameter and buffer is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor


def weights_sha256(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """SHA-256 over name, dtype and contiguous little-endian bytes of each tensor, as they come.

    Give them by name in sorted order (`Strategy.full_state`); one tensor is held at a time.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        kind = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{kind}\0".encode())
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.hexdigest()
