"""The cards of data parallelism: every rank has the whole model, and gradients are summed.

First what common ways to sum cost, then `reduce=` of `ddp`: the ways to sum gradients, with their
options, promises and bytes. What the busiest rank sends is here a formula; the schedules of
`reduction_schedules` and the bytes counted at the process group are held against it in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from allranks.errors import RequestError
from allranks.strategies import compressed
from allranks.strategies.card import (
    Card,
    Contents,
    Exact,
    Option,
    Picked,
    Reference,
    Stored,
    Workload,
    replicas_of,
)
from allranks.strategies.mesh import Agreement, Mesh, replicated_mesh
from allranks.strategies.reduction_schedules import power_below
from allranks.strategies.reduction_tree import roots_of_ranks, rounds_of_pairs, uses_pairs


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
    return max(map(len, roots_of_ranks(work.dealt)))


def tree_bytes(work: Workload, messages: Iterable[int]) -> int:
    """Each message in rounds of pairs, or by all-to-all of roots and all-gather of sums."""
    if work.ranks == 1:
        return 0
    sent_bytes = 0.0
    for message in messages:
        if work.dealt.are_even and uses_pairs(work.shards, work.ranks, message):
            sent_bytes += (rounds_of_pairs(work.shards, work.ranks) or 0) * message
        else:
            sent_bytes += (tree_roots(work) + 1) * (work.ranks - 1) / work.ranks * message
    return round(sent_bytes)


PIECES = Option("pieces", 1, "parts of a message that go their ways one behind another", at_least=1)
GROUP = Option("group", 0, "ranks that sum among themselves first; 0: those of a node", at_least=0)
HALF = "2(N-1)/N · (2 bytes per gradient + tally)"
ROUNDED = Reference(
    "a loop that rounds the gradient of each rank to 16 bit, adds them in float32 in the order of "
    "the ranks, and rounds the sum; `single` when N = 1"
)
TREE = (
    "log2(N) · message up to 2 MiB where ranks pair up along the tree (2, 4, 8 ranks on 8 shards), "
    "else (roots + 1)(N-1)/N · message; roots = 1 where N divides the shards, else <= 3"
)
FORMULAS = (
    f"mean, ring: {RING}; tree: {TREE}; fp16, bf16: {HALF}; "
    "halving-doubling: 2(Q-1)/Q · message, Q the power of two up to N, and once the message where "
    "Q < N; binary-tree: at most 3 · message; star: (N-1) · message (rank 0); "
    "hierarchical: 2(g-1)/g · message in the group, 2(G-1)/G · message/g across G groups of g; "
    f"{compressed.FORMULAS}"
)
REDUCE = Option(
    "reduce",
    "mean",
    "how gradients are summed",
    {
        **dict.fromkeys(("mean", "tree", "fp16", "bf16"), ()),
        **dict.fromkeys(("ring", "halving-doubling", "binary-tree", "star"), (PIECES,)),
        "hierarchical": (GROUP, PIECES),
        **compressed.CHOICES,
    },
    {"fp16": ROUNDED, "bf16": ROUNDED, **compressed.GUARANTEES},
)


def _buckets(has: Contents, options: Mapping[str, Any]) -> float:
    """Weights, buckets with what their reducer keeps, and what the optimizer keeps.

    16 bits are laid out twice, as they are sent and received, and once for the sums of a rank.
    Compressed ones have a residual of their size.
    """
    reduce = str(options["reduce"])
    each = 1 + (1 + 1 / has.ranks / 2 if reduce in ("fp16", "bf16") else 0)
    each += (reduce in compressed.CHOICES) + (reduce in ("one-bit", "n-bit")) / has.ranks
    sets = 2 if is_late(options) else 1
    return (1 + sets * each + has.optimizer) * (has.cut + has.uncut)


STORED = Stored(
    "(1 + b + k)(C + R), b = 1; fp16, bf16: b = 2 + 1/(2N) of float32; "
    f"{compressed.SIMPLE}; late: twice b",
    _buckets,
)
LATE = Option(
    "late",
    "0",
    "steps until a gradient is applied; 1: it is summed while the next step computes",
    {"0": (), "1": (Option("after", 0, "steps that apply their own gradient first", at_least=0),)},
    {
        "1": Reference(
            "a loop in one process in which step n applies the gradient of step n - 1, and the "
            "first one that does so none"
        )
    },
)


def is_late(options: Mapping[str, Any]) -> bool:
    """Whether a gradient is applied in the step after its own."""
    return LATE.name in options and options[LATE.name].name != "0"


def reduced_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """What the busiest rank sends for all messages of a step.

    Where gradients are late the last message is the tally alone, summed by `mean` or `tree`.
    """
    picked: Picked = options["reduce"]
    way = WAYS[picked.name]
    if not is_late(options):
        return way(work, picked.options)
    *gradients, tally = work.messages
    of_tally = replace(work, messages=(tally,))
    of_gradients = replace(work, messages=tuple(gradients), tally=0)
    way_of_tally = WAYS["tree" if picked.name == "tree" else "mean"]
    return way(of_gradients, picked.options) + way_of_tally(of_tally, {})


def mesh_of_groups(ranks: int, options: Mapping[str, Any]) -> Mesh:
    """The mesh of a replicated model; raises `RequestError` where groups do not come out even, or
    chunks cannot be indexed, or a compressed gradient would be late."""
    reduce: Picked = options["reduce"]
    _check_compressed(reduce, options)
    group = reduce.options.get("group", 0)
    if group and ranks > 1 and ranks % group:
        raise RequestError(
            asked=f"reduce=hierarchical(group={group}) on {ranks} ranks",
            found=f"{ranks} ranks, which are no whole groups of {group}",
            why="rank k of each group sums the same part of the gradient with those of the others",
            do="a group that divides the ranks, or reduce=ring",
        )
    return replicated_mesh(ranks)


def groups_of_nodes(reduce: Picked, per_node: int, ranks: int) -> dict[str, str]:
    """What `hierarchical` becomes where nobody says its groups: those of the nodes; else nothing.

    `per_node` is how many ranks each node has, 0 where some have more than others.
    """
    if reduce.name != "hierarchical" or reduce.options["group"] or ranks == 1:
        return {}
    if per_node in (0, ranks):
        raise RequestError(
            asked="--strategy ddp:reduce=hierarchical",
            found="one node" if per_node else "nodes with different numbers of ranks",
            why="gradients are summed in each node first, then across nodes, rank k with rank k",
            do="reduce=hierarchical(group=2) for groups of 2 ranks, or reduce=ring",
        )
    return {"reduce": f"hierarchical(group={per_node},pieces={reduce.options['pieces']})"}


def _check_compressed(reduce: Picked, options: Mapping[str, Any]) -> None:
    """Raise `RequestError` for chunks that cannot be indexed, or a gradient compressed and late."""
    if reduce.name not in compressed.CHOICES:
        return
    compressed.check_codes(reduce)
    if is_late(options):
        raise RequestError(
            asked=f"ddp:reduce={reduce},late=1",
            found="a gradient that is compressed and late",
            why="two sets of buckets take turns, and each would keep a residual of its own",
            do="leave late out, or reduce=mean",
        )


def even_unless_summed(options: Mapping[str, Any]) -> str:
    """Why the gradient of a step depends on which rank computes which shards; "" if not."""
    reduce = str(options.get("reduce", "mean"))
    if reduce in ("fp16", "bf16"):
        return f"reduce={reduce} rounds the gradient of each rank: unequal shares change the result"
    if reduce in compressed.CHOICES:
        return f"under reduce={reduce} a rank keeps what it has not sent of its own shards"
    if is_late(options):
        return "with late=1 the tally of a step comes before its gradients"
    return ""


def _tree(work: Workload, options: Mapping[str, Any]) -> int:
    """Each message in rounds of pairs, or by all-to-all of roots and all-gather of sums."""
    return tree_bytes(work, work.messages)


def _half(work: Workload, options: Mapping[str, Any]) -> int:
    """An all-to-all and an all-gather, without the few bytes that make all chunks of one size."""
    return round(2 * (work.ranks - 1) / work.ranks * (2 * work.gradients + work.tally))


def _halving_doubling(work: Workload, options: Mapping[str, Any]) -> int:
    """The busiest rank is one that takes part for another one too, where there is one."""
    core = power_below(work.ranks)
    return round((2 * (core - 1) / core + (core < work.ranks)) * sum(work.messages))


def _binary_tree(work: Workload, options: Mapping[str, Any]) -> int:
    """The busiest rank is the root, or its first child, which sends to its parent too."""
    of_root = min(2, work.ranks - 1)
    of_child = 1 + min(2, work.ranks - 3) if work.ranks > 3 else of_root
    return max(of_root, of_child) * sum(work.messages)


def _star(work: Workload, options: Mapping[str, Any]) -> int:
    """The busiest rank is the one in the middle."""
    return (work.ranks - 1) * sum(work.messages)


def _hierarchical(work: Workload, options: Mapping[str, Any]) -> int:
    """Two rings, the second one with what the first one leaves to each rank."""
    group = min(options["group"] or work.ranks, work.ranks)
    groups = work.ranks // group
    part = 2 * (group - 1) / group + 2 * (groups - 1) / groups / group
    return round(part * sum(work.messages))


WAYS: dict[str, Callable[[Workload, Mapping[str, Any]], int]] = {
    **dict.fromkeys(("mean", "ring"), ring_bytes),
    "tree": _tree,
    **dict.fromkeys(("fp16", "bf16"), _half),
    "halving-doubling": _halving_doubling,
    "binary-tree": _binary_tree,
    "star": _star,
    "hierarchical": _hierarchical,
    **compressed.WAYS,
}


def _replicas(has: Contents, options: Mapping[str, Any]) -> float:
    """Weights of each replica, one gradient and one optimizer."""
    return (replicas_of(options) + 1 + has.optimizer) * (has.cut + has.uncut)


DATA_PARALLEL_CARDS = (
    Card(
        name="single",
        summary="One process does all the work. What every other strategy is compared with.",
        take_when="there is one device, or as the reference for others.",
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
        take_when="one process has several devices, and ranks are not wanted.",
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
            Option("replicas", 2, "how many: on cuda:0, cuda:1, …, or all on the CPU", at_least=1),
        ),
    ),
    Card(
        name="ddp-plain",
        summary="All-reduce each gradient after backward: the specification of `ddp`.",
        take_when="the code of `ddp` is in doubt: it is slower.",
        guarantee=Exact(),
        bytes_sent=ring_bytes,
        bytes_formula=RING,
        memory="weights + gradients + optimizer on every rank",
        stored=EVERYTHING,
        many_ranks=True,
        even_shares=even_unless_summed,
    ),
    Card(
        name="ddp",
        summary="Gradients in buckets, each sent as soon as backward has finished it.",
        take_when="the model fits on every rank. On a slow link: reduce=power-sgd, late=1.",
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
        even_shares=even_unless_summed,
    ),
    Card(
        name="independent",
        summary="No exchange: each rank trains alone on its own shards. The upper bound.",
        take_when="the highest possible throughput is to be measured.",
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
)
