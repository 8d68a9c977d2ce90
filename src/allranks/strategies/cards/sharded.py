"""The cards of strategies whose ranks hold parts of the optimizer, the gradients or the weights.

Bytes of what `zero1` and `zero2` cut are those of buckets in which each rank has as much room as
the rank with the most rows (`messages`: what is cut, what is summed whole).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from allranks.errors import RequestError
from allranks.strategies import compressed
from allranks.strategies.card import (
    Card,
    Contents,
    Exact,
    Guarantee,
    Option,
    Picked,
    Reference,
    Stored,
    Workload,
)
from allranks.strategies.cards.data_parallel import (
    even_unless_summed,
    ring_bytes,
    tree_bytes,
    tree_roots,
)
from allranks.strategies.cards.model_parallel import SEQUENCE, check_sequence
from allranks.strategies.mesh import REPLICATE, SHARD, TENSOR, Agreement, Mesh


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
    "even_shares": even_unless_summed,
}


ZERO_CARDS = (
    Card(
        name="zero1",
        summary="The optimizer's state in parts: each rank updates its own rows of every weight.",
        take_when="the model fits, but its optimizer state does not.",
        bytes_formula="2(N-1)/N · (weights + tally); tree: (roots + 1)(N-1)/N · weights + tally",
        memory="weights + gradients + optimizer/N; tree: roots + 2 more gradients",
        **BOTH,
    ),
    Card(
        name="zero2",
        summary="As zero1, and the gradients in parts too: scattered after every backward pass.",
        take_when="gradients do not fit either; every pass of a step then sends.",
        bytes_formula="(passes + 1)(N-1)/N · weights + 2(N-1)/N · tally; tree: as zero1",
        memory="weights + gradients/N + two buckets + optimizer/N; tree: as zero1",
        **BOTH,
    ),
)


# --- fsdp, hsdp -----------------------------------------------------------------------------------


def _fsdp_mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    tensor = int(options["tensor"])
    if ranks % tensor:
        raise RequestError(
            asked=f"--strategy fsdp:tensor={tensor} --ranks {ranks}",
            found=f"{ranks} ranks, of which {tensor} at a time compute a layer together",
            why=f"{tensor} does not divide {ranks}, so some would have parts without the rest",
            do=f"--ranks {-(-ranks // tensor) * tensor}, or leave tensor out",
        )
    check_sequence("fsdp", options)
    _check_compressed(options["reduce"], ranks, tensor)
    if tensor > 1 and str(options["reduce"]) == "tree":
        raise RequestError(
            asked=f"--strategy fsdp:tensor={tensor},reduce=tree, or --bitwise",
            found="sums over the features of a layer, on several ranks",
            why="their order follows the ranks, whatever the tree of the gradients does",
            do="leave reduce and --bitwise out, or tensor",
        )
    return Mesh(((SHARD, ranks // tensor), (TENSOR, tensor)))


def _check_compressed(reduce: Picked, ranks: int, tensor: int = 1) -> None:
    """Raise `RequestError` where no part of a gradient goes to another rank, or chunks are none."""
    if reduce.name not in compressed.PIECES:
        return
    compressed.check_codes(reduce)
    if ranks == 1 or tensor > 1:
        raise RequestError(
            asked=f"--strategy fsdp:reduce={reduce} with tensor={tensor} on {ranks} ranks",
            found="one rank" if ranks == 1 else "layers that are cut too",
            why="one rank has no owner to send to"
            if ranks == 1
            else "weights that every rank of a layer has would get sums of unlike residuals",
            do=f"--strategy ddp:reduce={reduce}" if ranks == 1 else "leave tensor or reduce out",
        )


def _hsdp_mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    shard = int(options["shard"])
    compressed.check_codes(options["reduce"])
    if options["reduce"].name in compressed.SIGNED and options["offload"] == "cpu":
        raise RequestError(
            asked=f"--strategy hsdp:reduce={options['reduce']},offload=cpu",
            found="gradients on the host, and ranks that exchange those of their devices",
            why="the momentum is where gradients are exchanged",
            do="leave offload out, or reduce=top-k",
        )
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
    reduce, tensor = options["reduce"], int(options.get("tensor", 1))
    is_tree = reduce.name == "tree"
    readers = work.ranks // tensor
    holders = options.get("shard", readers)
    times, groups = 2 if options["reshard"] else 1, readers / holders
    per_pass: float = (holders - 1) / holders * (root + times * units)
    if reduce.name not in compressed.PIECES or "shard" in options:
        per_pass += (holders - 1) / holders * gradients
    if reduce.name in compressed.PIECES:
        others = groups - 1 if "shard" in options else holders - 1
        per_pass += others * _codes(work, reduce, gradients, holders)
    elif reduce.name not in compressed.SIGNED:
        per_pass += 2 * (1 - holders / readers) * gradients / holders
    if is_tree:
        per_pass += (groups - 1) * gradients
    once = 0.0
    if reduce.name in compressed.SIGNED:
        once = (groups - 1) * _cosines(work, reduce, gradients, holders)
    last = Workload((tally,), work.ranks, work.shards)
    of_tally = tree_bytes(work, [tally]) if is_tree else ring_bytes(last, options)
    if along:
        reduced, gathered = along
        of_tally += round((tensor - 1) / tensor * (2 * reduced + gathered))
    return round(work.passes * per_pass + once) + of_tally + moved


def _codes(work: Workload, reduce: Picked, gradients: int, holders: int) -> int:
    """The messages of one part of each unit, whose gradients have these `shapes`."""
    counts = [sum(prod(_part(shape, holders, 0)) for shape in unit) for unit in work.shapes]
    item = _itemsize(work, gradients, holders)
    return sum(compressed.code_bytes(reduce, count, item) for count in counts)


def _cosines(work: Workload, reduce: Picked, gradients: int, holders: int) -> int:
    """The message of the rank whose parts have the most blocks."""
    item = _itemsize(work, gradients, holders)
    return max(
        sum(
            compressed.demo_bytes(part, item, reduce.options)
            for unit in work.shapes
            for shape in unit
            if prod(part := _part(shape, holders, rank))
        )
        for rank in range(holders)
    )


def _itemsize(work: Workload, gradients: int, holders: int) -> int:
    """Of a number of the gradients, whose bytes are padded to equal parts."""
    count = sum(prod(_part(shape, holders, 0)) for unit in work.shapes for shape in unit)
    return -(-gradients // (count * holders)) if count else 1


def _part(shape: tuple[int, ...], holders: int, rank: int) -> tuple[int, ...]:
    """What a rank has of the rows of a tensor; the first has as much as any other, padded."""
    rows = -(-shape[0] // holders)
    return max(0, min(rows, shape[0] - rank * rows)), *shape[1:]


def _parts(has: Contents, options: Mapping[str, Any]) -> float:
    """Parts of all on K ranks; of what is cut over a tensor axis a part of these on each."""
    tensor = int(options.get("tensor", 1))
    holders = int(options.get("shard", has.ranks // tensor))
    residuals, reduce = 0, options["reduce"].name
    if reduce in (*compressed.PIECES, *compressed.SIGNED):
        residuals = (1 + (reduce in compressed.SIGNED)) if "shard" in options else holders
    return (2 + residuals + has.optimizer) * (has.cut / tensor + has.uncut) / holders


def _guarantees(whose: str) -> dict[str, Guarantee]:
    """What compressed sums promise, where the gradients `whose` are encoded."""
    return {
        "top-k": compressed.GUARANTEES["top-k"],
        "two-bit": Reference(
            f"a loop in which of the gradients {whose} what was not sent is kept, and the "
            "threshold, its negative or nothing is sent of each number, pass by pass; the sums of "
            "these are the gradient"
        ),
    }


GATHERED = (
    "(K-1)/K · (2 · weights of the units + weights of the root + gradients) per pass, each padded "
    "to K equal parts"
)
RESHARD = Option(
    "reshard", True, "let go of the weights of a unit after forward, and gather them again"
)
CHOICES: dict[str, tuple[Option, ...]] = {
    **dict.fromkeys(("mean", "tree"), ()),
    **{name: compressed.CHOICES[name] for name in compressed.PIECES},
}
REDUCE = Option("reduce", "mean", "how gradients are summed", CHOICES, _guarantees("of each rank"))
FLEX_DEMO = Reference(
    "a loop in which each group of K ranks adds the sum of its gradients to a momentum of its own, "
    "and takes out of it the k largest cosine coefficients of each block of a rank's rows; weights "
    "move by the signs of their sum"
)
REDUCE_ACROSS = Option(
    "reduce",
    "mean",
    "how gradients are summed; top-k, two-bit, demo: across the groups of K",
    {**CHOICES, "demo": compressed.CHOICES["demo"]},
    {**_guarantees("of each group of K ranks, which are summed as they are,"), "demo": FLEX_DEMO},
)
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
        take_when="the weights do not fit on a rank, and the link is fast.",
        guarantee=Exact(),
        bytes_sent=_bytes,
        bytes_formula=f"K = N/T, T = tensor: {GATHERED}; 2(N-1)/N · tally. reduce=tree: a pass for "
        "each shard. tensor: weights and gradients are 1/T of what is cut, and activations go "
        "along the tensor axis as under `tensor`. top-k, two-bit: instead of (K-1)/K · gradients "
        "(K-1) codes of a part of each unit",
        memory=f"K = N/T, T = tensor: {MEMORY}, all of it 1/T of what is cut over the tensor axis; "
        "sequence=yes: activations of the blocks 1/T, too; "
        "tree: the roots of all ranks; top-k, two-bit: 1 whole gradient more, of what was not sent",
        stored=Stored(
            "(2 + k)(C/T + R)/K, C: what `tensor` would cut; top-k, two-bit: (2 + K + k)", _parts
        ),
        many_ranks=True,
        agreement=Agreement("sharded"),
        mesh=_fsdp_mesh,
        even_shares=even_unless_summed,
        bitwise_options={"reduce": "tree"},
        options=(
            RESHARD,
            REDUCE,
            Option("tensor", 1, "T, how many ranks compute a layer together", at_least=1),
            SEQUENCE,
            OFFLOAD,
        ),
        paper=PAPER,
    ),
    Card(
        name="hsdp",
        summary="Parts of every weight on K ranks, as in `fsdp`, and N/K such groups.",
        take_when="weights do not fit, and links within a node are much faster.",
        guarantee=Exact(),
        bytes_sent=_bytes,
        bytes_formula=f"{GATHERED}; 2(1-K/N) · gradients/K per pass; 2(N-1)/N · tally. "
        "reduce=tree: a pass for each shard, and in each (N/K - 1) · gradients more. "
        "top-k, two-bit: instead of 2(1-K/N) · gradients/K (N/K - 1) codes of a part of each unit; "
        "demo: instead of it, once a step, (N/K - 1) times k per block · (itemsize + 1.5)",
        memory=f"{MEMORY}; tree: the roots of all ranks; top-k, two-bit: 1/K of a gradient more; "
        "demo: 2/K",
        stored=Stored("(2 + k)(C + R)/K; top-k, two-bit: (3 + k); demo: (4 + k)", _parts),
        many_ranks=True,
        agreement=Agreement("sharded"),
        mesh=_hsdp_mesh,
        even_shares=even_unless_summed,
        bitwise_options={"reduce": "tree"},
        options=(
            Option("shard", 2, "K, how many ranks hold a model together", at_least=2),
            RESHARD,
            REDUCE_ACROSS,
            OFFLOAD,
        ),
        paper=PAPER,
    ),
)
