"""The cards of pipelines: each rank holds some layers, and micro-batches go through them in turn.

What a step sends follows its samples: `messages` are means over the steps that were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import Card, Exact, Option, Workload
from allranks.strategies.mesh import PIPELINE, Agreement, Mesh


def _crossing(work: Workload, options: Mapping[str, Any]) -> int:
    """What the busiest rank sends: outputs of its stages, gradients of their inputs, the tally.

    Messages are (forward, back) for each pair of stages, and last what all ranks sum.
    """
    *crossed, summed = work.messages
    ranks, sent = work.ranks, [0.0] * work.ranks
    for stage, forward in enumerate(crossed[::2]):
        sent[stage % ranks] += forward
        sent[(stage + 1) % ranks] += crossed[2 * stage + 1]
    ring = 2 * (ranks - 1) / ranks * summed
    return round(max(sent) * (ranks > 1) + ring)


BY = Option(
    "by",
    "size",
    "what is balanced, where the task has no stages: bytes of weights, or measured seconds",
    ("size", "cost"),
)
BYTES = (
    "busiest rank: outputs of its stages + gradients of their inputs, of all micro-batches, "
    "+ 2(N-1)/N · tally (and weights that stages share)"
)
EVERYWHERE: dict[str, Any] = {
    "guarantee": Exact(),
    "bytes_sent": _crossing,
    "bytes_formula": BYTES,
    "many_ranks": True,
    "options": (BY,),
    "bitwise_options": {},
    "agreement": Agreement("staged"),
    "mesh": lambda ranks, _: Mesh(((PIPELINE, ranks),)),
}
MEMORY = "1/N of weights + gradients + optimizer; activations of"

PIPELINE_CARDS = (
    Card(
        name="gpipe",
        summary="Layers on ranks; all forward passes of a step, then all backward passes.",
        memory=f"{MEMORY} all m micro-batches; waits (N-1)/(m+N-1) of the time",
        paper="Huang et al. 2019, GPipe, arXiv 1811.06965",
        **EVERYWHERE,
    ),
    Card(
        name="1f1b",
        summary="Layers on ranks; forward and backward passes in turn, so less is kept.",
        memory=f"{MEMORY} min(m, N - rank) micro-batches; waits (N-1)/(m+N-1) of the time",
        paper="Narayanan et al. 2019, PipeDream; 2021, Megatron-LM, arXiv 2104.04473",
        **EVERYWHERE,
    ),
    Card(
        name="interleaved",
        summary="`1f1b` with several runs of layers on each rank: waits less, sends more.",
        memory=f"{MEMORY} up to m micro-batches; waits (N-1)/(vm+N-1) of the time, v = chunks",
        paper="Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473",
        **{
            **EVERYWHERE,
            "options": (Option("chunks", 2, "runs of layers on each rank", at_least=1), BY),
        },
    ),
    Card(
        name="zero-bubble",
        summary="`1f1b` with gradients of weights apart from those of inputs, made in waits.",
        memory=f"{MEMORY} min(m, N) micro-batches, and gradients of up to `rank` of them; "
        "waits (N-1)/(3m+N-1) of the time",
        paper="Qi et al. 2023, Zero Bubble Pipeline Parallelism (ZB-H1), arXiv 2401.10241",
        **EVERYWHERE,
    ),
)
