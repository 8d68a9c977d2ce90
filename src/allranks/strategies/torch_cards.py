"""The cards: one per strategy. Plain data, no framework.

Bytes are what the busiest rank hands to the network in one step, counted for the algorithms of the
field: a ring all-reduce of n bytes sends 2(N-1)/N·n from every rank, an all-gather (N-1)·n of its
own part, an all-to-all the parts that are not its own. The contract test compares them with the
bytes counted at the process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import (
    Card,
    Contents,
    Exact,
    Option,
    Reference,
    Stored,
    replicas_of,
)
from allranks.strategies.cards.activation import CONTEXT_CARD, TENSOR_CARD
from allranks.strategies.cards.decoupled import DECOUPLED_CARD
from allranks.strategies.cards.fsdp import FSDP_CARDS
from allranks.strategies.cards.outer import outer_cards
from allranks.strategies.cards.parameter_server import PARAMETER_SERVER_CARD
from allranks.strategies.cards.pipeline import MESH_CARD, PIPELINE_CARDS
from allranks.strategies.cards.placed import (
    EVERYTHING,
    PLACED_CARDS,
    RING,
    SHARDED_CARDS,
    no_bytes,
    ring_bytes,
)
from allranks.strategies.cards.tensorflow import TENSORFLOW_CARDS
from allranks.strategies.mesh import Agreement
from allranks.strategies.reductions.option import (
    FORMULAS,
    LATE,
    REDUCE,
    STORED,
    mesh_of_groups,
    reduced_bytes,
)


def _replicas(has: Contents, options: Mapping[str, Any]) -> float:
    """Weights of each replica, one gradient and one optimizer."""
    return (replicas_of(options) + 1 + has.optimizer) * (has.cut + has.uncut)


CARDS = {
    card.name: card
    for card in (
        Card(
            name="single",
            summary="One process does all the work. What every other strategy is compared with.",
            guarantee=Exact(),
            bytes_sent=no_bytes,
            bytes_formula="0",
            memory="weights + gradients + optimizer; bitwise: log2(shards) more gradients",
            stored=EVERYTHING,
            many_ranks=False,
            bitwise_options={},
        ),
        Card(
            name="dp",
            summary="One process, a replica of the model per device, a thread for each.",
            guarantee=Exact(),
            bytes_sent=no_bytes,
            bytes_formula="0 (between the devices: (replicas - 1) · (weights + buffers + "
            "gradients), and the inputs and outputs of all but the first replica)",
            memory="weights + gradients on every device; the first one holds the optimizer too, "
            "and gathers the inputs and outputs of the whole micro-batch",
            stored=Stored("(r + 1 + k)(C + R), r = replicas", _replicas),
            many_ranks=False,
            devices_of_a_rank=replicas_of,
            options=(
                Option(
                    "replicas", 2, "how many: on cuda:0, cuda:1, …, or all on the CPU", at_least=1
                ),
            ),
        ),
        Card(
            name="ddp-plain",
            summary="All-reduce each gradient after backward: the specification of `ddp`.",
            guarantee=Exact(),
            bytes_sent=ring_bytes,
            bytes_formula=RING,
            memory="weights + gradients + optimizer on every rank",
            stored=EVERYTHING,
            many_ranks=True,
        ),
        Card(
            name="ddp",
            summary="Gradients in buckets, each sent as soon as backward has finished it.",
            guarantee=Exact(),
            bytes_sent=reduced_bytes,
            bytes_formula=FORMULAS,
            memory="weights + gradients + optimizer on every rank; tree: roots + 2 more gradients; "
            "fp16, bf16, halving-doubling: 1 more; binary-tree: 2 more; star: N-1 more (rank 0); "
            "late: 1 more, 2 with a regularizer",
            stored=STORED,
            many_ranks=True,
            bitwise_options={"reduce": "tree"},
            options=(
                REDUCE,
                Option("bucket_mb", 25.0, "MiB of gradients that leave in one message", above=0),
                LATE,
            ),
            paper="Li et al. 2020, PyTorch Distributed, arXiv 2006.15704",
            mesh=mesh_of_groups,
        ),
        Card(
            name="independent",
            summary="No exchange: each rank trains alone on its own shards. The upper bound.",
            guarantee=Reference(
                "N separate trainings, rank r on its own shards only; `single` when N = 1"
            ),
            bytes_sent=no_bytes,
            bytes_formula="0",
            memory="weights + gradients + optimizer on every rank",
            stored=EVERYTHING,
            many_ranks=True,
            agreement=Agreement("own", lockstep=False),
        ),
        *SHARDED_CARDS,
        *FSDP_CARDS,
        *PLACED_CARDS,
        TENSOR_CARD,
        CONTEXT_CARD,
        *PIPELINE_CARDS,
        MESH_CARD,
        DECOUPLED_CARD,
        PARAMETER_SERVER_CARD,
        *TENSORFLOW_CARDS,
    )
}
CARDS |= {card.name: card for card in outer_cards(CARDS.values())}
