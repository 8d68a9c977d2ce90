"""What every codec is: a flat tensor becomes bytes, of a size known before, and is added back."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Codec(ABC):
    """Codes a flat tensor. Nothing is communicated; equal tensors give equal bytes."""

    @abstractmethod
    def size_bytes(self, count: int, itemsize: int = 4) -> int:
        """The bytes of a message of `count` numbers of `itemsize` bytes: a multiple of 8."""

    @abstractmethod
    def encode(self, flat: Tensor) -> Tensor:
        """The message of `flat`, (n,): uint8, (size_bytes(n, flat.itemsize),)."""

    @abstractmethod
    def add_decoded(self, message: Tensor, into: Tensor, alpha: float = 1) -> None:
        """Add `alpha` times what `message` says to `into`, (n,), of the type that was encoded.

        `message` begins at a multiple of 8 bytes.
        """
