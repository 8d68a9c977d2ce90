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
RATE = 1e-2  # where a group has 0: a schedule sets it later
ROWS = (
    "each rank updates its own rows of a weight, which is right only for an optimizer that "
    "updates every number by itself"
)


def check_elementwise(optimizer: Optimizer, asked: str) -> None:
    """Raise `RequestError` unless an update of some rows is those rows of the update of all.

    For each group a copy of the optimizer with its hyper-parameters makes three steps on weights of
    random numbers; the optimizer itself is as it was. A rate of 0 is another one there.
    """
    for number, group in enumerate(optimizer.param_groups):
        if group["params"]:
            _check_group(optimizer, number, asked)


def _check_group(optimizer: Optimizer, number: int, asked: str) -> None:
    parameters = optimizer.param_groups[number]["params"]
    held = (p.device for p in parameters if not p.is_meta)  # the others are other ranks'
    device = next(held, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(device)
        for _ in range(STEPS + 1)
    ]
    try:
        whole = _stepped(optimizer, number, drawn)
        parts = [
            _stepped(optimizer, number, [tensor[rows] for tensor in drawn])
            for rows in (slice(CUT), slice(CUT, None))
        ]
    except Exception as error:
        why = "it is asked whether it updates every number by itself, by three steps of a copy"
        raise _refused(optimizer, asked, f"it raised {error!r}", why) from error
    if torch.equal(whole, drawn[0]):
        why = "three steps of a copy of it left random weights as they were, so it cannot be asked"
        raise _refused(optimizer, asked, f"no update by its group {number}", why)
    if not torch.allclose(torch.cat(parts), whole, rtol=CLOSE, atol=CLOSE):
        raise _refused(optimizer, asked, "the update of some rows is another one by themselves")


def _stepped(optimizer: Optimizer, number: int, drawn: list[Tensor]) -> Tensor:
    """A weight that starts as the first of `drawn`, after steps with the others as gradients."""
    weight = nn.Parameter(drawn[0].clone())
    memo: dict[int, Any] = {
        id(p): weight for group in optimizer.param_groups for p in group["params"]
    }
    own = object.__new__(type(optimizer))
    kept = {n: v for n, v in vars(optimizer).items() if n not in ("state", "param_groups")}
    own.__dict__ = {name: _copied(value, memo) for name, value in kept.items()}
    own.state = copy.deepcopy(type(optimizer.state)(optimizer.state.default_factory))
    given = optimizer.param_groups[number]
    group = {n: _copied(value, memo) for n, value in given.items() if n != "params"}
    if not isinstance(group.get("lr", RATE), Tensor) and not group.get("lr", RATE):
        group["lr"] = RATE
    own.param_groups = [{**group, "params": [weight]}]
    for gradient in drawn[1:]:
        weight.grad = gradient.clone()
        type(optimizer).step(own)
    return weight.detach()


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy, of a hook or a function itself."""
    try:
        return copy.deepcopy(value, dict(memo))
    except TypeError:
        return value


def _refused(optimizer: Optimizer, asked: str, found: str, why: str = ROWS) -> RequestError:
    return RequestError(
        asked=f"{asked} with {type(optimizer).__name__}",
        found=found,
        why=why,
        do="--strategy ddp, or an optimizer such as AdamW, SGD or Adagrad",
    )
