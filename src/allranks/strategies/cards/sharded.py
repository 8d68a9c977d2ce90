"""The cards of strategies whose ranks hold parts of the training: optimizer, gradients, experts.

Bytes of what `zero1` and `zero2` cut are those of buckets in which each rank has as much room as
the rank with the most rows (`messages`: what is cut, what is summed whole).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import (
    Card,
    Contents,
    Exact,
    Option,
    Stored,
    Workload,
    replicas_of,
)
from allranks.strategies.cards.bytes_sent import tree_bytes, tree_roots
from allranks.strategies.mesh import EXPERT, Agreement, Mesh, in_copies


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
    return (1 + has.kept / has.ranks) * (has.cut + has.rest)


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
    return (2 + has.kept) * (has.cut * replicas_of(options) / has.ranks + has.rest)


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
