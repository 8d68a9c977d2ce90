"""What may look into a step while it is made: `check` records a trace so, and tests their own."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from allranks.torch.data.batches import Batch


class Probe(Protocol):
    """Sees the insides of a step, and changes nothing."""

    def begin(self, batch: Batch) -> None:
        """Before the forward passes."""
        ...

    def losses(self, losses: Tensor) -> None:
        """The weighted losses of a micro-batch, a row per sample."""
        ...

    def gradients(self, stage: str, names: list[str], parameters: list[nn.Parameter]) -> None:
        """The gradients of that stage are there."""
        ...
