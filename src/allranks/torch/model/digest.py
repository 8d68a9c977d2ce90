"""Digests in torch, of a model and of a tensor: equal exactly when every bit is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from allranks.checkpoint.digest import digest_of_weights


def weights_sha256(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """SHA-256 over name, dtype and contiguous little-endian bytes of each tensor, as they come.

    Give them by name in sorted order (`Strategy.full_state`); one tensor is held at a time.
    """
    return digest_of_weights((name, *_content(tensor)) for name, tensor in tensors)


def digest_of(tensor: Tensor) -> str:
    """BLAKE2 over dtype and bytes of a tensor that this rank holds whole."""
    kind, content = _content(tensor)
    return f"{kind} {hashlib.blake2b(content, digest_size=16).hexdigest()}"


def _content(tensor: Tensor) -> tuple[str, memoryview]:
    flat = (
        tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    )
    return str(tensor.dtype).removeprefix("torch."), flat.numpy().data
