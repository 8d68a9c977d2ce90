"""Error feedback: the error of a codec in one message is added to the next one.

    e <- decay * e + x;  send encode(e);  e <- e - decoded

So nothing is lost, only delayed: with decay 1 the sum of all decoded messages and the residual e is
the sum of all inputs. Seide et al. 2014 (1-bit SGD); with a decay: SparseLoCo, arXiv 2508.15706.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allranks.torch.compression.codecs import Codec


class ErrorFeedback:
    """A residual of the shape of `like`, (n,), before `codec`. Nothing is communicated."""

    def __init__(self, codec: Codec, like: Tensor, decay: float = 1.0) -> None:
        self.codec, self.decay = codec, decay
        self.residual = torch.zeros_like(like)

    def encode(self, flat: Tensor) -> Tensor:
        """The message of `flat` plus the residual, uint8.

        Numbers that are not finite are sent once: the residual is zero there.
        """
        residual = self.residual
        if self.decay != 1:
            residual.mul_(self.decay)
        message = self.codec.encode(residual.add_(flat))
        self.codec.add_decoded(message, residual, alpha=-1)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return message

    def state(self) -> dict[str, Any]:
        """The residual, the only state."""
        return {"residual": self.residual}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.residual.copy_(state["residual"])
