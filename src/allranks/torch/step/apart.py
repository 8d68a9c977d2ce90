"""A backward pass of the task's own, in forward or loss: adversarial samples, perturbed weights.

While code of the task runs, the parameters have no gradient: what was summed so far is out of its
reach, so `zero_grad()` clears what the task's own backward pass has left and nothing else. What it
leaves and does not clear is refused: it would count once for each micro-batch of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from allranks.errors import RequestError

UNRELATED = re.compile("[Dd]ifferentiated Tensor")


class Apart:
    """Keeps the gradients of `parameters` (and `late`) while code of the task runs.

    Within, no parameter has a gradient, and `is_on`; at the end `RequestError` is raised if one is
    left.
    """

    def __init__(self) -> None:
        self.parameters: Sequence[nn.Parameter] = ()
        self.late: Sequence[nn.Parameter] = ()
        self.is_on = False
        self._held: Sequence[nn.Parameter] = ()
        self._kept: list[Tensor | None] = []

    def __enter__(self) -> None:
        held = self._held = [*self.parameters, *self.late] if self.late else self.parameters
        self._kept = [parameter.grad for parameter in held]
        for parameter, gradient in zip(held, self._kept, strict=True):
            if gradient is not None:
                parameter.grad = None
        self.is_on = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_on = False
        left = None
        for parameter, gradient in zip(self._held, self._kept, strict=True):
            if parameter.grad is not None:
                left = parameter
            if left is parameter or gradient is not None:
                parameter.grad = gradient
        self._kept = []
        if left is not None and kind is None:
            raise _left(left)


def _left(parameter: nn.Parameter) -> RequestError:
    return RequestError(
        asked="forward and loss of the task",
        found=f"a backward pass in them left a gradient, of shape {tuple(parameter.shape)}",
        why="it would count once for each micro-batch of each rank, and not with the mean",
        do="return it with the loss, or clear it: model.zero_grad(), or torch.autograd.grad",
    )


def unrelated_input(asked: str) -> RequestError:
    """What to say where rows of a batch are copied before they go through the model."""
    return RequestError(
        asked=asked,
        found="loss asks for the gradient of an output by an input",
        why="the rows that go through the model are copies of those in the batch that loss sees",
        do="ask for it in forward of the model, by the rows that it is given, and return it with "
        "the output; or --strategy ddp",
    )
