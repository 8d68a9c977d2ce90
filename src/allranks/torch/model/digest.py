"""Digests of a model in torch, and of one tensor: equal exactly when every bit is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from allranks.checkpoint.digest import digest_of_weights

DIGEST_BYTES = 16


def weights_sha256(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """SHA-256 over name, dtype and contiguous little-endian bytes of each tensor, as they come.

    Give them by name in sorted order (`Strategy.full_state`); one tensor is held at a time.
    """
    return digest_of_weights((name, *_content(tensor)) for name, tensor in tensors)


def _content(tensor: Tensor) -> tuple[str, memoryview]:
    flat = (
        tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    )
    return str(tensor.dtype).removeprefix("torch."), flat.numpy().data


def digest(tensor: Tensor) -> str:
    """Equal exactly when all bytes of two tensors are."""
    plain = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=DIGEST_BYTES).hexdigest()
