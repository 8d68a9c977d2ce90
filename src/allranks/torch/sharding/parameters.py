"""What the parameters of a model may not carry where ranks hold parts of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError

HOLDS_A_PART = "a rank holds a part of a parameter, and the hook expects the whole gradient"


def check_no_hooks(
    model: nn.Module,
    asked: str,
    why: str = HOLDS_A_PART,
    engine: Iterable[RemovableHandle] = (),
) -> None:
    """Raise `RequestError` for a parameter with a hook of its own; no communication.

    A hook is given the gradient of what a rank holds, and a parameter that is cut is a new one.
    Those of the `engine` are none of that.
    """
    known = {handle.id for handle in engine}
    for name, parameter in model.named_parameters():
        hooks = *(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())
        if not known.issuperset(hooks):
            raise RequestError(
                asked=asked,
                found=f"a hook on the parameter {name!r}",
                why=why,
                do="change gradients in the optimizer, or --strategy single",
            )
