"""Records the script's own collectives: the values of small tensors, the number of large ones.

DDP's reductions are not seen: they happen below Python.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

from allranks.tools.script_check.record.facts import (
    ScriptFacts,
    StepCounts,
    note_after,
    note_before,
    tensors_in,
    wrap,
)

SMALL, MOST_WRITTEN, MOST_SENT = 16, 200, 10_000
REDUCING = ("all_reduce", "reduce")
GATHERING = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object")
OTHERS = ("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single")
SPREADING = ("barrier", "monitored_barrier", "broadcast", "broadcast_object_list")
SCATTERING = ("scatter", "scatter_object_list")
OF_GROUPS = ("init_process_group", "destroy_process_group")
TO_ONE = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


class ScriptCollectives:
    """The script's own calls of `torch.distributed`."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._written: Counter[bool] = Counter()
        self._gathers: list[Any] = []

    def install(self, ended: Callable[[], None]) -> None:
        """Wrap them; `ended` is called before a group is destroyed."""
        dist, guarded = self.torch.distributed, self.facts.guarded
        count, note, reduced = guarded(self._count), guarded(self._note), guarded(self._reduced)

        def with_values(original: Any, /, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            before = note(original.__name__, tensor)
            result = original(tensor, *args, **kwargs)
            if before is not None and result is None:
                reduced(original.__name__, tensor, before, args, kwargs)
            return result

        def note_all(name: str, *args: Any, **kwargs: Any) -> None:
            note(name, [*args, *kwargs.values()])

        for name in _there(dist, *REDUCING, *GATHERING, *OTHERS, *SPREADING, *SCATTERING):
            at = list(inspect.signature(getattr(dist, name)).parameters).index("group")
            note_before(dist, name, partial(count, at))
        for name in _there(dist, *REDUCING):
            wrap(dist, name, with_values)
        for name in _there(dist, *GATHERING, *OTHERS, *TO_ONE):
            note_before(dist, name, partial(note_all, name))
        originals = {name: getattr(dist, name) for name in OF_GROUPS}
        note_after(dist, "init_process_group", lambda *args, **kwargs: self.facts.enable())
        note_after(dist, "init_process_group", guarded(self._joined))
        note_before(dist, "destroy_process_group", lambda *args, **kwargs: ended())
        home = sys.modules.get("torch.distributed.distributed_c10d")  # torch exports them from here
        for name, original in originals.items():
            if getattr(home, name, None) is original:
                setattr(home, name, getattr(dist, name))

    def _joined(self, *args: Any, **kwargs: Any) -> None:
        dist = self.torch.distributed
        self.facts.write("world", rank=dist.get_rank(), size=dist.get_world_size())
        self.progress.collectives += 1

    def _count(self, at: int, *args: Any, **kwargs: Any) -> None:
        """Count a collective, of all ranks or of a subgroup, which is argument number `at`."""
        dist, group = self.torch.distributed, args[at] if len(args) > at else kwargs.get("group")
        is_all = group is None or dist.get_world_size(group) == dist.get_world_size()
        self.progress.count_collective(is_all=is_all)

    def _note(self, name: str, arguments: Any) -> list[float] | None:
        progress = self.progress
        if name in TO_ONE:
            progress.to_one += 1
            return None
        tensors = list(tensors_in(self.torch, arguments))
        size = sum(tensor.numel() for tensor in tensors)
        if name in GATHERING:
            self._gathered(name, arguments[name.startswith("all_")])
            progress.last_pass = None if size > SMALL else progress.last_pass
        if size > SMALL:
            progress.large_collectives += 1
        if len(progress.data_ptrs) < MOST_SENT:
            progress.data_ptrs.update(tensor.data_ptr() for tensor in tensors)
        if size <= SMALL and name in REDUCING and self._written[True] < MOST_WRITTEN:
            return [float(value) for value in arguments.detach().reshape(-1).tolist()]
        return None

    def _reduced(self, name: str, tensor: Any, before: list[float], args: Any, kwargs: Any) -> None:
        operation = args[-1] if name == "reduce" and len(args) > 1 else args[0] if args else None
        operation = kwargs.get("op", operation)
        operation = "SUM" if operation is None else str(operation).rpartition(".")[2]
        values = [float(value) for value in tensor.detach().reshape(-1).tolist()]
        self._write(name, operation, before, values)

    def _write(self, name: str, operation: str, before: list[float], values: list[float]) -> None:
        self._written[bool(values)] += 1
        self.facts.write(
            "reduced",
            name=name,
            operation=operation,
            where=self.facts.where(),
            before=before,
            values=values,
            after=self.progress.last_pass,
        )

    def _gathered(self, name: str, metric: Any) -> None:
        """Note what this rank gives: a metric of its own, or the outputs of a batch."""
        progress, trimmed = self.progress, self.facts.is_within("gather_for_metrics")
        kind = progress.batch and progress.batch[:2], trimmed
        if kind not in self._gathers:
            self._gathers.append(kind)
            self.facts.write("gathered", of=kind[0], trimmed=trimmed)
        if not isinstance(metric, float | self.torch.Tensor):
            return
        numbers = self.torch.as_tensor(metric).detach().reshape(-1)
        means, size = progress.means, numbers.numel()
        if size and means is not None and len(means.gathered) < len(means.values):
            means.gathered.append(numbers[0].clone())
        is_metric = 0 < size <= SMALL and progress.last_pass is not None and not trimmed
        if is_metric and self._written[False] < MOST_WRITTEN:
            self._write(name, "GATHER", [float(value) for value in numbers.tolist()], [])

    def finish(self) -> None:
        """Write how many there were."""
        self.facts.write(
            "collectives", large=self.progress.large_collectives, to_one=self.progress.to_one
        )


def _there(dist: Any, *names: str) -> list[str]:
    return [name for name in names if hasattr(dist, name)]


# --- losses --------------------------------------------------------------------------------------
# Means over batches that a script computes without gradients: its evaluation losses.
#
# Each is recorded with the number of its elements. Values are read when the process ends, so that
# recording never waits for a device.


NAMES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
BY_CLASS = ("cross_entropy", "nll_loss")
"""These ignore targets equal to `ignore_index`, and may weight classes."""
UNUSUAL = ("weight", "size_average", "reduce")
"""Options that change how the mean is taken."""
MOST_KEPT, MOST_LINES, MOST_PASSES, MOST_TRAINED = 4096, 32, 3, 64


@dataclass
class Means:
    """The means, or sums over their elements, of one line of the script in a pass of a loader."""

    name: str
    where: tuple[str, int] | None
    batches: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)
    gathered: list[Any] = field(default_factory=list)
    """The first number that the rank gave to a gather after each of them."""


class MeanLosses:
    """The losses of this process that are means: without gradients, or over targets of classes."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._means: dict[tuple[Any, ...], Means] = {}
        self._pending: list[dict[str, Any]] = []
        self._trained: list[dict[str, Any]] = []

    def install(self) -> None:
        """Wrap the loss functions; compiled graphs bypass them."""
        note, train = self.facts.guarded(self._note), self.facts.guarded(self._train)
        torch = self.torch
        note_before(torch.autograd, "backward", self.facts.guarded(self._backward))

        def taking(name: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling():
                if not torch.is_grad_enabled():
                    note(name, result, args, kwargs)
                elif name in BY_CLASS and len(self._trained) < MOST_TRAINED:
                    train(result, *args, **kwargs)
            return result

        for name in _there(torch.nn.functional, *NAMES):
            inner = wrap(torch.nn.functional, name, partial(taking, name))
            # TorchScript calls this, and compiles the function that it returns
            inner.__prepare_scriptable__ = lambda original=inner.__wrapped__: original

    def _note(self, name: str, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        batch = self.progress.batch
        unusual = [*args[2:], *(kwargs.get(option) for option in UNUSUAL)]
        is_sum = kwargs.get("reduction") == "sum"
        if result.dim() or batch is None or len(args) < 2 or any(o is not None for o in unusual):
            return
        loader, number, index = batch
        if number >= MOST_PASSES or hasattr(result, "to_local"):
            return
        where = self.facts.where()
        key = loader, number, where, name, is_sum
        if key not in self._means and len(self._means) == MOST_LINES:
            return
        means = self.progress.means = self._means.setdefault(key, Means(name, where))
        if len(means.values) < MOST_KEPT:
            means.batches.append(index)
            means.counts.append(self._elements(name, *args[:2], **kwargs))
            means.values.append(result.detach() / (means.counts[-1] if is_sum else 1))

    def _elements(self, name: str, outputs: Any, targets: Any, **options: Any) -> Any:
        """The number of elements of a mean, or the sum of the weights of their classes."""
        if name not in BY_CLASS or targets.is_floating_point():
            return outputs.numel()
        counted, weight = targets != options.get("ignore_index", -100), options.get("weight")
        if weight is None:
            return counted.sum()
        return (weight[targets.where(counted, 0)] * counted).sum()

    # the order of arguments is that of cross_entropy and nll_loss
    def _train(self, result: Any, input: Any, target: Any, weight: Any = None,
               size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
               reduction: str = "mean", **others: Any) -> None:  # fmt: skip
        """Remember a mean over targets until the backward pass from it; a sum as its mean."""
        is_plain = reduction in ("mean", "sum") and size_average is reduce is None
        if not is_plain or hasattr(result, "to_local") or target.is_floating_point():
            return
        options = {"weight": weight, "ignore_index": ignore_index}
        divisor = self._elements(BY_CLASS[0], input, target, **options)
        mean: dict[str, Any] = {"where": self.facts.where(), "step": self.progress.steps}
        mean |= {"batch": self.progress.batch or (-1, 0, 0), "itself": ref(result)}
        mean |= {"divisor": divisor, "factor": result.detach() / (1, divisor)[reduction == "sum"]}
        self._pending = [*self._pending[:1], mean]

    def _backward(self, root: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        """Keep the mean that it begins from, and by which factor, unless a hook may change it."""
        means, self._pending = self._pending, []
        hooked = [t for t in (root, *(mean.pop("itself")() for mean in means))
                  if getattr(t, "_backward_hooks", None)]  # fmt: skip
        is_one = len(means) == 1 and isinstance(root, self.torch.Tensor) and root.numel() == 1
        if is_one and grad_tensors is None and not hooked:
            means[0]["factor"] = root.detach().to(means[0]["factor"].device) / means[0]["factor"]
            self._trained += means

    def finish(self) -> None:
        """Write them, except for lines with several means in a batch.

        Accelerate reads one batch ahead, so the last two are taken after the last one is read.
        """
        for (loader, number, _, name, is_sum), means in self._means.items():
            if len(means.batches) <= min(means.batches[-1], MOST_KEPT - 1):
                self.facts.write(
                    "means",
                    loader=loader,
                    number=number,
                    name=name,
                    is_sum=is_sum,
                    where=means.where,
                    values=[float(value) for value in means.values],
                    counts=[int(count) for count in means.counts],
                    gathered=[float(value) for value in means.gathered],
                )
        self._means = {}
        for mean in self._trained:
            numbers = {name: float(mean[name]) for name in ("divisor", "factor")}
            self.facts.write("trained", **{**mean, **numbers})
        self._trained = []
