"""Tasks with a mistake that was met in public: on ranks they are another training."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

import contract_tasks


class OwnTokens(contract_tasks.Words):
    """The loss is a mean over the tokens that a rank holds, not over those of the whole batch."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        each = F.cross_entropy(output.transpose(1, 2), batch["text"][:, 1:], reduction="none")
        counts = contract_tasks.Words.weight(self, batch)
        return (each * counts).sum(1) * len(each) / counts.sum()

    def weight(self, batch: Any) -> Any:
        return None
