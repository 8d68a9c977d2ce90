"""The length of a gradient: one number over all parameters, as accurate as it can be had."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def length(gradients: list[Tensor], kind: torch.dtype | None = None) -> float:
    """The norm of all `gradients` together, each squared and summed as `kind` if given."""
    if not gradients:
        return 0.0
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if kind is not None:
        dense = [g.to(torch.promote_types(g.dtype, kind)) for g in dense]
    norms = torch._foreach_norm(dense)
    if norms[0].device.type == "cpu":
        return math.hypot(*(norm.item() for norm in norms))
    return math.hypot(*torch.stack(norms).tolist())  # waits for the device once
