"""The card of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import Card, Exact, Option, Workload
from allranks.strategies.mesh import REPLICATE, TENSOR, Agreement, Mesh

LEAVES = 8
"""So many parts a sum over the ranks has with `exact=yes`, on any number of them."""


def _mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    copies = int(options["data"])
    if ranks % copies:
        raise RequestError(
            asked=f"--strategy tensor:data={copies} --ranks {ranks}",
            found=f"{ranks} ranks for {copies} copies of the model",
            why="each copy is cut over as many ranks as any other",
            do=f"--ranks {-(-ranks // copies) * copies}",
        )
    if options["exact"] and (copies > 1 or LEAVES % ranks):
        raise RequestError(
            asked=f"--strategy tensor:exact=yes --ranks {ranks}",
            found=f"{ranks} ranks in {copies} {'copies' if copies > 1 else 'copy'} of the model",
            why=f"each rank has as many of {LEAVES} leaves as any other, and all the samples",
            do="1, 2, 4 or 8 ranks, and no data=…; or leave exact out",
        )
    return Mesh(((REPLICATE, copies), (TENSOR, ranks // copies)))


def _bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Activations along the tensor axis, gradients between the copies; the tally over all."""
    reduced, gathered, gradients, tally, *moved = work.messages
    copies = int(options["data"])
    ranks = work.ranks // copies
    along = (ranks - 1) / ranks * (2 * reduced + gathered)
    between = 2 * (copies - 1) / copies * gradients
    return round(along + between + 2 * (work.ranks - 1) / work.ranks * tally) + sum(moved)


TENSOR_CARD = Card(
    name="tensor",
    summary="Each rank holds and computes a part of every Linear and Embedding that can be cut.",
    guarantee=Exact(),
    bytes_sent=_bytes,
    bytes_formula="2(T-1)/T · activations all-reduced + (T-1)/T · activations and weights gathered "
    "+ 2(D-1)/D · gradients/T + 2(N-1)/N · tally; D = data, T = N/D; by samples: block of a column "
    "and a row: output in forward, input in backward; a column alone: output gathered, input in "
    "backward; a row alone: output, input gathered in backward; embedding: output; exact=yes: "
    "what is all-reduced here is T of its size gathered",
    memory="1/T of weights, gradients and optimizer of what is cut, all of the rest; activations "
    "between the layers of a block 1/T",
    many_ranks=True,
    options=(
        Option("data", 1, "copies of the cut model, each on samples of its own", at_least=1),
        Option("exact", False, "equal bits on 1, 2, 4 and 8 ranks: sums of 8 leaves, in one order"),
    ),
    agreement=Agreement("sharded"),
    mesh=_mesh,
    paper="Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053",
)
