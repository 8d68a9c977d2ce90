"""How long a step takes, predicted: compute, and what of the communication does not hide behind it.

    step = compute + arithmetic + waiting for each other + communication - hidden
    communication = messages · rounds · latency + max(bytes / link, bytes · copying)

A ring of p ranks has 2(p-1) rounds of a one-way latency each. Bytes cross the link of a node: once
for each node where a ring goes through the nodes in order, for every rank of it where each rank
sends to each other one. `ddp` sends a bucket while backward computes the next, so all but the last
bucket hides behind backward; `late=1` hides all behind the next step, and what learners have under
way hides behind the steps that they train meanwhile. What hides is the waiting for
the link alone: copying takes the processors that compute.

The constants are estimates, from a few runs of `benchmarks/slow_link.py` on a loaded machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.strategies.dial.candidates import Candidate
from allranks.strategies.dial.facts import Facts

MESSAGE_S = 1.5e-4
"""What a round costs beside the delay of the link: system calls, and the ranks' waking up."""
COPYING_S = 2e-9
"""Processor time for each byte that goes through a socket: sent, received and added."""
MEMORY_MESSAGE_S = 5e-6
MEMORY_COPYING_S = 2e-10
"""The same between ranks of one machine, which talk through memory that they share."""
SKEW = 0.03
"""Of a step's compute, what ranks wait at an exchange for the one that comes last."""
OF_THE_LINK = 0.94
"""What is left of a link's bits for data: headers of TCP and IP, acknowledgements."""
BACKWARD = 2 / 3
"""The part of a step in which buckets leave."""


@dataclass(frozen=True)
class Prediction:
    """What a candidate sends in a step on average, and the seconds of its parts and of the step."""

    strategy: str
    sent_bytes: float
    communication_s: float
    hidden_s: float
    arithmetic_s: float
    step_s: float


def predicted(candidate: Candidate, facts: Facts) -> Prediction:
    """The seconds of a step of `candidate`, on average over its period."""
    compute = facts.compute_s * facts.busy
    every, through_memory = candidate.period(facts.ranks), facts.nodes == 1
    sent = candidate.sent_bytes(facts)
    matrices = sum(len(shape) > 1 for shape in facts.shapes)
    own = candidate.arithmetic_s * facts.parameters + candidate.matrix_s * matrices
    arithmetic = own * facts.busy / every
    message = MEMORY_MESSAGE_S if through_memory else MESSAGE_S + facts.link.one_way_s
    latency = 2 * (facts.ranks - 1) * message
    copying = sent * (MEMORY_COPYING_S if through_memory else COPYING_S) * facts.busy
    moving = max(copying, _on_the_link(candidate, sent, facts))
    seconds = candidate.messages(facts) * latency / every + moving
    apart = candidate.sends != "gradients"
    hidden = _hidden(candidate, (seconds if apart else moving) - copying, compute, facts)
    step = compute * (1 + SKEW / every) + arithmetic + seconds - hidden
    return Prediction(candidate.text, sent, seconds, hidden, arithmetic, step)


def _on_the_link(candidate: Candidate, sent: float, facts: Facts) -> float:
    """Seconds until the bytes of a step are through the link of a node."""
    if facts.nodes == 1 or not facts.link.bits_per_s:
        return 0.0
    bits = 8 * sent * crossings(candidate, facts)
    return bits / (facts.link.bits_per_s * OF_THE_LINK)


def crossings(candidate: Candidate, facts: Facts) -> float:
    """How many times what the busiest rank sends crosses the link of its node."""
    ranks, nodes = facts.ranks, facts.nodes
    if candidate.route == "ring" or ranks == nodes:
        return 1.0
    each = facts.per_node or -(-ranks // nodes)
    if candidate.route == "all-to-all":
        return each * (ranks - each) / (ranks - 1)
    whole = 2 * (each - 1) / each + 2 * (nodes - 1) / nodes / each
    return 2 * (nodes - 1) / nodes / whole


def _hidden(candidate: Candidate, waiting: float, compute: float, facts: Facts) -> float:
    """How much of the time in which only the link is busy passes while ranks compute."""
    if candidate.sends != "gradients":
        under_way = candidate.steps_under_way(facts.ranks) / candidate.period(facts.ranks)
        return min(waiting, under_way * compute)
    if candidate.is_late:
        return min(waiting, compute)
    buckets = candidate.messages(facts)
    return (buckets - 1) / buckets * min(waiting, BACKWARD * compute)
