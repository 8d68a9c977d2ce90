"""`late=1` of `ddp`: while a step computes, the gradient of the step before is summed.

    step n:  g_n = gradient of batch n at w_n      w_{n+1} = update(w_n, G_{n-1})
             G_n = mean of g_n over the batch, with its regularizer; available in step n+1

Step 0 has no G and updates nothing. With `after=k` steps 0 to k - 1 apply their own G, and step k
updates nothing: stale gradients hurt most while a model changes fast. Clipping, learning rates and
optimizer state belong to the step that applies G. The last G of a training is never applied: it
stays in the checkpoint, and a resumed training begins with it. tf_cnn_benchmarks calls this
`relaxed` consistency. Two sets of buckets alternate. The tally is never late: it is a message of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from allranks.errors import BadStep, RequestError
from allranks.strategies.card import Workload
from allranks.strategies.reduction_tree import Span
from allranks.torch.data.batch import Batch
from allranks.torch.parallel.data.buckets import Buckets
from allranks.torch.parallel.data.ddp import DDP
from allranks.torch.parallel.data.reducer import Bucket, Mean, Reducer
from allranks.torch.parallel.data.tree import Tree
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.tally import Tally


@dataclass
class PendingGradient:
    """A gradient whose sum is in flight, and what is applied to the sum."""

    buckets: Buckets
    step: int
    factor: float | Tensor = 1.0
    unused: tuple[int, ...] = ()
    regularizer: list[Tensor | None] = field(default_factory=list)
    whole: dict[str, Tensor] | None = None

    def wait(self, names: list[str]) -> dict[str, Tensor]:
        """Wait for the sum; returns the gradients by parameter name."""
        if self.whole is None:
            self.buckets.reducer.finish()
            for flat in self.buckets.gradients:
                flat.mul_(self.factor)
            self.whole = self._put_together(names)
        return self.whole

    def _put_together(self, names: list[str]) -> dict[str, Tensor]:
        views = views_of(self.buckets)
        gradients = {name: views[name] for i, name in enumerate(names) if i not in self.unused}
        for name, added in zip(names, self.regularizer, strict=False):
            if added is not None:
                gradients[name] = gradients[name].add_(added) if name in gradients else added
        return gradients


def views_of(buckets: Buckets) -> dict[str, Tensor]:
    """The view of each gradient, by the name of its parameter."""
    return {name: view for bucket in buckets.buckets for name, view in bucket.views.items()}


class Late:
    """The two sets of buckets of one model on one rank, and the gradient in flight."""

    def __init__(
        self,
        make: Callable[[], Buckets],
        names: list[str],
        parameters: list[nn.Parameter],
        after: int,
        *,
        exact: bool,
    ) -> None:
        self.filling, self._other = make(), make()
        self.names, self.parameters, self.exact = names, parameters, exact
        self._after = after
        self.on_its_way: PendingGradient | None = None

    def swap(self, leaving: PendingGradient, shards: range) -> PendingGradient | None:
        """Launch the gradient of this step; returns the gradient that this step applies."""
        came = self.on_its_way
        self.wait()
        self.filling.leave(shards)
        self.filling, self._other = self._other, self.filling
        if leaving.step < self._after:
            self.on_its_way = None
            return leaving
        self.on_its_way = leaving
        return came

    def drop(self, shards: range) -> None:
        """The step was no step: sum its empty gradients, and drop them."""
        self.wait()
        self.filling.finish(shards)

    def wait(self) -> None:
        """Wait for the gradient in flight."""
        if self.on_its_way is not None:
            self.on_its_way.wait(self.names)

    def state(self) -> dict[str, Any]:
        """The gradient that the next step applies, and its step; nothing before the first step."""
        if self.on_its_way is None:
            return {}
        whole = self.on_its_way.wait(self.names)
        gradient = {name: tensor.detach().clone() for name, tensor in whole.items()}
        return {"step": self.on_its_way.step, "gradient": gradient}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.wait()
        self.on_its_way = None
        if state:
            views = views_of(self._other)
            if not state["gradient"].keys() <= views.keys():
                raise changed_while_late()
            whole = {name: views[name].copy_(g) for name, g in state["gradient"].items()}
            self.on_its_way = PendingGradient(self._other, int(state["step"]), whole=whole)


class LateGradients(Gradients):
    """Records what is done to the gradient of this step; then becomes the one to apply."""

    def __init__(self, late: Late, step: int, shards: range) -> None:
        super().__init__(late.parameters, exact=late.exact)
        self.late, self.step, self.shards = late, step, shards
        self._leaving = PendingGradient(late.filling, step)

    def settle(self, unused: Sequence[int]) -> None:
        self._leaving.unused = tuple(unused)

    def follow(self, parameters: list[nn.Parameter]) -> None:
        raise changed_while_late()

    def add(self, value: Tensor) -> None:
        grads = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        value.backward()
        self._leaving.regularizer = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, grads, strict=True):
            parameter.grad = gradient

    def scale_(self, factor: float | Tensor) -> None:
        self._leaving.factor *= factor

    def norm(self, *, clips: bool, left_out: bool) -> float:
        """Launch the gradient of this step; from here on `.grad` is the one to apply."""
        came = self.late.swap(self._leaving, self.shards)
        gradients = {} if came is None else came.wait(self.late.names)
        for name, parameter in zip(self.late.names, self.parameters, strict=True):
            parameter.grad = gradients.get(name)
        if came is None:
            return 0.0
        norm = super().norm(clips=clips, left_out=left_out)
        if not math.isfinite(norm):
            where = "" if came.step == self.step else f", which is seen in step {self.step}"
            raise BadStep(
                f"step {came.step}: the gradient is not finite{where}, where it is applied. "
                "Nothing was updated: without late=1 a job says which samples brought it in."
            )
        return norm


def changed_while_late() -> RequestError:
    """The error for parameters that differ from those of the gradient in flight."""
    return RequestError(
        asked="ddp:late=1 with parameters that are unfrozen or added in mid-training",
        found="other parameters than the gradient on its way is of",
        why="it was summed for those of the step before",
        do="unfreeze them in model(), or leave late out",
    )


class LateDDP(DDP):
    """A step applies the gradient of the step before. The first `after` steps apply their own.

    A step waits only for the tally, which is summed along the tree if gradients are.
    """

    late: Late

    def prepare(self) -> None:
        kind = Tree if self.shard_alone else Mean
        self.counts: Reducer = kind(self.comm, self.task.shards)

    def lay_out(self) -> None:
        before = self.late.state() if hasattr(self, "late") else {}
        self.late = Late(
            lambda: self._build_buckets(0, self._build_reducer(), moves=False),
            self.step.names,
            self.step.parameters,
            self.context.options["late"].options["after"],
            exact=self.shard_alone,
        )
        self.late.load_state(before)
        layout = self.step.layout
        flat = self.counts.room(layout.size, layout.like)
        self.counts.prepare([Bucket(flat, flat[:0])])
        self.tally = layout.tally(flat[: layout.size])

    def sum_apart(self, leaves: list[tuple[Span, Tensor]]) -> Tensor:
        raise changed_while_late()

    def workload(self) -> Workload:
        flats, tally = self.late.filling.flats, self.counts.buckets[0].flat.nbytes
        numbers = sum(part.numel() for part in self.late.filling.gradients)
        return self.work(*(flat.nbytes for flat in flats), tally, gradients=numbers, tally=tally)

    def forward_backward(self, batch: Batch) -> Tally:
        filling, last = self.late.filling, batch.leaves[-1]
        filling.begin()
        self.counts.buckets[0].flat.zero_()
        for leaf in self.step.leaves(batch, self.tally):
            if leaf is not last:
                filling.add_leaf(leaf.shards)
            self.counts.launch(0, (leaf.shards.start, leaf.shards.stop), last=leaf is last)
        return self.tally

    def reduce(self, batch: Batch, local: Tally) -> tuple[Tally, Gradients]:
        self.counts.finish()
        shards = batch.leaves[-1].shards
        if not self.step.is_taken(batch, local.totals(batch.index).samples):
            self.late.drop(shards)
        return local, LateGradients(self.late, batch.index, shards)

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """There is no state of this rank alone."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "late": self.late.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.late.load_state(state.get("late", {}))

    def leave(self, *, failed: bool = False) -> None:
        if not failed and hasattr(self, "late"):
            self.late.wait()
        super().leave(failed=failed)
