"""The dial: of all candidates the least loss of exactness that is nearly as fast as the fastest.

Among those within `SLACK` of the fastest predicted step, the first of `candidates` is taken. So a
period is no longer than pays, and where the link is fast the choice is `ddp`. Pure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from allranks.strategies.dial.candidates import Allowed, Candidate, candidates
from allranks.strategies.dial.cost import Prediction, predicted
from allranks.strategies.dial.facts import Facts

SLACK = 1.04
"""How much slower than the fastest a choice may be predicted to be, for less loss of exactness."""


@dataclass(frozen=True)
class Decision:
    """What was asked, what was chosen, and why, in a sentence; `predictions` of all that could be.

    `refused` are candidates that the job cannot have, each with the reason.
    """

    asked: str
    did: str
    why: str
    facts: Facts
    predictions: tuple[Prediction, ...]
    refused: dict[str, str]

    def to_data(self) -> dict[str, Any]:
        """As plain data, for the run folder and `--dry-run --json`."""
        return asdict(self)


def choose(
    asked: str, facts: Facts, *, exact: bool = False, refusal: Allowed = lambda candidate: ""
) -> Decision:
    """The choice for a job; `refusal` says why it cannot have a candidate, "" where it can."""
    refused, able = {}, []
    for candidate in candidates(facts):
        inexact = exact and not candidate.is_exact(facts.ranks)
        why = "exact=yes was asked for" if inexact else refusal(candidate)
        if why:
            refused[candidate.text] = why
        else:
            able.append((candidate, predicted(candidate, facts)))
    assert able, "ddp is always there"
    fastest = min(prediction.step_s for _, prediction in able)
    chosen, its = next(pair for pair in able if pair[1].step_s <= SLACK * fastest)
    rows = tuple(prediction for _, prediction in able)
    why = _sentence(chosen, its, able[0][1], facts)
    return Decision(asked, chosen.text, why, facts, rows, refused)


def _sentence(chosen: Candidate, its: Prediction, usual: Prediction, facts: Facts) -> str:
    """The reason, with its arithmetic: what `ddp` would send, and what this does instead."""
    compute = f"{_seconds(facts.compute_s * facts.busy)} of compute"
    if facts.busy > 1:
        compute += (
            f" ({_seconds(facts.compute_s)} alone, {facts.busy:.2g} times that on busy cores)"
        )
    over = str(facts.link) if facts.nodes > 1 else "the memory of one machine"
    sends = f"{_bytes(usual.sent_bytes)} a step, {_seconds(usual.communication_s)} over {over}"
    if chosen.text == usual.strategy:
        return (
            f"{usual.strategy} sends {sends} beside {compute}, and nothing that loses exactness "
            f"saves more than {SLACK - 1:.0%} of a step"
        )
    return (
        f"{usual.strategy} would send {sends} beside {compute}: {_seconds(usual.step_s)} a step; "
        f"{chosen.text} sends {_bytes(its.sent_bytes)}, {_seconds(its.communication_s)}: "
        f"{_seconds(its.step_s)} a step; it costs: {chosen.costs} "
        f"({chosen.spec(facts.ranks).guarantee})"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _bytes(count: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
