"""Does an optimizer update each number by itself? It is asked, on small weights of its own kind.

Where a rank updates its own rows of a weight, an optimizer that looks at the whole of it (the
length of a layer in LARS and LAMB, the matrix in Muon, rows and columns in Adafactor) computes
something else, and no error shows it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.errors import RequestError

SHAPE, CUT, STEPS = (6, 4), 4, 3
CLOSE = 1e-12  # relative, in float64


def check_elementwise(optimizer: Optimizer, asked: str) -> None:
    """Raise `RequestError` unless an update of some rows is those rows of the update of all.

    Copies of the optimizer with its hyper-parameters, on two weights of random numbers, make three
    steps; the optimizer itself is as it was.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(STEPS + 1)]
    try:
        whole = _stepped(optimizer, drawn)
        parts = [
            _stepped(optimizer, [tensor[rows] for tensor in drawn])
            for rows in (slice(CUT), slice(CUT, None))
        ]
    except Exception as error:
        raise _refused(optimizer, asked, f"it raised {type(error).__name__}: {error}") from error
    if not torch.allclose(torch.cat(parts), whole, rtol=CLOSE, atol=CLOSE):
        raise _refused(optimizer, asked, "the update of some rows is another one by themselves")


def _stepped(optimizer: Optimizer, drawn: list[Tensor]) -> Tensor:
    """A weight that starts as the first of `drawn`, after steps with the others as gradients."""
    weight = nn.Parameter(drawn[0].clone())
    memo: dict[int, Any] = {
        id(p): weight for group in optimizer.param_groups for p in group["params"]
    }
    own = copy.copy(optimizer)
    own.state = copy.deepcopy(type(optimizer.state)(optimizer.state.default_factory))
    groups = copy.deepcopy(optimizer.param_groups[:1], memo)
    own.param_groups = [{**groups[0], "params": [weight]}]
    for gradient in drawn[1:]:
        weight.grad = gradient.clone()
        type(optimizer).step(own)
    return weight.detach()


def _refused(optimizer: Optimizer, asked: str, found: str) -> RequestError:
    return RequestError(
        asked=f"{asked} with {type(optimizer).__name__}",
        found=found,
        why="each rank updates its own rows of a weight, which is right only for an optimizer that "
        "updates every number by itself",
        do="--strategy ddp, or an optimizer such as AdamW, SGD or Adagrad",
    )
