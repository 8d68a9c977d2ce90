"""What a script's own collectives reduce: small numbers with their values, large ones counted.

DDP's reductions are not among them: they are made below Python.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allranks.tools.script_check.record.facts import ScriptFacts, StepCounts, tensors_in, wrap

SMALL, MOST_TOLD, MOST_SENT = 16, 200, 10_000
REDUCING = ("all_reduce", "reduce")
GATHERING = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object")
OTHERS = ("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single")
SPREADING = ("barrier", "monitored_barrier", "broadcast", "broadcast_object_list")
SCATTERING = ("scatter", "scatter_object_list")
TO_ONE = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


class ScriptCollectives:
    """All that the script itself calls of `torch.distributed`."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._told = 0

    def install(self, ended: Callable[[], None]) -> None:
        """Wrap them; `ended` is called before a group is destroyed."""
        dist = self.torch.distributed
        note = self.facts.guarded(self._note)
        reduced = self.facts.guarded(self._reduced)
        joined = self.facts.guarded(self._joined)

        def with_values(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                before = note(own.__name__, tensor)
                result = own(tensor, *args, **kwargs)
                if before is not None and result is None:
                    reduced(own.__name__, tensor, before, args, kwargs)
                return result

            return inner

        def noted(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(*args: Any, **kwargs: Any) -> Any:
                note(own.__name__, [*args, *kwargs.values()])
                return own(*args, **kwargs)

            return inner

        def joining(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(*args: Any, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                self.facts.speak()
                joined()
                return result

            return inner

        for name in (*REDUCING, *GATHERING, *OTHERS, *SPREADING, *SCATTERING):
            self._wrap(dist, name, self._meeting)
        for name in REDUCING:
            self._wrap(dist, name, with_values)
        for name in (*GATHERING, *OTHERS, *TO_ONE):
            self._wrap(dist, name, noted)
        self._wrap(dist, "init_process_group", joining)
        self._wrap(dist, "destroy_process_group", lambda own: _after(ended, own))

    def _wrap(self, dist: Any, name: str, made: Callable[..., Any]) -> None:
        """In `torch.distributed`, and where torch gives it out a second time."""
        if not hasattr(dist, name):
            return
        own = getattr(dist, name)
        wrap(dist, name, made)
        home = sys.modules.get("torch.distributed.distributed_c10d")
        if name.endswith("process_group") and getattr(home, name, None) is own:
            setattr(home, name, getattr(dist, name))

    def _meeting(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`own`, and it is told among whom."""
        at = list(inspect.signature(own).parameters).index("group")
        met = self.facts.guarded(self._met)

        def inner(*args: Any, **kwargs: Any) -> Any:
            met(args[at] if len(args) > at else kwargs.get("group"))
            return own(*args, **kwargs)

        return inner

    def _joined(self) -> None:
        dist = self.torch.distributed
        self.facts.tell("world", rank=dist.get_rank(), size=dist.get_world_size())
        self.progress.meetings += 1

    def _met(self, group: Any) -> None:
        dist = self.torch.distributed
        is_all = group is None or dist.get_world_size(group) == dist.get_world_size()
        self.progress.meet(is_all=is_all)

    def _note(self, name: str, given: Any) -> list[float] | None:
        progress = self.progress
        if name in TO_ONE:
            progress.to_one += 1
            return None
        tensors = list(tensors_in(self.torch, given))
        size = sum(tensor.numel() for tensor in tensors)
        if name in GATHERING and progress.last_pass:
            self.facts.tell("gathered", after=progress.last_pass)
            progress.last_pass = None if size > SMALL else progress.last_pass
        if size > SMALL:
            progress.large_collectives += 1
        if len(progress.sent) < MOST_SENT:
            progress.sent.update(tensor.data_ptr() for tensor in tensors)
        if size <= SMALL and name in REDUCING and self._told < MOST_TOLD:
            return [float(value) for value in given.detach().reshape(-1).tolist()]
        return None

    def _reduced(self, name: str, tensor: Any, before: list[float], args: Any, kwargs: Any) -> None:
        self._told += 1
        operation = args[-1] if name == "reduce" and len(args) > 1 else args[0] if args else None
        operation = kwargs.get("op", operation)
        self.facts.tell(
            "reduced",
            name=name,
            operation="SUM" if operation is None else str(operation).rpartition(".")[2],
            where=self.facts.where(),
            before=before,
            values=[float(value) for value in tensor.detach().reshape(-1).tolist()],
            after=self.progress.last_pass,
        )

    def finish(self) -> None:
        """Tell how many there were."""
        self.facts.tell(
            "collectives", large=self.progress.large_collectives, to_one=self.progress.to_one
        )


def _after(first: Callable[[], None], own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, once `first` was called."""

    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return own(*args, **kwargs)

    return both


# --- losses --------------------------------------------------------------------------------------
# Means over batches that a script takes without gradients: the losses of what it evaluates.
#
# Of each the value and over how many elements it is a mean; they are read when the process ends, so
# that no device is waited for.


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


class MeanLosses:
    """The losses of this process that were means, and taken without gradients."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
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
