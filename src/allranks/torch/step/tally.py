"""The tally: what a step reports, as numbers that are summed with the last bucket of gradients.

    [ loss sum | weight, samples, leaves, position, stop, save, changed, regularizer,
      used? per parameter | BatchNorm: weight, mean, variance per layer
      | rows that are touched, of parameters with sparse gradients
      | seconds that each rank has worked, for `--share auto` alone
      | bytes of a digest, less those of another rank, for `--audit` alone ]

It is sent with the gradients, so a step needs no message for bookkeeping. After the step every
rank knows the loss and the weight of the whole global batch, whether any rank had a sample, which
parameters any rank used, whether any rank shall stop or save, and the moments for the running
statistics. `weight` is a sum over the values of the loss. `position` is the number of the step
modulo 16: a sum that does not fit shows that a rank left out a collective, so that its step was
added to another step of the other ranks. `changed` counts the leaves with other trained parameters
than the step was laid out for (`changes`). `regularizer` is the value of the regularizer on each
rank in the step before.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from allranks.errors import FaultKind, ProgramError
from allranks.launcher.heartbeat import Heartbeat
from allranks.torch.accelerator import recorded_event
from allranks.torch.batchnorm.shard import RunningStatistics
from allranks.torch.checkpoint.state import local
from allranks.torch.model.layers import Scope, shard_norms
from allranks.torch.model.reals import reals
from allranks.training.progress import NOTHING, RankRequests

CACHED_COUNTS = 256
WEIGHT, REGULARIZER = 0, 7  # their places in the counts
FLAGS = 9  # where in the tally those of the parameters begin
POSITIONS = 16  # small, so that the counts of a usual step come from a small cache


class Totals(NamedTuple):
    """The contents of a tally that is summed over all ranks."""

    loss: float
    weight: float
    samples: int
    requests: RankRequests
    changed: bool
    regularizer: float
    unused: tuple[int, ...]


@dataclass(frozen=True)
class Unread:
    """The sums of all ranks, on the device; `is_right` is false if the host must look at them.

    The host reads `head` later, with `TallyLayout.totals`.
    """

    loss: Tensor
    weight: Tensor
    is_right: Tensor
    head: Tensor


class TallyLayout:
    """Where each number of the tally stands, for one model and its trainable parameters."""

    def __init__(
        self,
        model: nn.Module,
        parameters: list[nn.Parameter],
        rows: Sequence[int] = (),
        kind: torch.dtype | None = None,
        device: torch.device | None = None,
        timed_readers: int = 0,
        audit_bytes: int = 0,
    ) -> None:
        first = reals(local(parameters[0].detach()))
        self.like = first.new_empty(0, dtype=kind or first.dtype, device=device or first.device)
        self.counts = slice(1, FLAGS + len(parameters))
        self.norms = shard_norms(model)
        self.layers = [norm.index for norm in self.norms]
        self.moments = []
        self.size = self.counts.stop
        for norm in self.norms:
            start, self.size = self.size, self.size + 1 + 2 * norm.num_features
            self.moments.append(slice(start, self.size))
        self.all_moments = slice(self.counts.stop, self.size)
        self.running = RunningStatistics(self.norms, self.like)
        self.rows = []
        for count in rows:
            start, self.size = self.size, self.size + count
            self.rows.append(slice(start, self.size))
        self.seconds = slice(self.size, self.size + timed_readers)
        self.size += timed_readers
        self.audit = slice(self.size, self.size + audit_bytes)
        self.size += audit_bytes
        self.leaves: float | None = None  # of all ranks, as the first step had them
        self.was_updated = False  # whether the last update had a gradient for each parameter
        self._cache: dict[Hashable, Tensor] = {}

    def totals(self, numbers: Sequence[float], step: int) -> Totals:
        """What the sums say; raises `ProgramError` if they are not all of this step."""
        loss, weight, samples, leaves, position, stop, save, changed, value, *flags = numbers
        usual = self.leaves = self.leaves or leaves
        if leaves != usual or position != leaves * (step % POSITIONS):
            raise ProgramError(
                f"the ranks are not at the same step: this one is at {step}, and was given the "
                "sums of another. A rank left out a collective, or made one more than the others: "
                "look for a call of torch.distributed in the task that not every rank makes.",
                fault_kind=FaultKind.NOT_AT_THE_SAME_STEP,
            )
        unused = () if min(flags, default=1) > 0 else unused_of(flags)
        requests = RankRequests.of(stop > 0, save > 0)
        return Totals(loss, weight, int(samples), requests, changed > 0, value / leaves, unused)

    def tally(self, tensor: Tensor | None = None) -> Tally:
        """A tally over `tensor`, (size,); a new one of zeros if there is none."""
        if tensor is None:
            tensor = self.like.new_zeros(self.size, requires_grad=False)
        return Tally(self, tensor)

    def counts_of(
        self,
        weight: float,
        samples: int,
        step: int,
        requests: RankRequests,
        used: list[bool],
        changed: bool,
    ) -> Tensor:
        """The counts of one leaf as a tensor; those of a usual step are cached."""
        position = step % POSITIONS
        key = weight, samples, position, requests.stop, requests.save, all(used) or tuple(used)
        cached = None if changed else self._cache.get(key)
        if cached is None:
            counts = [weight, samples, 1.0, position, requests.stop, requests.save, changed, 0.0]
            cached = self.like.new_tensor([*counts, *used])
            if len(self._cache) == CACHED_COUNTS:
                self._cache.clear()
            if not changed:
                self._cache[key] = cached
        return cached


class Tally:
    """One tally: filled micro-batch by micro-batch, closed with its leaf,
    read once it is summed."""

    def __init__(self, layout: TallyLayout, tensor: Tensor) -> None:
        self.layout, self.tensor = layout, tensor
        self._loss, self._counts = tensor[0], tensor[layout.counts]
        self._head = tensor[: layout.counts.stop]
        self._weight, self._samples = 0.0, 0
        self._weighed: float | Tensor = 0.0
        self.is_right: Tensor | None = None  # what a strategy has checked of an unread sum

    def add(self, loss: Tensor, weight: float | Tensor, samples: int, scope: Scope) -> None:
        """Add the sums of a micro-batch, and the moments that its forward pass left in `scope`."""
        self._loss.add_(loss)
        if isinstance(weight, Tensor):  # on the device: not waited for
            self._weighed = self._weighed + weight.detach().double()
        else:
            self._weight += weight
        self._samples += samples
        self.add_moments(scope)

    def add_pass(self, other: Tally) -> None:
        """Add a tally with the sums of a pass alone: the same bits as if this one had them."""
        self.tensor.add_(other.tensor)
        self._weight, self._samples = self._weight + other._weight, self._samples + other._samples
        self._weighed = self._weighed + other._weighed

    def add_moments(self, scope: Scope) -> None:
        """Add those that a forward pass left in `scope`, if it left any."""
        if not self.layout.norms:
            return
        of_all = scope.moments_of_all(self.layout.layers)
        if of_all is not None:
            self.tensor[self.layout.all_moments].add_(of_all.to(self.tensor.device))
            return
        for norm, where in zip(self.layout.norms, self.layout.moments, strict=True):
            moments = scope.moments.pop(norm.index, None)
            if moments is not None:
                self.tensor[where].add_(moments.to(self.tensor.device))

    @property
    def weight(self) -> float:
        """The weight of the samples that were added, once the leaf is closed."""
        return float(self._counts[WEIGHT])

    @property
    def loss(self) -> float:
        """The sum of the weighted losses; waits for the device."""
        return float(self._loss)

    def leave_samples(self) -> None:
        """Clear all but the flags, because another rank counts the same samples."""
        self._loss.zero_()
        self._counts[:2].zero_()
        for where in self.layout.moments:
            self.tensor[where].zero_()

    def close(
        self,
        step: int,
        used: list[bool],
        requests: RankRequests = NOTHING,
        *,
        changed: bool = False,
        regularizer: float | Tensor = 0.0,
        touched: Iterable[Tensor] = (),
    ) -> None:
        """The leaf is complete; `used` says which parameters got a gradient,
        `touched` which rows."""
        counts = self.layout.counts_of(self._weight, self._samples, step, requests, used, changed)
        self._counts.add_(counts)
        for place, value in ((WEIGHT, self._weighed), (REGULARIZER, regularizer)):
            if isinstance(value, Tensor):
                self._counts[place].add_(value.to(self._counts))
        for where, rows in zip(self.layout.rows, touched, strict=True):
            self.tensor[where].add_(rows.to(self.tensor.device))
        self._weight, self._samples, self._weighed = 0.0, 0, 0.0

    def totals(self, step: int) -> Totals:
        """Read the sums; raises `ProgramError` if they are not all of this step."""
        return self.layout.totals(self._head.tolist(), step)

    def unread(self, step: int) -> Unread:
        """The sums, without waiting for them; only after one step of this layout was read."""
        head = self._head[:FLAGS].double()
        loss, weight, _, leaves, position, _, _, changed, _ = head.unbind()
        usual = self.layout.leaves
        assert usual is not None
        at = leaves.eq(usual) & position.eq(usual * (step % POSITIONS))
        right = at & weight.gt(0) & changed.eq(0)
        return Unread(loss, weight, right if self.is_right is None else right & self.is_right, head)

    def unused(self) -> tuple[int, ...]:
        """The positions of the parameters that no rank used; waits for the device."""
        return unused_of(self._head[FLAGS:].tolist())

    def update_norms(self, skip: Tensor | None = None) -> None:
        """Update all running statistics from the moments of all shards, unless `skip` is 1."""
        if not self.layout.norms:
            return
        moments = self.tensor[self.layout.all_moments]
        if skip is not None:
            moments.masked_fill_(skip > 0, 0)  # of no weight
        self.layout.running.update(moments)


WORK = ("data", "compute")
"""The phases of a rank's own work; it waits for others in the phase `exchange`."""


class Stopwatch:
    """Measures how long each rank works in a step: it reads its samples, and makes its passes.

    Waits for other ranks do not count. `reader` is the number of this rank among those that read
    data; ranks that read the same part add up. `of_ranks` has the seconds of the last step.
    """

    def __init__(self, heartbeat: Heartbeat, reader: int, device: torch.device) -> None:
        self.heartbeat, self.reader, self.device = heartbeat, reader, device
        self.of_ranks: tuple[float, ...] = ()
        self._from = 0.0

    def start(self) -> None:
        """A step begins: its samples are read next."""
        self._from = self._worked()

    def stop(self, seconds: Tensor) -> None:
        """The passes are over: write how long they took into the place of this rank.

        Waits for the work that is queued on an accelerator.
        """
        if (computed := recorded_event(self.device)) is not None:
            computed.synchronize()
        seconds[self.reader] = self._worked() - self._from

    def _worked(self) -> float:
        beat = self.heartbeat
        now = time.monotonic() - beat.since if beat.phase in WORK else 0.0
        return sum(beat.seconds[phase] for phase in WORK) + now


def unused_of(flags: Sequence[float]) -> tuple[int, ...]:
    return tuple(position for position, flag in enumerate(flags) if not flag)
