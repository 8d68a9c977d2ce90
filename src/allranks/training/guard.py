"""The guard: what a job does with a step that went bad.

A step is bad if its loss or its gradient is not finite or, with `spike`, if its gradient is many
times longer than it was lately. After the exchange every rank holds the same sums, so all ranks
judge and decide alike, without a message. Only for a bad step, the ranks then search for its cause
(`bad_step`), which costs that step twice and a good step nothing.

    stop   nothing is updated, and every rank raises `BadStep`
    skip   nothing is updated, the next batch follows; a long row of them ends the job
    warn   the update is made, and the step is marked
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from allranks.errors import BadStep, RequestError

WINDOW = 100  # good steps that say how long a gradient usually is
ENOUGH = 20  # of them, before anything is called a spike
SKIPPED_IN_A_ROW = 20


class BatchPosition(Protocol):
    """What is known of a global batch here: which step of the job it is."""

    @property
    def index(self) -> int: ...


@dataclass(frozen=True)
class Bad:
    """The problem of a step; `spiked` if all is finite, and only the gradient is too long."""

    problem: str
    spiked: bool = False


@dataclass(frozen=True)
class BadStepFinding:
    """One thing that was found of a bad step; `rank` `None`: it is the same on all of them.

    `size` is the length of a gradient. With `is_verb` the text goes on after the name of the rank.
    """

    text: str
    rank: int | None = None
    size: float = 0.0
    is_verb: bool = False

    def __str__(self) -> str:
        if self.rank is None:
            return self.text
        return f"rank {self.rank}{' ' if self.is_verb else ': '}{self.text}"


@dataclass(frozen=True)
class StepVerdict:
    """What is done with a step, and what there is to say of a bad one: also rank by rank."""

    text: str = ""
    update: bool = True
    culprits: tuple[tuple[int, str], ...] = ()


class Guard:
    """Judges every step of a job by `policy`. `find(batch, spiked)` returns the causes."""

    def __init__(
        self,
        policy: str = "stop",
        spike: float | None = None,
        find: Callable[[Any, bool], Sequence[BadStepFinding]] = lambda batch, spiked: (),
    ) -> None:
        self.policy, self.spike, self.find = policy, spike, find
        self.skipped_in_a_row = 0
        self._lately = _Lately()

    @property
    def limit(self) -> float:
        """The longest gradient that is no spike; infinite where spikes are not looked for."""
        usual = self._lately.median() if self.spike is not None else None
        return self.spike * usual if self.spike is not None and usual else math.inf

    def judge(self, loss: float, norm: float) -> Bad | None:
        """The problem of a step with this loss and gradient norm; `None` for a good step."""
        if not (is_finite(loss) and is_finite(norm)):
            return Bad(_not_finite(loss, norm))
        if self.spike is not None:
            usual = self._lately.median()
            if usual and norm > self.spike * usual:
                times = f"{norm / usual:.3g} times the usual {usual:.4g}"
                return Bad(f"the gradient is {norm:.4g} long, {times}", spiked=True)
            self._lately.add(norm)
        self.skipped_in_a_row = 0
        return None

    def decide(self, batch: BatchPosition, bad: Bad) -> StepVerdict:
        """Decide about a bad step; all ranks that share weights call this. Raises `BadStep`."""
        findings = self.find(batch, bad.spiked)
        text = "; ".join(dict.fromkeys([f"step {batch.index}: {bad.problem}", *map(str, findings)]))
        culprits = tuple((f.rank, f.text) for f in findings if f.rank is not None)
        if self.policy == "warn":
            self.skipped_in_a_row = 0
            return StepVerdict(text, update=True, culprits=culprits)
        if self.policy == "stop":
            raise BadStep(
                f"{text}. Nothing was updated. Started again, it would go bad again: mend the data "
                "or the loss, or pass over such steps with --on-bad-step skip."
            )
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= SKIPPED_IN_A_ROW:
            raise BadStep(
                f"{text}. It is the last of {SKIPPED_IN_A_ROW} bad steps in a row, which were all "
                "skipped: nothing is learnt any more."
            )
        return StepVerdict(text, update=False, culprits=culprits)

    def state(self) -> dict[str, Any]:
        """What later decisions depend on, as plain values."""
        return {"skipped_in_a_row": self.skipped_in_a_row, "norms": list(self._lately.norms)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        self._lately = _Lately()
        for norm in state["norms"]:
            self._lately.add(float(norm))


class _Lately:
    """The gradient norms of the last good steps, also kept sorted."""

    def __init__(self) -> None:
        self.norms: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, norm: float) -> None:
        self.norms.append(norm)
        insort(self._sorted, norm)
        if len(self.norms) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self.norms.popleft())]

    def median(self) -> float | None:
        """The upper median; `None` while there are too few."""
        return self._sorted[len(self._sorted) // 2] if len(self._sorted) >= ENOUGH else None


def is_finite(number: Any) -> Any:
    """Whether a number is finite; for a scalar tensor, a tensor, without waiting for it."""
    return number - number == 0


def _not_finite(loss: float, norm: float) -> str:
    wrong = [] if math.isfinite(loss) else [f"the loss is {loss}"]
    if not math.isfinite(norm):
        wrong.append("the gradient is not finite")
    return " and ".join(wrong)


def weightless(batch: BatchPosition, weight: float) -> RequestError:
    """The error for a global batch whose samples weigh nothing."""
    return RequestError(
        asked=f"step {batch.index} of the job",
        found=f"the weights of its global batch add up to {weight}",
        why="a mean over no weight does not exist",
        do="let weight(batch) be positive somewhere in every batch",
    )
