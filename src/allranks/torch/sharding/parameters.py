"""What the parameters of a model may not carry where ranks hold parts of them."""

from __future__ import annotations

from torch import nn

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
