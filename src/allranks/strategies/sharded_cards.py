"""The cards of strategies whose ranks hold parts of the training: optimizer, gradients, weights.

Bytes of what is cut are those of buckets in which each rank has as much room as the rank with the
most rows (`messages`: what is cut, what is summed whole).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.strategies.card import Card, Exact, Option, Workload
from allranks.strategies.card_bytes import tree_bytes, tree_roots
from allranks.strategies.mesh import Agreement


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


BOTH: dict[str, Any] = {
    "guarantee": Exact(),
    "bytes_sent": _zero,
    "many_ranks": True,
    "bitwise_options": {"reduce": "tree"},
    "options": (
        Option("reduce", "mean", "how gradients are summed", ("mean", "tree")),
        Option("bucket_mb", 25.0, "MiB of gradients that leave in one message", above=0),
    ),
    "paper": "Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054",
    "agreement": Agreement(cuts_optimizer=True),
}

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
)
