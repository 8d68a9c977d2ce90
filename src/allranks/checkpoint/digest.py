"""The digest of a model: equal exactly when every bit of every parameter and buffer is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator


def digest_of_weights(tensors: Iterator[tuple[str, str, memoryview]]) -> str:
    """SHA-256 over name, dtype and contiguous little-endian bytes of each tensor, as they come.

    Give them by name in sorted order; one is held at a time.
    """
    digest = hashlib.sha256()
    for name, kind, data in tensors:
        digest.update(f"{name}\0{kind}\0".encode())
        digest.update(data)
    return digest.hexdigest()
