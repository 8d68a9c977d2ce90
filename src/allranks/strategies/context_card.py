"""The card of context parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import Card, Exact, Option, Workload
from allranks.strategies.mesh import CONTEXT, REPLICATE, Mesh


def _mesh(ranks: int, options: Mapping[str, Any]) -> Mesh:
    copies = int(options["data"])
    if ranks % copies:
        raise RequestError(
            asked=f"--strategy context:data={copies} --ranks {ranks}",
            found=f"{ranks} ranks for {copies} groups that share sequences",
            why="each group cuts its sequences over as many ranks as any other",
            do=f"--ranks {-(-ranks // copies) * copies}",
        )
    return Mesh(((REPLICATE, copies), (CONTEXT, ranks // copies)))


def _bytes(work: Workload, options: Mapping[str, Any]) -> int:
    """Activations along the context axis; gradients and tally over all ranks."""
    swapped, gathered, passed_on, reduced = work.messages
    ranks = work.ranks // int(options["data"])
    if ranks == 1:
        passed_on = 0
    along = (ranks - 1) / ranks * (swapped + gathered) + passed_on
    return round(along + 2 * (work.ranks - 1) / work.ranks * reduced)


CONTEXT_CARD = Card(
    name="context",
    summary="Each rank has some positions of every sequence in the repeated blocks.",
    guarantee=Exact(),
    bytes_sent=_bytes,
    bytes_formula="per attention and sample, A = T/P · width · bytes of a number: ulysses "
    "8(P-1)/P · A (queries, keys, values and output, forward and backward); ring 6(P-1) · A (keys "
    "and values, again in backward, and their gradients); (P-1) · A where the sequence is gathered "
    "+ 2(N-1)/N · (gradients + tally); D = data, P = N/D, T positions; where P divides T",
    memory="weights + gradients + optimizer on every rank; activations of the blocks 1/P; ring: "
    "scores of (T/P)² per head and sample",
    many_ranks=True,
    options=(
        Option(
            "attention",
            "ulysses",
            "how attention sees all positions: by heads, or keys and values round a ring",
            ("ulysses", "ring"),
        ),
        Option("data", 1, "groups of ranks, each on samples of its own", at_least=1),
        Option("bucket_mb", 25.0, "MiB of gradients that leave in one message", above=0),
    ),
    mesh=_mesh,
    paper="Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509; "
    "Liu et al. 2023, Ring Attention, arXiv 2310.01889",
)
