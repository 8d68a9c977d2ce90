"""Who may look into a step: the trace of `check`, and the notes of an audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.step.tally import Tally


class StepProbe:
    """Observes the inside of a step without changing it, as the trace of `check` does.

    A probe overrides what it needs.
    """

    def begin(self, batch: Batch) -> None:
        """Before the forward passes."""

    def losses(self, losses: Tensor) -> None:
        """The weighted losses of a micro-batch, a row per sample."""

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """The gradients after that stage, as this rank holds them."""


class PassObserver(Protocol):
    """Notes what passes of one shard compute, for an audit (`witness.audit`)."""

    def covers(self, micro: MicroBatch) -> bool:
        """Whether these passes are noted."""
        ...

    def noting(
        self, micro: MicroBatch, sums: Tally, run_backward: Callable[[], None]
    ) -> Callable[[], None]:
        """The backward pass, which then also notes its gradients."""
        ...

    def write(self, numbers: Tensor) -> None:
        """Add the digest of all that was noted."""
        ...
