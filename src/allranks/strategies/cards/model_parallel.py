"""The cards of strategies that compute one model on several ranks or devices.

`model-parallel` and `branches` place whole layers, `expert` places experts; the ranks of `tensor`
and `context` share samples and exchange activations. Each of the last three has copies, which read
samples of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError
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
from allranks.strategies.cards.data_parallel import EVERYTHING, no_bytes
from allranks.strategies.mesh import (
    BRANCH,
    CONTEXT,
    EXPERT,
    TENSOR,
    Agreement,
    Mesh,
    in_copies,
)


def _branches(work: Workload, options: Mapping[str, Any]) -> int:
    """What branches return is broadcast; the gradients of their inputs and the tally are summed."""
    returned, inputs, tally = work.messages
    return round((work.ranks - 1) / work.ranks * (returned + 2 * inputs + 2 * tally))


def dealt_out(has: Contents, options: Mapping[str, Any]) -> float:
    """Branches, or stages, are what is cut: each is on one rank."""
    return (2 + has.optimizer) * (has.cut / has.ranks + has.uncut)


PLACED_CARDS = (
    Card(
        name="model-parallel",
        summary="One process, layers of one model on several devices, inputs in flight.",
        take_when="the model is too large for one device, and one process has several.",
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
        take_when="the model has towers or paths that do not need each other.",
        guarantee=Exact(),
        bytes_sent=_branches,
        bytes_formula="(N-1)/N · outputs of all branches + 2(N-1)/N · (gradients of what they are "
        "given, each tensor once, + tally)",
        memory="of each branch weights, gradients, optimizer and activations on one rank; all else "
        "of the model on every rank",
        stored=Stored("(2 + k)(C/N + R), C: branches of equal size", dealt_out),
        many_ranks=True,
        agreement=Agreement("staged"),
        mesh=lambda ranks, _: Mesh(((BRANCH, ranks),)),
        paper="Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks, "
        "arXiv 1404.5997",
    ),
)


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


EXPERT_CARD = Card(
    name="expert",
    summary="Each rank holds some experts of every MixtureOfExperts, and the rest whole.",
    take_when="the model is a mixture of experts.",
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
)

LEAVES = 8
"""So many parts a sum over the ranks has with `exact=yes`, on any number of them."""

SEQUENCE = Option(
    "sequence", False, "between regions of the blocks a rank has some positions of every sequence"
)


def check_sequence(strategy: str, options: Mapping[str, Any]) -> None:
    """Raise `RequestError` for positions that nobody cuts, where `tensor` says the ranks."""
    if options["sequence"] and int(options["tensor"]) == 1:
        raise RequestError(
            asked=f"--strategy {strategy}:sequence=yes",
            found="tensor=1",
            why="positions are cut over the ranks that compute a layer together",
            do="tensor=2 or more, or leave sequence out",
        )


def _tensor_mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    copies = int(options["data"])
    mesh = in_copies(ranks, copies, TENSOR, f"tensor:data={copies}")
    if options["exact"] and (copies > 1 or LEAVES % ranks):
        raise RequestError(
            asked=f"--strategy tensor:exact=yes --ranks {ranks}",
            found=f"{ranks} ranks in {copies} {'copies' if copies > 1 else 'copy'} of the model",
            why=f"each rank has as many of {LEAVES} leaves as any other, and all the samples",
            do="1, 2, 4 or 8 ranks, and no data=…; or leave exact out",
        )
    if options["exact"] and options["sequence"]:
        raise RequestError(
            asked="--strategy tensor:exact=yes,sequence=yes",
            found="sums of leaves, for parts of a sequence",
            why="a product rounds by how many positions it is of, and with sequence=yes that "
            "depends on the ranks",
            do="one of them",
        )
    return mesh


def _tensor_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Activations along the tensor axis, gradients between the copies; the tally over all."""
    reduced, gathered, gradients, tally, *moved = work.messages
    copies = int(options["data"])
    ranks = work.ranks // copies
    along = (ranks - 1) / ranks * (2 * reduced + gathered)
    between = 2 * (copies - 1) / copies * gradients
    return round(along + between + 2 * (work.ranks - 1) / work.ranks * tally) + sum(moved)


def _cut_layers(has: Contents, options: Mapping[str, Any]) -> float:
    """A part of the layers that can be cut, and all of the rest."""
    return (2 + has.optimizer) * (has.cut * int(options["data"]) / has.ranks + has.uncut)


TENSOR_CARD = Card(
    name="tensor",
    summary="Each rank holds and computes a part of every Linear and Embedding that can be cut.",
    take_when="single layers are too large, and the link is very fast (within a node).",
    guarantee=Exact(),
    bytes_sent=_tensor_bytes,
    bytes_formula="2(T-1)/T · activations all-reduced + (T-1)/T · activations and weights gathered "
    "+ 2(D-1)/D · gradients/T + 2(N-1)/N · tally; D = data, T = N/D; by samples: block of a column "
    "and a row: output in forward, input in backward; a column alone: output gathered, input in "
    "backward; a row alone: output, input gathered in backward; embedding: output; exact=yes: "
    "what is all-reduced here is T of its size gathered; sequence=yes: what blocks "
    "all-reduce is scattered and gathered, inputs of columns once more; gradients of norms",
    memory="1/T of weights, gradients and optimizer of what is cut, all of the rest; activations "
    "between the layers of a block 1/T; sequence=yes: all activations of the repeated blocks 1/T",
    stored=Stored("(2 + k)(C/T + R), C: layers that are cut", _cut_layers),
    many_ranks=True,
    options=(
        Option("data", 1, "copies of the cut model, each on samples of its own", at_least=1),
        Option("exact", False, "equal bits on 1, 2, 4 and 8 ranks: sums of 8 leaves, in one order"),
        SEQUENCE,
    ),
    agreement=Agreement("sharded"),
    mesh=_tensor_mesh,
    rounds_together=True,
    paper="Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053",
)


def _context_mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    copies = int(options["data"])
    return in_copies(ranks, copies, CONTEXT, f"context:data={copies}")


def _context_bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Activations along the context axis; gradients and tally over all ranks."""
    swapped, gathered, reduced, passed_on, gradients = work.messages
    ranks = work.ranks // int(options["data"])
    along = (ranks - 1) / ranks * (swapped + gathered + 2 * reduced)
    passed_on = 0 if ranks == 1 else passed_on
    return round(along + passed_on + 2 * (work.ranks - 1) / work.ranks * gradients)


CONTEXT_CARD = Card(
    name="context",
    summary="Each rank has some positions of every sequence in the repeated blocks.",
    take_when="sequences are so long that their activations do not fit.",
    guarantee=Exact(),
    bytes_sent=_context_bytes,
    bytes_formula="per attention and sample, A = T/P · width · bytes of a number: ulysses "
    "8(P-1)/P · A (queries, keys, values and output, forward and backward); ring and zig-zag "
    "6(P-1) · A (keys and values, again in backward, and their gradients); (P-1) · A where "
    "sequences are gathered, 2(P-1) · A more where blocks follow; + 2(N-1)/N · (gradients + "
    "tally); D = data, P = N/D, T positions, of which each rank has as many",
    memory="weights + gradients + optimizer on every rank; activations of the blocks 1/P; rings: "
    "scores of 1024 · T/P per head and sample",
    stored=EVERYTHING,
    many_ranks=True,
    options=(
        Option(
            "attention",
            "ulysses",
            "how attention sees all positions: by heads, or keys and values round a ring, which is "
            "balanced under a causal mask where the sequence lies folded on the ranks (zig-zag)",
            ("ulysses", "ring", "zig-zag"),
        ),
        Option("data", 1, "copies of the model, each on samples of its own", at_least=1),
        Option("bucket_mb", 25.0, "MiB of gradients that leave in one message", above=0),
    ),
    mesh=_context_mesh,
    rounds_together=True,
    paper="Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509; "
    "Liu et al. 2023, Ring Attention, arXiv 2310.01889",
)
