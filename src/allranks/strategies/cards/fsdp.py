"""The cards of strategies whose ranks hold parts of every weight. Plain data, no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import Card, Contents, Exact, Option, Stored, Workload
from allranks.strategies.cards.bytes_sent import ring_bytes, tree_bytes
from allranks.strategies.mesh import REPLICATE, SHARD, TENSOR, Agreement, Mesh


def _fsdp_mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    tensor = int(options["tensor"])
    if ranks % tensor:
        raise RequestError(
            asked=f"--strategy fsdp:tensor={tensor} --ranks {ranks}",
            found=f"{ranks} ranks, of which {tensor} at a time compute a layer together",
            why=f"{tensor} does not divide {ranks}, so some would have parts without the rest",
            do=f"--ranks {-(-ranks // tensor) * tensor}, or leave tensor out",
        )
    if tensor > 1 and options["reduce"] == "tree":
        raise RequestError(
            asked=f"--strategy fsdp:tensor={tensor},reduce=tree, or --bitwise",
            found="sums over the features of a layer, on several ranks",
            why="their order follows the ranks, whatever the tree of the gradients does",
            do="leave reduce and --bitwise out, or tensor",
        )
    return Mesh(((SHARD, ranks // tensor), (TENSOR, tensor)))


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
    """Of each pass the weights twice (those of the root once) and the gradients once; the tally.

    With a tensor axis also the activations along it.
    """
    if work.ranks == 1:
        return 0
    root, units, gradients, tally, *more = work.messages
    moved, *along = more or [0]
    is_tree, tensor = options["reduce"] == "tree", int(options.get("tensor", 1))
    readers = work.ranks // tensor
    holders = options.get("shard", readers)
    times = 2 if options["reshard"] else 1
    sent: float = (holders - 1) / holders * (root + times * units + gradients)
    sent += 2 * (1 - holders / readers) * gradients / holders
    if is_tree:
        sent += (readers / holders - 1) * gradients
    last = Workload((tally,), work.ranks, work.shards)
    beside = tree_bytes(work, [tally]) if is_tree else ring_bytes(last, options)
    if along:
        reduced, gathered = along
        beside += round((tensor - 1) / tensor * (2 * reduced + gathered))
    return round(work.passes * sent) + beside + moved


def _parts(has: Contents, options: Mapping[str, Any]) -> float:
    """Parts of all on K ranks; of what is cut over a tensor axis a part of these on each."""
    tensor = int(options.get("tensor", 1))
    holders = int(options.get("shard", has.ranks // tensor))
    return (2 + has.kept) * (has.cut / tensor + has.rest) / holders


GATHERED = (
    "(K-1)/K · (2 · weights of the units + weights of the root + gradients) per pass, each padded "
    "to K equal parts"
)
RESHARD = Option(
    "reshard", True, "let go of the weights of a unit after forward, and gather them again"
)
REDUCE = Option("reduce", "mean", "how gradients are summed", ("mean", "tree"))
OFFLOAD = Option(
    "offload", "none", "where each rank's parts lie, and are updated", choices=("none", "cpu")
)
MEMORY = (
    "1/K of weights, gradients and optimizer, at most 1 row of each tensor more; in a pass the "
    "weights of the root and of two units, and the gradients of one; offload=cpu: the parts are in "
    "the memory of the host"
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
        bytes_formula=f"K = N/T, T = tensor: {GATHERED}; 2(N-1)/N · tally. reduce=tree: a pass for "
        "each shard. tensor: weights and gradients are 1/T of what is cut, and activations go "
        "along the tensor axis as under `tensor`",
        memory=f"K = N/T, T = tensor: {MEMORY}, all of it 1/T of what is cut over the tensor axis; "
        "tree: the roots of all ranks",
        stored=Stored("(2 + k)(C/T + R)/K, C: what `tensor` would cut", _parts),
        many_ranks=True,
        agreement=Agreement("sharded"),
        mesh=_fsdp_mesh,
        bitwise_options={"reduce": "tree"},
        options=(
            RESHARD,
            REDUCE,
            Option("tensor", 1, "T, how many ranks compute a layer together", at_least=1),
            OFFLOAD,
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
        stored=Stored("(2 + k)(C + R)/K", _parts),
        many_ranks=True,
        agreement=Agreement("sharded"),
        mesh=_hsdp_mesh,
        bitwise_options={"reduce": "tree"},
        options=(
            Option("shard", 2, "K, how many ranks hold a model together", at_least=2),
            RESHARD,
            REDUCE,
            OFFLOAD,
        ),
        paper=PAPER,
    ),
)
