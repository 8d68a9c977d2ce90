"""The cards of strategies that place parts of one model: on devices of a process, on ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from allranks.strategies.card import (
    Card,
    Contents,
    Exact,
    Option,
    Stored,
    Workload,
    parts_of,
    replicas_of,
)
from allranks.strategies.mesh import BRANCH, EXPERT, Agreement, Mesh, in_copies
from allranks.strategies.reduction_tree import rounds_of_pairs, subtree_roots, uses_pairs
from allranks.strategies.shards import owned_shards

# --- bytes sent ----------------------------------------------------------------------------------
# What common ways to sum cost, for the cards: bytes that the busiest rank sends in a step, and
# what a rank stores that has all of the model.


def no_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Nothing is sent."""
    return 0


def ring_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """A ring all-reduce of every message: 2(N-1)/N of its bytes."""
    return round(2 * (work.ranks - 1) / work.ranks * sum(work.messages))


def _all_stored(has: Contents, options: Mapping[str, Any]) -> float:
    """Weights, gradients, and what the optimizer keeps."""
    return (2 + has.optimizer) * (has.cut + has.uncut)


EVERYTHING = Stored("(2 + k)(C + R)", _all_stored)
RING = "2(N-1)/N · (gradients + tally)"


def tree_roots(work: Workload) -> int:
    """How many roots of the tree over all shards the rank with the most of them holds."""
    owned = (owned_shards(work.shards, work.ranks, rank) for rank in range(work.ranks))
    return max(len(subtree_roots(span, work.shards)) for span in owned)


def tree_bytes(work: Workload, messages: Iterable[int]) -> int:
    """Each message in rounds of pairs, or by all-to-all of roots and all-gather of sums."""
    if work.ranks == 1:
        return 0
    sent_bytes = 0.0
    for message in messages:
        if uses_pairs(work.shards, work.ranks, message):
            sent_bytes += (rounds_of_pairs(work.shards, work.ranks) or 0) * message
        else:
            sent_bytes += (tree_roots(work) + 1) * (work.ranks - 1) / work.ranks * message
    return round(sent_bytes)


def _branches(work: Workload, options: Mapping[str, Any]) -> int:
    """What branches return is broadcast; the gradients of their inputs and the tally are summed."""
    returned, inputs, tally = work.messages
    return round((work.ranks - 1) / work.ranks * (returned + 2 * inputs + 2 * tally))


def _own_branches(has: Contents, options: Mapping[str, Any]) -> float:
    """Branches are what is cut."""
    return (2 + has.optimizer) * (has.cut / has.ranks + has.uncut)


PLACED_CARDS = (
    Card(
        name="model-parallel",
        summary="One process, layers of one model on several devices, inputs in flight.",
        guarantee=Exact(),
        bytes_sent=no_bytes,
        bytes_formula="0 (between the devices: what goes from part to part, and its gradient)",
        memory="every weight, its gradient and what the optimizer keeps of it on one device; "
        "activations on the device of their part",
        stored=EVERYTHING,
        many_ranks=False,
        bitwise_options={},
        devices_of_a_rank=parts_of,
        on_a_device="part",
        options=(
            Option("parts", 2, "how many: on cuda:0, cuda:1, …, or all on the CPU", at_least=1),
            Option(
                "by",
                "cost",
                "what is balanced, where the task has no device_map: seconds that are "
                "measured, or bytes",
                ("cost", "size"),
            ),
            Option("split", 1, "pieces of a micro-batch that are in flight at once", at_least=1),
        ),
        paper="Huang et al. 2019, GPipe, arXiv 1811.06965",
    ),
    Card(
        name="branches",
        summary="Towers, paths or heads of one model on different ranks at the same time.",
        guarantee=Exact(),
        bytes_sent=_branches,
        bytes_formula="(N-1)/N · outputs of all branches + 2(N-1)/N · (gradients of what they are "
        "given, each tensor once, + tally)",
        memory="of each branch weights, gradients, optimizer and activations on one rank; all else "
        "of the model on every rank",
        stored=Stored("(2 + k)(C/N + R), C: branches of equal size", _own_branches),
        many_ranks=True,
        agreement=Agreement("staged"),
        mesh=lambda ranks, _: Mesh(((BRANCH, ranks),)),
        paper="Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks, "
        "arXiv 1404.5997",
    ),
)


# --- sharded -------------------------------------------------------------------------------------
# The cards of strategies whose ranks hold parts of the training: optimizer, gradients, experts.
#
# Bytes of what `zero1` and `zero2` cut are those of buckets in which each rank has as much room as
# the rank with the most rows (`messages`: what is cut, what is summed whole).


def _zero(work: Workload, options: Mapping[str, Any]) -> int:
    """Gradients scattered after each pass, weights gathered, the tally summed whole; and what the
    busiest rank sends for updates of whole parameters.
    """
    cut, whole, *moved = work.messages
    part = (work.ranks - 1) / work.ranks
    if options["reduce"] == "mean":
        return round((work.passes + 1) * part * cut + 2 * part * whole) + sum(moved)
    roots = tree_roots(work)
    return round((roots + 1) * part * cut) + tree_bytes(work, [whole]) + sum(moved)


def _own_rows(has: Contents, options: Mapping[str, Any]) -> float:
    """All weights, and what the optimizer keeps of own rows; gradients are gone after a step."""
    return (1 + has.optimizer / has.ranks) * (has.cut + has.uncut)


BOTH: dict[str, Any] = {
    "guarantee": Exact(),
    "bytes_sent": _zero,
    "many_ranks": True,
    "bitwise_options": {"reduce": "tree"},
    "options": (
        Option("reduce", "mean", "how gradients are summed", ("mean", "tree")),
        Option("bucket_mb", 25.0, "MiB of gradients that leave in one message", above=0),
    ),
    "stored": Stored("(1 + k/N)(C + R)", _own_rows),
    "paper": "Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054",
    "agreement": Agreement(cuts_optimizer=True),
}


def _expert_mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    copies = replicas_of(options)
    return in_copies(ranks, copies, EXPERT, f"expert:replicas={copies}", of="experts")


def _own_experts(has: Contents, options: Mapping[str, Any]) -> float:
    """Experts are what is cut."""
    return (2 + has.optimizer) * (has.cut * replicas_of(options) / has.ranks + has.uncut)


def _expert(work: Workload, options: Mapping[str, Any]) -> int:
    """Rows to the ranks of their experts; gradients of experts between copies, of the rest."""
    rows, shared, experts = work.messages
    copies = replicas_of(options)
    between = 2 * (copies - 1) / copies * experts
    return round(rows + 2 * (work.ranks - 1) / work.ranks * shared + between)


SHARDED_CARDS = (
    Card(
        name="zero1",
        summary="The optimizer's state in parts: each rank updates its own rows of every weight.",
        bytes_formula="2(N-1)/N · (weights + tally); tree: (roots + 1)(N-1)/N · weights + tally",
        memory="weights + gradients + optimizer/N; tree: roots + 2 more gradients",
        **BOTH,
    ),
    Card(
        name="zero2",
        summary="As zero1, and the gradients in parts too: scattered after every backward pass.",
        bytes_formula="(passes + 1)(N-1)/N · weights + 2(N-1)/N · tally; tree: as zero1",
        memory="weights + gradients/N + two buckets + optimizer/N; tree: as zero1",
        **BOTH,
    ),
    Card(
        name="expert",
        summary="Each rank holds some experts of every MixtureOfExperts, and the rest whole.",
        guarantee=Exact(),
        bytes_sent=_expert,
        bytes_formula="rows routed to other ranks and back, in forward and backward "
        "(4k · tokens of the rank · width · (E-1)/E if experts share them evenly) "
        "+ 2(N-1)/N · (gradients of the rest + tally) + 2(R-1)/R · gradients of experts/E; "
        "R = replicas, E = N/R",
        memory="1/E of experts, their gradients and optimizer, all of the rest; rows that other "
        "ranks send",
        stored=Stored("(2 + k)(C/E + R), C: experts", _own_experts),
        many_ranks=True,
        options=(
            Option("replicas", 1, "copies of the experts, each cut over N/R ranks", at_least=1),
            Option("bucket_mb", 25.0, "MiB of gradients that leave in one message", above=0),
        ),
        agreement=Agreement("sharded"),
        mesh=_expert_mesh,
        rounds_together=True,
        paper="Lepikhin et al. 2020, GShard, arXiv 2006.16668",
    ),
)
