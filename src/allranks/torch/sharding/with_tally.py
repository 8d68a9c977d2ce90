"""What every rank finds by itself at the end of its passes, and all want the sum of: one message.

The norm of a gradient needs a sum over the ranks that hold parts of it. Where these numbers are
there as soon as the passes are over, they go with the tally, and the step waits once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allranks.torch.comm.comm import Comm
from allranks.torch.step.tally import Tally


def summed_with_tally(local: Tally, row: Tensor, comm: Comm) -> tuple[Tally, Tensor]:
    """The sums of a tally and of a `row` in float64; every rank of `comm` calls this."""
    tally = local.tensor
    message = torch.cat([tally.to(torch.float64), row.flatten().to(tally.device)])
    comm.all_reduce(message).wait()
    return local.layout.tally(message[: tally.numel()].to(tally.dtype)), (
        message[tally.numel() :].view(row.shape)
    )
