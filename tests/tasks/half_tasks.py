"""A task whose gradients are finite, and too large for fp16."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from contract_tasks import Plain


class Steep(Plain):
    """Gradients of about a million, which AdamW takes in its stride."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) * 1e7
