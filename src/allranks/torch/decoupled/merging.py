"""The global weights, and how they move by what learners have found. No clock, no thread, no wire.

A learner brings what it found in a chunk: its weights before minus those after, and the samples of
it. All that one learner has brought since its last merge is one finding. A merge is due when enough
learners have brought something (`quorum`); the caller may merge before, when its patience is over:

    theta <- outer(theta, sum_k n_k delta_k / sum_k n_k)         n_k: samples since k's last merge

A late finding counts in the next merge as any other: it is the way from the version that it began
from, whatever the weights are by then (Decoupled DiLoCo, arXiv 2604.21428). Buffers are statistics,
of which two changes do not add up: they become the same mean of what learners have now. Counts are
those of the finding with most samples.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from allranks.torch.decoupled.flat import Numbers
from allranks.torch.outer.optimizers import OuterOptimizer
from allranks.training.dispatch.ledger import Ledger


@dataclass(frozen=True)
class Work:
    """What a learner says of a chunk: which, from which version, and the sums of its steps."""

    chunk: int
    version: int
    samples: int
    loss: float
    weight: float
    rate: float

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Work:
        """What came in a message; raises `ValueError` or `KeyError` for what is none."""
        whole = (int(data[name]) for name in ("chunk", "version", "samples"))
        return cls(*whole, *(float(data[name]) for name in ("loss", "weight", "rate")))


@dataclass
class Finding:
    """What one learner has brought since its last merge."""

    delta: Tensor
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
    """The global weights `theta`, of which the first `parameters` move by the `outer` optimizer."""

    theta: Numbers
    parameters: int
    outer: OuterOptimizer
    ledger: Ledger
    quorum: int = 1
    version: int = 0
    samples: int = 0
    """All samples that are in the weights."""
    clocks: dict[int, Clock] = field(default_factory=dict)
    found: dict[int, Finding] = field(default_factory=dict)

    @property
    def waiting(self) -> set[int]:
        """The chunks that were brought and wait for a merge."""
        return {work.chunk for one in self.found.values() for work in one.work}

    def bring(self, learner: int, work: Work, delta: Numbers) -> bool:
        """Take what a learner has found; returns whether it counts: its chunk may be done.

        `delta` is old minus new of the parameters, and the new values of the buffers. The memory
        is taken over.
        """
        if self.ledger.is_done(work.chunk) or work.chunk in self.waiting:
            return False
        self.ledger.came(work.chunk)
        known = self.found.get(learner)
        if known is None:
            self.found[learner] = Finding(delta.weights, delta.counts, [work])
        else:
            delta.weights[: self.parameters].add_(known.delta[: self.parameters])
            known.delta = delta.weights
            known.counts = delta.counts
            known.work.append(work)
        return True

    @property
    def is_due(self) -> bool:
        """Whether enough learners have brought something, or no more can come."""
        return bool(self.found) and (len(self.found) >= self.quorum or self.is_all_there)

    @property
    def is_all_there(self) -> bool:
        """Whether every chunk of the job is done, or waits for a merge."""
        done = self.ledger.whole + len(self.ledger.done)
        return done + len(self.waiting) == self.ledger.chunks

    @torch.no_grad()
    def merge(self) -> Merged:
        """Move the weights by all that has come."""
        found, total = self.found, sum(one.samples for one in self.found.values())
        mean = torch.zeros_like(self.theta.weights)
        for one in found.values():
            if one.samples:
                mean.add_(one.delta, alpha=one.samples / total)
        if total:
            self.theta.weights[self.parameters :] = mean[self.parameters :]
        work = [w for one in found.values() for w in one.work]
        rate = work[-1].rate
        self.outer.step(self.theta.weights[: self.parameters], mean[: self.parameters], rate)
        largest = max(found.values(), key=lambda one: one.samples)
        self.theta.counts.copy_(largest.counts)
        oldest = min(w.version for w in work)
        for done in work:
            self.ledger.merged(done.chunk)
        for learner, one in found.items():
            before = self.clocks.get(learner, Clock())
            self.clocks[learner] = Clock(one.work[-1].chunk, before.samples + one.samples)
        self.version += 1
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

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights; what was not merged is handed out again."""
        return {
            "version": self.version,
            "samples": self.samples,
            "momentum": None if self.outer.momentum is None else self.outer.momentum.clone(),
            "ledger": self.ledger.state(),
            "clocks": {learner: asdict(clock) for learner, clock in self.clocks.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned; the weights are taken up by themselves."""
        self.version, self.samples = int(state["version"]), int(state["samples"])
        momentum = state["momentum"]
        self.outer.momentum = None if momentum is None else momentum.clone()
        self.ledger.load_state(state["ledger"])
        clocks = state.get("clocks", {})  # older checkpoints have none
        self.clocks = {learner: Clock(**clock) for learner, clock in clocks.items()}
        self.found = {}
