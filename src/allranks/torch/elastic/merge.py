"""The global weights, and how they move by what learners have found. No clock, no thread, no wire.

A learner brings what it found in a chunk: its weights before minus those after, and the samples of
it. All that one learner has brought since its last merge is one finding. A merge is due when enough
learners have brought something (`quorum`); the caller may merge before, when its patience is over:

    theta <- outer(theta, sum_k n_k delta_k / sum_k n_k)         n_k: samples since k's last merge

With fragments a finding is of one fragment of the parameters: all that its learner has found there
since it has last brought that one, with the samples of all this time. Each fragment moves by
itself, and has a momentum of its own. At the end of the job learners bring the rest: what they have
found in the fragments that they had not brought.

A late finding counts in the next merge as any other: it is the way from the version that it began
from, whatever the weights are by then (Decoupled DiLoCo, arXiv 2604.21428). Buffers are statistics,
of which two changes do not add up: they become the same mean of what learners have now. Counts are
those of the finding with most samples.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from allranks.torch.elastic.strategy import FlatModel, Numbers
from allranks.torch.local_sgd.optimizers import OuterOptimizer
from allranks.training.work_queue import Ledger


@dataclass(frozen=True)
class Work:
    """What a learner says of a chunk: which, from which version, and the sums of its steps.

    What it has found comes along for one `fragment`, of `share` samples; it `owes` the others.
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
        """What came in a message; raises `ValueError` or `KeyError` for what is none."""
        kinds: dict[str, Any] = {"int": int, "float": float, "bool": bool}
        return cls(**{one.name: kinds[str(one.type)](data[one.name]) for one in fields(cls)})

    @property
    def counted(self) -> int:
        """The samples that its finding is of."""
        return self.samples if self.share < 0 else self.share


@dataclass
class FragmentPart:
    """What one learner has found in one fragment, (n,), and of how many samples."""

    delta: Tensor
    samples: int

    def add(self, other: FragmentPart) -> None:
        self.delta, self.samples = other.delta.add_(self.delta), self.samples + other.samples


@dataclass
class LearnerUpdate:
    """What one learner has brought since its last merge: by fragments, and its buffers."""

    parts: dict[int, FragmentPart]
    buffers: Tensor
    counts: Tensor
    work: list[Work]

    @property
    def samples(self) -> int:
        return sum(one.samples for one in self.work)


@dataclass(frozen=True)
class Clock:
    """How far a learner is, as the weights have it: its last chunk, and all of its samples."""

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
    """By how many versions the oldest finding was behind."""


@dataclass
class Merging:
    """The global weights `theta`, of which the first `parameters` move by the `outer` optimizer.

    `parts` are the fragments of these, all of them one unless it is said. `owing` are the learners
    that have found what they have not brought.
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
    found: dict[int, LearnerUpdate] = field(default_factory=dict)
    owing: set[int] = field(default_factory=set)
    rested: set[int] = field(default_factory=set)
    """Those whose rest is in the weights."""

    def __post_init__(self) -> None:
        self.parts = self.parts or [slice(0, self.parameters)]
        self.outers = [copy.deepcopy(self.outer) for _ in self.parts]
        self.changed_at = [self.version] * len(self.parts)
        """The version in which each fragment has moved last."""

    @property
    def is_over(self) -> bool:
        """Whether all that was found is in the weights."""
        return self.ledger.is_over and not self.owing and not self.found

    @property
    def fragment(self) -> int:
        """The fragment that learners are to bring next: one in all merges of a round of them."""
        merges = -(-self.ledger.parts // max(1, self.quorum))
        return self.version // merges % len(self.parts)

    def size_of(self, fragment: int) -> int:
        """How many numbers a fragment has; raises `ValueError` for one that is none."""
        if not 0 <= fragment < len(self.parts):
            raise ValueError(f"fragment {fragment} of {len(self.parts)}")
        part = self.parts[fragment]
        return int(part.stop - part.start)

    @property
    def waiting(self) -> set[int]:
        """The chunks that were brought and wait for a merge."""
        return {work.chunk for one in self.found.values() for work in one.work}

    def bring(self, learner: int, work: Work, delta: Numbers) -> bool:
        """Take what a learner has found; returns whether it counts: its chunk may be done.

        `delta` is old minus new of the parameters of its fragment, and the new values of the
        buffers. The memory is taken over.
        """
        if self.ledger.is_done(work.chunk) or work.chunk in self.waiting:
            return False
        self.ledger.came(work.chunk)
        (self.owing.add if work.owes else self.owing.discard)(learner)
        cut = self.size_of(work.fragment)
        buffers = delta.weights[cut:]
        known = self.found.setdefault(learner, LearnerUpdate({}, buffers, delta.counts, []))
        known.buffers, known.counts = buffers, delta.counts
        known.work.append(work)
        self._add(known, work.fragment, FragmentPart(delta.weights[:cut], work.counted))
        return True

    def bring_rest(self, learner: int, shares: Sequence[int], delta: Numbers) -> None:
        """Take what a learner has found in all fragments and not brought, of so many samples.

        Once, and when all chunks are done; raises `ValueError` for what is no rest.
        """
        if len(shares) != len(self.parts) or min(shares) < 0:
            raise ValueError(f"shares {shares} of {len(self.parts)} fragments")
        if not self.ledger.is_over or learner not in self.owing:
            return
        known = self.found.setdefault(
            learner, LearnerUpdate({}, delta.weights[:0], delta.counts, [])
        )
        for fragment, (part, samples) in enumerate(zip(self.parts, shares, strict=True)):
            if samples:
                self._add(known, fragment, FragmentPart(delta.weights[part], samples))
        self.owing.discard(learner)

    @staticmethod
    def _add(known: LearnerUpdate, fragment: int, part: FragmentPart) -> None:
        if fragment in known.parts:
            known.parts[fragment].add(part)
        else:
            known.parts[fragment] = part

    @property
    def is_due(self) -> bool:
        """Whether enough learners have brought something, or no more can come."""
        if not self.found or self.ledger.is_over:  # then it is the rest, if anything
            return False
        return len(self.found) >= self.quorum or self.is_all_there

    @property
    def is_all_there(self) -> bool:
        """Whether every chunk of the job is done, or waits for a merge."""
        done = self.ledger.whole + len(self.ledger.done)
        return done + len(self.waiting) == self.ledger.chunks

    @torch.no_grad()
    def merge(self) -> Merged:
        """Move the weights by all that has come."""
        found, total = self.found, sum(one.samples for one in self.found.values())
        work = [w for one in found.values() for w in one.work]
        rate = work[-1].rate
        self._move(rate)
        if total:
            seen = [FragmentPart(one.buffers, one.samples) for one in found.values()]
            self.theta.weights[self.parameters :] = _mean(seen)
        largest = max(found.values(), key=lambda one: one.samples)
        self.theta.counts.copy_(largest.counts)
        oldest = min(w.version for w in work)
        for done in work:
            self.ledger.merged(done.chunk)
        for learner, one in found.items():
            before = self.clocks.get(learner, Clock())
            self.clocks[learner] = Clock(one.work[-1].chunk, before.samples + one.samples)
        self.samples += total
        self.found = {}
        return Merged(
            self.version,
            self.ledger.steps_done,
            len(work),
            total,
            sum(w.loss for w in work),
            sum(w.weight for w in work),
            rate,
            tuple(found),
            max(0, self.version - 1 - oldest),
        )

    @torch.no_grad()
    def merge_rest(self) -> None:
        """Move the weights by the rest of what was found; no sample is counted again."""
        self._move(0.0)
        self.rested |= set(self.found)
        self.found = {}

    def _move(self, rate: float) -> None:
        """A new version: each fragment of which something was found moves by the mean of it."""
        self.version += 1
        for fragment, (part, outer) in enumerate(zip(self.parts, self.outers, strict=True)):
            brought = [one.parts[fragment] for one in self.found.values() if fragment in one.parts]
            if brought:
                outer.step(self.theta.weights[part], _mean(brought), rate)
                self.changed_at[fragment] = self.version

    def _momentum(self) -> Tensor | None:
        """That of all fragments, zeros for one that has not moved."""
        if all(outer.momentum is None for outer in self.outers):
            return None
        kept = torch.zeros_like(self.theta.weights[: self.parameters])
        for part, outer in zip(self.parts, self.outers, strict=True):
            if outer.momentum is not None:
                kept[part] = outer.momentum
        return kept

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights; what was not merged is handed out again."""
        return {
            "version": self.version,
            "samples": self.samples,
            "momentum": self._momentum(),
            "ledger": self.ledger.state(),
            "rested": sorted(self.rested),
            "clocks": {learner: asdict(clock) for learner, clock in self.clocks.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned; the weights are taken up by themselves."""
        self.version, self.samples = int(state["version"]), int(state["samples"])
        momentum = state["momentum"]
        for part, outer in zip(self.parts, self.outers, strict=True):
            outer.momentum = None if momentum is None else momentum[part].clone()
        self.changed_at = [self.version] * len(self.parts)
        self.ledger.load_state(state["ledger"])
        clocks = state.get("clocks", {})  # older checkpoints have none
        self.clocks = {learner: Clock(**clock) for learner, clock in clocks.items()}
        self.found, self.owing, self.rested = {}, set(), set()


def _mean(found: Sequence[FragmentPart]) -> Tensor:
    """The mean of what was found, by samples; zeros where there was no sample."""
    total, mean = sum(one.samples for one in found), torch.zeros_like(found[0].delta)
    for one in found:
        if one.samples:
            mean.add_(one.delta, alpha=one.samples / total)
    return mean


# --- rest ----------------------------------------------------------------------------------------
# What a learner has found in the fragments of the weights that it has not brought yet.
#
#     found     a chunk: old minus new of all parameters, and its samples
#     kept     += found;  shares += samples, of every fragment
#     brought   kept of one fragment, and its share; both are zero there from now on
#     lost    all of it, where the link or the synchronizer is lost: its chunks may be others' then
#
# The fragment is the one whose turn it is, as the synchronizer says, so that learners bring the
# same ones at a time; or the one that was not brought for longest, if that is twice as many chunks
# as there are fragments: a slow learner might miss the turns of one for ever. With one fragment
# nothing is kept.


@dataclass(frozen=True)
class Contribution:
    """What is brought of a chunk: `sent` has one fragment, of a `share` of samples, and buffers."""

    fragment: int
    share: int
    sent: Numbers


class Rest:
    """What is `kept`, (parameters,), of which each of the `parts` has a share of samples."""

    def __init__(self, flat: FlatModel, fragments: int) -> None:
        self._flat = flat
        self.parts = flat.fragments(min(fragments, max(1, flat.parameters)))
        self.turn = 0
        self.shares = [0] * len(self.parts)
        self.kept: Tensor | None = None
        if len(self.parts) > 1:
            self.kept = torch.zeros(flat.parameters, dtype=flat.type)
        self._waited = [0] * len(self.parts)

    def brings(self, found: Numbers, samples: int) -> Contribution:
        """What is brought of the next chunk; the rest is kept."""
        if self.kept is None:
            return Contribution(0, samples, found)
        own = self._flat.parameters
        self.kept.add_(found.weights[:own])
        self.shares = [share + samples for share in self.shares]
        fragment = self._next()
        part, share = self.parts[fragment], self.shares[fragment]
        sent = Numbers(torch.cat([self.kept[part], found.weights[own:]]), found.counts)
        self.kept[part] = 0
        self.shares[fragment] = 0
        return Contribution(fragment, share, sent)

    def _next(self) -> int:
        self._waited = [chunks + 1 for chunks in self._waited]
        longest = max(range(len(self.parts)), key=lambda n: self._waited[n])
        is_late = self._waited[longest] > 2 * len(self.parts)
        fragment = longest if is_late else self.turn
        self._waited[fragment] = 0
        return fragment

    def all(self) -> tuple[list[int], Numbers]:
        """All that is kept, with the buffers of now; nothing is kept any more."""
        numbers = self._flat.read()
        shares = list(self.shares)
        if self.kept is not None:
            numbers.weights[: self._flat.parameters] = self.kept
        self.forget()
        return shares, numbers

    def forget(self) -> None:
        """Nothing is kept."""
        self.shares = [0] * len(self.parts)
        if self.kept is not None:
            self.kept.zero_()

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint has of it."""
        if self.kept is None:
            return None
        return {"kept": self.kept.clone(), "shares": [*self.shares], "waited": [*self._waited]}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take up what `state` returned, where the parts are as many as then."""
        if self.kept is None or state is None or len(state["shares"]) != len(self.shares):
            return
        self.kept.copy_(state["kept"])
        self.shares = [int(share) for share in state["shares"]]
        self._waited = [int(chunks) for chunks in state["waited"]]
