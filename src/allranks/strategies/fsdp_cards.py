"""The cards of strategies whose ranks hold parts of every weight. Plain data, no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import Card, Exact, Option, Workload
from allranks.strategies.card_bytes import ring_bytes, tree_bytes
from allranks.strategies.mesh import REPLICATE, SHARD, Agreement, Mesh


def _fsdp_mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    return Mesh(((SHARD, ranks),))


def _hsdp_mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    shard = int(options["shard"])
    if ranks % shard:
        fit = [size for size in range(2, ranks + 1) if ranks % size == 0]
        raise RequestError(
            asked=f"--strategy hsdp:shard={shard} --ranks {ranks}",
            found=f"{ranks} ranks, of which {shard} at a time hold the whole model",
            why=f"{shard} does not divide {ranks}, so some would hold a part without the rest",
            do=f"shard={' or '.join(map(str, fit))}" if fit else "--strategy fsdp",
        )
    return Mesh(((REPLICATE, ranks // shard), (SHARD, shard)))


def _bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Of each pass the weights twice (those of the root once) and the gradients once; the tally."""
    if work.ranks == 1:
        return 0
    root, units, gradients, tally, *moved = work.messages
    is_tree = options["reduce"] == "tree"
    holders = options.get("shard", work.ranks)
    times = 2 if options["reshard"] else 1
    sent: float = (holders - 1) / holders * (root + times * units + gradients)
    sent += 2 * (1 - holders / work.ranks) * gradients / holders
    if is_tree:
        sent += (work.ranks / holders - 1) * gradients
    last = Workload((tally,), work.ranks, work.shards)
    beside = tree_bytes(work, [tally]) if is_tree else ring_bytes(last, options)
    return round(work.passes * sent) + beside + sum(moved)


GATHERED = (
    "(K-1)/K · (2 · weights of the units + weights of the root + gradients) per pass, each padded "
    "to K equal parts"
)
RESHARD = Option(
    "reshard", True, "let go of the weights of a unit after forward, and gather them again"
)
REDUCE = Option("reduce", "mean", "how gradients are summed", ("mean", "tree"))
MEMORY = (
    "1/K of weights, gradients and optimizer, at most 1 row of each tensor more; in a pass the "
    "weights of the root and of two units, and the gradients of one"
)
PAPER = (
    "Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277; Rajbhandari et al. 2020, arXiv 1910.02054"
)

FSDP_CARDS = (
    Card(
        name="fsdp",
        summary="A part of every weight on each rank, gathered block by block when it is needed.",
        guarantee=Exact(),
        bytes_sent=_bytes,
        bytes_formula=f"K = N: {GATHERED}; 2(N-1)/N · tally. reduce=tree: a pass for each shard",
        memory=f"K = N: {MEMORY}; tree: the roots of all ranks",
        many_ranks=True,
        agreement=Agreement("sharded"),
        mesh=_fsdp_mesh,
        bitwise_options={"reduce": "tree"},
        options=(
            RESHARD,
            REDUCE,
        ),
        paper=PAPER,
    ),
    Card(
        name="hsdp",
        summary="Parts of every weight on K ranks, as in `fsdp`, and N/K such groups.",
        guarantee=Exact(),
        bytes_sent=_bytes,
        bytes_formula=f"{GATHERED}; 2(1-K/N) · gradients/K per pass; 2(N-1)/N · tally. "
        "reduce=tree: a pass for each shard, and in each (N/K - 1) · gradients more",
        memory=f"{MEMORY}; tree: the roots of all ranks",
        many_ranks=True,
        agreement=Agreement("sharded"),
        mesh=_hsdp_mesh,
        bitwise_options={"reduce": "tree"},
        options=(
            Option("shard", 2, "K, how many ranks hold a model together", at_least=2),
            RESHARD,
            REDUCE,
        ),
        paper=PAPER,
    ),
)
