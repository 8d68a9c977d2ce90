"""The cards: one per strategy, and what each reducer changes. Plain data, no framework.

Bytes are what the busiest rank hands to the network in one step, counted for the algorithms of the
field: a ring all-reduce of n bytes sends 2(N-1)/N·n from every rank, an all-gather (N-1)·n of its
own part, an all-to-all the parts that are not its own. The contract test compares them with the
bytes counted at the process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import Card, Exact, Option, Reference, Workload, replicas_of
from allranks.strategies.card_bytes import RING, no_bytes, ring_bytes, tree_bytes
from allranks.strategies.fsdp_cards import FSDP_CARDS
from allranks.strategies.mesh import Agreement
from allranks.strategies.pipeline_cards import MESH_CARD, PIPELINE_CARDS
from allranks.strategies.placed_cards import PLACED_CARDS
from allranks.strategies.sharded_cards import SHARDED_CARDS
from allranks.strategies.tensor_card import TENSOR_CARD
from allranks.strategies.tensorflow_cards import TENSORFLOW_CARDS


def _tree(work: Workload, options: Mapping[str, Any]) -> int:
    """Each message in rounds of pairs, or by all-to-all of roots and all-gather of sums."""
    return tree_bytes(work, work.messages)


def _half(work: Workload, options: Mapping[str, Any]) -> int:
    """An all-to-all and an all-gather, without the few bytes that make all chunks of one size."""
    return round(2 * (work.ranks - 1) / work.ranks * (2 * work.gradients + work.tally))


def _by_reducer(work: Workload, options: Mapping[str, Any]) -> int:
    ways = {"mean": ring_bytes, "tree": _tree, "fp16": _half, "bf16": _half}
    return ways[options["reduce"]](work, options)


HALF = "2(N-1)/N · (2 bytes per gradient + tally)"
ROUNDED = Reference(
    "a loop that rounds the gradient of each rank to 16 bit, adds them in float32 in the order of "
    "the ranks, and rounds the sum; `single` when N = 1"
)
TREE = (
    "log2(N) · message up to 2 MiB where ranks pair up along the tree (2, 4, 8 ranks on 8 shards), "
    "else (roots + 1)(N-1)/N · message; roots = 1 where N divides the shards, else <= 3"
)

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
            many_ranks=True,
        ),
        Card(
            name="ddp",
            summary="Gradients in buckets, each sent as soon as backward has finished it.",
            guarantee=Exact(),
            bytes_sent=_by_reducer,
            bytes_formula=f"mean: {RING}; tree: {TREE}; fp16, bf16: {HALF}",
            memory="weights + gradients + optimizer on every rank; tree: roots + 2 more gradients; "
            "fp16, bf16: 1 more",
            many_ranks=True,
            bitwise_options={"reduce": "tree"},
            options=(
                Option(
                    "reduce",
                    "mean",
                    "how gradients are summed",
                    ("mean", "tree", "fp16", "bf16"),
                    {"fp16": ROUNDED, "bf16": ROUNDED},
                ),
                Option("bucket_mb", 25.0, "MiB of gradients that leave in one message", above=0),
            ),
            paper="Li et al. 2020, PyTorch Distributed, arXiv 2006.15704",
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
            many_ranks=True,
            agreement=Agreement("own", lockstep=False),
        ),
        *SHARDED_CARDS,
        *FSDP_CARDS,
        *PLACED_CARDS,
        TENSOR_CARD,
        *PIPELINE_CARDS,
        MESH_CARD,
        *TENSORFLOW_CARDS,
    )
}
