"""Parameters of which ranks hold parts: what they may not carry, and whole shapes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from allranks.errors import RequestError


def check_no_hooks(model: nn.Module, asked: str) -> None:
    """Raise `RequestError` for a parameter with a hook of its own; no communication.

    A hook is given the gradient of what a rank holds, and a parameter that is cut is a new one.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise RequestError(
                asked=asked,
                found=f"a hook on the parameter {name!r}",
                why="a rank holds a part of a parameter, and the hook expects the whole gradient",
                do="change gradients in the optimizer, or --strategy single",
            )


def padded_shape(parameter: Tensor, parts: int) -> tuple[int, ...]:
    """That of a weight whose first axis is made a multiple of `parts`."""
    return -(-parameter.shape[0] // parts) * parts, *parameter.shape[1:]


def padded_shapes(
    units: Sequence[Sequence[Tensor]], parts: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Those of what is trained of each unit."""
    return tuple(tuple(padded_shape(p, parts) for p in u if p.requires_grad) for u in units)
