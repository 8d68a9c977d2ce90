"""Means over batches that a script takes without gradients: the losses of what it evaluates.

Of each the value and over how many elements it is a mean; they are read when the process ends, so
that no device is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allranks.tools.watching.facts import Facts, wrap
from allranks.tools.watching.progress import Progress

NAMES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
BY_CLASS = ("cross_entropy", "nll_loss")
"""Their targets may be left out by a number, and a class may weigh more than another."""
UNUSUAL = ("weight", "size_average", "reduce")
"""What makes another mean of it."""
MOST_KEPT, MOST_LINES, MOST_PASSES = 4096, 32, 3


@dataclass
class Means:
    """The means that one line has taken in one pass over a loader."""

    name: str
    where: tuple[str, int] | None
    batches: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)


class Losses:
    """The losses of this process that were means, and taken without gradients."""

    def __init__(self, torch: Any, facts: Facts, progress: Progress) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._found: dict[tuple[Any, ...], Means] = {}

    def install(self) -> None:
        """Wrap the functions that losses are; a graph that is compiled passes them by."""
        note = self.facts.guarded(self._note)
        torch = self.torch

        def taking(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def made(own: Callable[..., Any]) -> Callable[..., Any]:
                def inner(*args: Any, **kwargs: Any) -> Any:
                    result = own(*args, **kwargs)
                    if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                        note(name, result, args, kwargs)
                    return result

                # TorchScript asks for this, and compiles what it is given
                inner.__prepare_scriptable__ = lambda: own  # type: ignore[attr-defined]
                return inner

            return made

        for name in NAMES:
            if hasattr(torch.nn.functional, name):
                wrap(torch.nn.functional, name, taking(name))

    def _note(self, name: str, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        batch = self.progress.batch
        unusual = [*args[2:], *(kwargs.get(one) for one in UNUSUAL)]
        is_mean = kwargs.get("reduction", "mean") == "mean" and not result.dim()
        if not is_mean or batch is None or len(args) < 2 or unusual.count(None) < len(unusual):
            return
        loader, number, index = batch
        if number >= MOST_PASSES or hasattr(result, "to_local"):
            return
        where = self.facts.where()
        key = loader, number, where, name
        if key not in self._found and len(self._found) == MOST_LINES:
            return
        means = self._found.setdefault(key, Means(name, where))
        if len(means.values) < MOST_KEPT:
            means.batches.append(index)
            means.values.append(result.detach().clone())
            means.counts.append(self._elements(name, *args[:2], **kwargs))

    def _elements(self, name: str, outputs: Any, targets: Any, **given: Any) -> Any:
        if name not in BY_CLASS or targets.is_floating_point():
            return outputs.numel()
        left_out = given.get("ignore_index", -100)
        return (targets != left_out).sum()

    def finish(self) -> None:
        """Tell them. Those of a line that took several in one batch are not told."""
        for (loader, number, _, name), means in self._found.items():
            if len(set(means.batches)) == len(means.batches) < MOST_KEPT:
                self.facts.tell(
                    "means",
                    loader=loader,
                    number=number,
                    name=name,
                    where=means.where,
                    values=[float(value) for value in means.values],
                    counts=[int(count) for count in means.counts],
                )
        self._found = {}
