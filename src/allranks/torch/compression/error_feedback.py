"""Error feedback: what a message does not say of a tensor is kept, and said later.

    e <- decay e + x;   c = what the message for e stands for;   e <- e - c

So what was sent, and what is kept, add up to all there was. Seide et al. 2014, 1-bit SGD;
Karimireddy et al. 2019, arXiv 1901.09847; with `decay` below 1 what is old fades (SparseLoCo,
0.95).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """A message for a flat tensor, and what it stands for."""

    def size_bytes(self, count: int, item_bytes: int = 4) -> int: ...

    def encode(self, flat: Tensor) -> Tensor: ...

    def add_decoded(self, message: Tensor, into: Tensor, factor: float = 1.0) -> None: ...


class ErrorFeedback:
    """What of one flat tensor, (n,), was not sent yet."""

    def __init__(self, codec: Codec, like: Tensor, decay: float = 1.0) -> None:
        self.codec, self.decay = codec, decay
        self.kept = like.new_zeros(like.shape, requires_grad=False)

    def encode(self, given: Tensor) -> Tensor:
        """The message for what is `given` now and what was kept; the rest is kept."""
        self.kept.mul_(self.decay).add_(given)
        message = self.codec.encode(self.kept)
        self.codec.add_decoded(message, self.kept, -1.0)
        return message
