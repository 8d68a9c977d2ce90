"""The global weights, and the merge of updates. No clock, no thread, no communication.

A learner sends the delta of a chunk (its weights before minus those after) and its samples. All
deltas of one learner since its last merge add up to one update. A merge is due when enough learners
have sent something (`quorum`); the caller may merge earlier, after its grace time:

    theta <- outer(theta, sum_k n_k delta_k / sum_k n_k)         n_k: samples since k's last merge

With fragments an update has one fragment of the parameters: the learner's delta there since it last
sent that fragment, and the samples of all this time. Each fragment is merged by itself, with its
own momentum. At the end of the job learners send the remainder: their deltas of the fragments they
have not sent.

A late update counts in the next merge as any other: it is relative to the version that it began
from, whatever the weights are by then (Decoupled DiLoCo, arXiv 2604.21428). Changes of buffers do
not add up, as these are statistics: they become the same mean of the learners' present values.
Counts are those of the update with most samples.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from allranks.torch.elastic.strategy import FlatModel, Numbers
from allranks.torch.local_sgd.global_weights import OuterOptimizer
from allranks.training.work_queue import Ledger


@dataclass(frozen=True)
class Work:
    """A learner's report of a chunk: its number, its first version, and the sums of its steps.

    The delta is of one `fragment` and `share` samples; `owes`: there are unsent deltas of others.
    """

    chunk: int
    version: int
    samples: int
    loss: float
    weight: float
    rate: float
    fragment: int = 0
    share: int = -1
    owes: bool = False

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Work:
        """The report in a message; raises `ValueError` or `KeyError` if it is malformed."""
        kinds: dict[str, Any] = {"int": int, "float": float, "bool": bool}
        return cls(**{f.name: kinds[str(f.type)](data[f.name]) for f in fields(cls)})

    @property
    def delta_samples(self) -> int:
        """The number of samples of its delta."""
        return self.samples if self.share < 0 else self.share


@dataclass(frozen=True)
class FragmentPart:
    """The delta of one learner in one fragment, (n,), and its number of samples."""

    delta: Tensor
    samples: int


@dataclass
class LearnerUpdate:
    """All that one learner has sent since its last merge: deltas by fragment, and buffers."""

    parts: dict[int, FragmentPart]
    buffers: Tensor
    counts: Tensor
    work: list[Work]

    @property
    def samples(self) -> int:
        return sum(work.samples for work in self.work)

    def add(self, fragment: int, delta: Tensor, samples: int) -> None:
        """Add a delta of one fragment. Its memory is kept."""
        if before := self.parts.get(fragment):
            delta, samples = delta.add_(before.delta), samples + before.samples
        self.parts[fragment] = FragmentPart(delta, samples)


@dataclass(frozen=True)
class Clock:
    """The last chunk of a learner in the weights, and the number of all its samples there."""

    chunk: int = -1
    samples: int = 0


@dataclass(frozen=True)
class Merged:
    """One merge: `steps` of the job are done with it; its chunks, samples, and sums of losses."""

    version: int
    steps: int
    chunks: int
    samples: int
    loss: float
    weight: float
    rate: float
    learners: tuple[int, ...]
    staleness: int
    """By how many versions the oldest update was behind."""


@dataclass
class Merging:
    """The global weights `theta`, of which the first `parameters` move by the `outer` optimizer.

    `parts` are the fragments of these, by default a single one. `owing` are the learners with
    unsent deltas.
    """

    theta: Numbers
    parameters: int
    outer: OuterOptimizer
    ledger: Ledger
    quorum: int = 1
    parts: list[slice] = field(default_factory=list)
    version: int = 0
    samples: int = 0
    """All samples that are in the weights."""
    clocks: dict[int, Clock] = field(default_factory=dict)
    updates: dict[int, LearnerUpdate] = field(default_factory=dict)
    owing: set[int] = field(default_factory=set)
    rested: set[int] = field(default_factory=set)
    """Those whose remainder is in the weights."""

    def __post_init__(self) -> None:
        self.parts = self.parts or [slice(0, self.parameters)]
        self.outers = [copy.deepcopy(self.outer) for _ in self.parts]
        self.changed_at = [self.version] * len(self.parts)
        """The version in which each fragment was last updated."""

    @property
    def is_over(self) -> bool:
        """Whether all updates are in the weights."""
        return self.ledger.is_over and not self.owing and not self.updates

    @property
    def fragment(self) -> int:
        """The fragment which learners send next: the same in all merges of a round."""
        merges = -(-self.ledger.parts // max(1, self.quorum))
        return self.version // merges % len(self.parts)

    def size_of(self, fragment: int) -> int:
        """The size of a fragment; raises `ValueError` if there is no such fragment."""
        if not 0 <= fragment < len(self.parts):
            raise ValueError(f"fragment {fragment} of {len(self.parts)}")
        part = self.parts[fragment]
        return int(part.stop - part.start)

    @property
    def waiting(self) -> set[int]:
        """The chunks that wait for a merge."""
        return {work.chunk for update in self.updates.values() for work in update.work}

    def add_update(self, learner: int, work: Work, delta: Numbers) -> bool:
        """Add the delta of a chunk; returns `False` if the chunk was done before.

        `delta` is old minus new of the parameters of its fragment, and the new values of the
        buffers. Its memory is kept.
        """
        if self.ledger.is_done(work.chunk) or work.chunk in self.waiting:
            return False
        self.ledger.came(work.chunk)
        (self.owing.add if work.owes else self.owing.discard)(learner)
        cut = self.size_of(work.fragment)
        buffers = delta.weights[cut:]
        known = self.updates.setdefault(learner, LearnerUpdate({}, buffers, delta.counts, []))
        known.buffers, known.counts = buffers, delta.counts
        known.work.append(work)
        known.add(work.fragment, delta.weights[:cut], work.delta_samples)
        return True

    def add_remainder(self, learner: int, shares: Sequence[int], delta: Numbers) -> None:
        """Add the unsent deltas of all fragments of a learner, with their numbers of samples.

        Counts once, after all chunks are done; raises `ValueError` for malformed `shares`.
        """
        if len(shares) != len(self.parts) or min(shares) < 0:
            raise ValueError(f"shares {shares} of {len(self.parts)} fragments")
        if not self.ledger.is_over or learner not in self.owing:
            return
        known = self.updates.setdefault(
            learner, LearnerUpdate({}, delta.weights[:0], delta.counts, [])
        )
        for fragment, (part, samples) in enumerate(zip(self.parts, shares, strict=True)):
            if samples:
                known.add(fragment, delta.weights[part], samples)
        self.owing.discard(learner)

    @property
    def is_due(self) -> bool:
        """Whether enough learners have sent something, or no more can come."""
        if not self.updates or self.ledger.is_over:  # then these are remainders
            return False
        return len(self.updates) >= self.quorum or self.is_all_there

    @property
    def is_all_there(self) -> bool:
        """Whether every chunk of the job is done or waits for a merge."""
        done = self.ledger.whole + len(self.ledger.done)
        return done + len(self.waiting) == self.ledger.chunks

    @torch.no_grad()
    def merge(self) -> Merged:
        """Update the weights by all updates since the last merge."""
        updates, total = self.updates, sum(update.samples for update in self.updates.values())
        work = [w for update in updates.values() for w in update.work]
        rate = work[-1].rate
        self._move(rate)
        if total:
            buffers = [FragmentPart(update.buffers, update.samples) for update in updates.values()]
            self.theta.weights[self.parameters :] = _mean(buffers)
        largest = max(updates.values(), key=lambda update: update.samples)
        self.theta.counts.copy_(largest.counts)
        oldest = min(w.version for w in work)
        for done in work:
            self.ledger.merged(done.chunk)
        for learner, update in updates.items():
            before = self.clocks.get(learner, Clock())
            self.clocks[learner] = Clock(update.work[-1].chunk, before.samples + update.samples)
        self.samples += total
        self.updates = {}
        return Merged(
            self.version,
            self.ledger.steps_done,
            len(work),
            total,
            sum(w.loss for w in work),
            sum(w.weight for w in work),
            rate,
            tuple(updates),
            max(0, self.version - 1 - oldest),
        )

    @torch.no_grad()
    def merge_remainders(self) -> None:
        """Update the weights by the remainders; no sample is counted again."""
        self._move(0.0)
        self.rested |= set(self.updates)
        self.updates = {}

    def _move(self, rate: float) -> None:
        """Make a new version: each fragment with updates moves by their mean."""
        self.version += 1
        for fragment, (part, outer) in enumerate(zip(self.parts, self.outers, strict=True)):
            deltas = [u.parts[fragment] for u in self.updates.values() if fragment in u.parts]
            if deltas:
                outer.step(self.theta.weights[part], _mean(deltas), rate)
                self.changed_at[fragment] = self.version

    def _momentum(self) -> Tensor | None:
        """The momentum of all fragments, zeros for one that has not moved."""
        if all(outer.momentum is None for outer in self.outers):
            return None
        momentum = torch.zeros_like(self.theta.weights[: self.parameters])
        for part, outer in zip(self.parts, self.outers, strict=True):
            if outer.momentum is not None:
                momentum[part] = outer.momentum
        return momentum

    def state(self) -> dict[str, Any]:
        """The state besides the weights; chunks that are not merged are handed out again."""
        return {
            "version": self.version,
            "samples": self.samples,
            "momentum": self._momentum(),
            "ledger": self.ledger.state(),
            "rested": sorted(self.rested),
            "clocks": {learner: asdict(clock) for learner, clock in self.clocks.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned; the weights are loaded separately."""
        self.version, self.samples = int(state["version"]), int(state["samples"])
        momentum = state["momentum"]
        for part, outer in zip(self.parts, self.outers, strict=True):
            outer.momentum = None if momentum is None else momentum[part].clone()
        self.changed_at = [self.version] * len(self.parts)
        self.ledger.load_state(state["ledger"])
        clocks = state.get("clocks", {})  # older checkpoints have none
        self.clocks = {learner: Clock(**clock) for learner, clock in clocks.items()}
        self.updates, self.owing, self.rested = {}, set(), set()


def _mean(parts: Sequence[FragmentPart]) -> Tensor:
    """The mean of the deltas, weighted by samples; zeros without any sample."""
    total, mean = sum(part.samples for part in parts), torch.zeros_like(parts[0].delta)
    for part in parts:
        if part.samples:
            mean.add_(part.delta, alpha=part.samples / total)
    return mean


# --- remainder -----------------------------------------------------------------------------------
# The delta of a learner in the fragments of the weights that it has not sent yet.
#
#     chunk     its delta: old minus new of all parameters, and its samples
#     delta    += that of the chunk;  shares += samples, of every fragment
#     sent      delta of one fragment, and its share; both are zero there from now on
#     lost      all of it, if the link or the synchronizer is lost: others may get the chunks
#
# The synchronizer names the next fragment, so that all learners send the same one. A learner sends
# instead the fragment which it has not sent for the longest time, if that is more than twice as
# many chunks as there are fragments: a slow learner might never meet its turn. With one fragment
# there is no remainder.


@dataclass(frozen=True)
class Contribution:
    """What is sent after a chunk: one fragment, of `share` samples, and the buffers."""

    fragment: int
    share: int
    numbers: Numbers


class Remainder:
    """The unsent `delta`, (parameters,); each of its `parts` has a share of samples."""

    def __init__(self, flat: FlatModel, fragments: int) -> None:
        self._flat = flat
        self.parts = flat.fragments(min(fragments, max(1, flat.parameters)))
        self.turn = 0
        self.shares = [0] * len(self.parts)
        self.delta: Tensor | None = None
        if len(self.parts) > 1:
            self.delta = torch.zeros(flat.parameters, dtype=flat.type)
        self._waited = [0] * len(self.parts)

    def contribution(self, delta: Numbers, samples: int) -> Contribution:
        """What to send after a chunk with this delta; the rest remains here."""
        if self.delta is None:
            return Contribution(0, samples, delta)
        parameters = self._flat.parameters
        self.delta.add_(delta.weights[:parameters])
        self.shares = [share + samples for share in self.shares]
        fragment = self._next()
        part, share = self.parts[fragment], self.shares[fragment]
        numbers = Numbers(torch.cat([self.delta[part], delta.weights[parameters:]]), delta.counts)
        self.delta[part] = 0
        self.shares[fragment] = 0
        return Contribution(fragment, share, numbers)

    def _next(self) -> int:
        self._waited = [chunks + 1 for chunks in self._waited]
        longest = max(range(len(self.parts)), key=lambda n: self._waited[n])
        is_late = self._waited[longest] > 2 * len(self.parts)
        fragment = longest if is_late else self.turn
        self._waited[fragment] = 0
        return fragment

    def all(self) -> tuple[list[int], Numbers]:
        """The samples of each fragment, and the whole delta with current buffers; clears it."""
        numbers = self._flat.read()
        shares = list(self.shares)
        if self.delta is not None:
            numbers.weights[: self._flat.parameters] = self.delta
        self.forget()
        return shares, numbers

    def forget(self) -> None:
        """Clear the delta."""
        self.shares = [0] * len(self.parts)
        if self.delta is not None:
            self.delta.zero_()

    def state(self) -> dict[str, Any] | None:
        """The state for a checkpoint."""
        if self.delta is None:
            return None
        return {"kept": self.delta.clone(), "shares": [*self.shares], "waited": [*self._waited]}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load what `state` returned, if it has the same number of parts."""
        if self.delta is None or state is None or len(state["shares"]) != len(self.shares):
            return
        self.delta.copy_(state["kept"])
        self.shares = [int(share) for share in state["shares"]]
        self._waited = [int(chunks) for chunks in state["waited"]]
