"""The cards of pipelines: each rank holds some layers, and micro-batches go through them in turn.

What a step sends follows its samples: `messages` are means over the steps that were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import RequestError
from allranks.strategies.card import Card, Contents, Exact, Option, Stored, Workload
from allranks.strategies.cards.data_parallel import even_unless_summed, tree_bytes
from allranks.strategies.cards.model_parallel import SEQUENCE, check_sequence, dealt_out
from allranks.strategies.mesh import PIPELINE, REPLICATE, TENSOR, Agreement, Mesh


def _crossing(work: Workload, options: Mapping[str, Any]) -> int:
    """What the busiest rank sends: outputs of its stages, gradients of their inputs, the tally.

    Messages are (forward, back) for each pair of stages, and last what all ranks sum.
    """
    *crossed, summed = work.messages
    ranks, sent_bytes = work.ranks, [0.0] * work.ranks
    for stage, forward in enumerate(crossed[::2]):
        sent_bytes[stage % ranks] += forward
        sent_bytes[(stage + 1) % ranks] += crossed[2 * stage + 1]
    ring = 2 * (ranks - 1) / ranks * summed
    return round(max(sent_bytes) * (ranks > 1) + ring)


BY = Option(
    "by",
    "size",
    "what is balanced, where the task has no stages: bytes of weights, or measured seconds",
    ("size", "cost"),
)
BYTES = (
    "busiest rank: outputs of its stages + gradients of their inputs, of all micro-batches, "
    "+ 2(N-1)/N · (tally and norms, and weights that stages share)"
)
EVERYWHERE: dict[str, Any] = {
    "guarantee": Exact(),
    "bytes_sent": _crossing,
    "bytes_formula": BYTES,
    "stored": Stored("(2 + k)(C/N + R), stages of equal size, R: what stages share", dealt_out),
    "many_ranks": True,
    "options": (BY,),
    "bitwise_options": {},
    "agreement": Agreement("staged"),
    "mesh": lambda ranks, _: Mesh(((PIPELINE, ranks),)),
}
CHUNKS = Option("chunks", 2, "runs of layers on each rank", at_least=1)
MEMORY = "1/N of weights + gradients + optimizer; activations of"

PIPELINE_CARDS = (
    Card(
        name="gpipe",
        summary="Layers on ranks; all forward passes of a step, then all backward passes.",
        take_when="the model is a deep stack that does not fit, and the link is slow.",
        memory=f"{MEMORY} all m micro-batches; waits (N-1)/(m+N-1) of the time",
        paper="Huang et al. 2019, GPipe, arXiv 1811.06965",
        **EVERYWHERE,
    ),
    Card(
        name="1f1b",
        summary="Layers on ranks; forward and backward passes in turn, so less is kept.",
        take_when="`gpipe` keeps too many activations.",
        memory=f"{MEMORY} min(m, N - rank) micro-batches; waits (N-1)/(m+N-1) of the time",
        paper="Narayanan et al. 2019, PipeDream; 2021, Megatron-LM, arXiv 2104.04473",
        **EVERYWHERE,
    ),
    Card(
        name="interleaved",
        summary="`1f1b` with several runs of layers on each rank: waits less, sends more.",
        take_when="`1f1b` waits too long, and the link is fast.",
        memory=f"{MEMORY} up to m micro-batches; waits (N-1)/(vm+N-1) of the time, v = chunks",
        paper="Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473",
        **{**EVERYWHERE, "options": (CHUNKS, BY)},
    ),
    Card(
        name="zero-bubble",
        summary="`1f1b` with gradients of weights apart from those of inputs, made in waits.",
        take_when="`1f1b` waits too long, and there is memory to spare.",
        memory=f"{MEMORY} min(m, N) micro-batches, and gradients of up to `rank` of them; "
        "waits (N-1)/(3m+N-1) of the time",
        paper="Qi et al. 2023, Zero Bubble Pipeline Parallelism (ZB-H1), arXiv 2401.10241",
        **EVERYWHERE,
    ),
)

ROW = 5
"""Of a rank of a mesh: what crosses, is all-reduced and gathered along `tensor`, is summed over
copies of its stage, and over stages that share a weight."""


def _three_axes(ranks: int, options: Mapping[str, Any]) -> Mesh:
    """Every rank has a place on three axes, the last of which varies fastest."""
    data, tensor, pipeline = (int(options[name]) for name in ("data", "tensor", "pipeline"))
    check_sequence("mesh", options)
    places = data * tensor * pipeline
    if places != ranks:
        mesh_text = f"mesh:data={data},tensor={tensor},pipeline={pipeline}"
        copies, remainder = divmod(ranks, tensor * pipeline)
        raise RequestError(
            asked=f"--strategy {mesh_text} --ranks {ranks}",
            found=f"data {data} x tensor {tensor} x pipeline {pipeline} = {places} places",
            why=f"each of the {ranks} ranks has one of them, and none is left empty",
            do=f"--ranks {places}" + (f", or data={copies}" if not remainder else ""),
        )
    if options["reduce"] == "tree" and tensor > 1:
        raise RequestError(
            asked=f"--strategy mesh:tensor={tensor},reduce=tree, as --bitwise sets it",
            found=f"layers cut over {tensor} ranks",
            why="a product is summed over these ranks first, in another order than in one process",
            do="tensor=1, or leave --bitwise (reduce=tree) out",
        )
    return Mesh(((PIPELINE, pipeline), (REPLICATE, data), (TENSOR, tensor)))


def _of_three_axes(work: Workload, options: Mapping[str, Any]) -> int:
    """Of the busiest rank; messages are a `ROW` for each rank, and twice the tally: as copies sum
    it, and with what goes with it as all ranks do, or those of a line."""
    *by_rank, tally, along_line = work.messages
    copies, line = (int(options[name]) for name in ("data", "pipeline"))
    along = 1 - 1 / int(options["tensor"])
    is_tree = options["reduce"] == "tree"

    def between(message: int) -> float:
        if is_tree:
            return tree_bytes(Workload((), copies, work.shards, shares=work.shares), [message])
        return 2 * (1 - 1 / copies) * message

    sent_bytes: list[float] = [
        crossing + along * (2 * reduced + gathered) + between(gradients) + tied
        for crossing, reduced, gathered, gradients, tied in zip(*[iter(by_rank)] * ROW, strict=True)
    ]
    of_tally = 2 * (1 - 1 / (line if is_tree else work.ranks)) * along_line
    return round(max(sent_bytes) + of_tally + (between(tally) if is_tree else 0))


def _own_part(has: Contents, options: Mapping[str, Any]) -> float:
    """Of the layers of a stage that can be cut a part, and all of its others."""
    tensor, pipeline = int(options["tensor"]), int(options["pipeline"])
    return (2 + has.optimizer) * (has.cut / tensor + has.uncut) / pipeline


MESH_CARD = Card(
    name="mesh",
    summary="Layers cut over `tensor`, stages along `pipeline`, copies of both along `data`.",
    take_when="neither `tensor` nor a pipeline alone is enough.",
    guarantee=Exact(),
    bytes_sent=_of_three_axes,
    bytes_formula="busiest rank: what `1f1b` sends of its samples + what `tensor` sends of its "
    "stage + 2(D-1)/D · gradients of its part + 2(N-1)/N · tally; N = D·T·P. reduce=tree: of D "
    "copies what `ddp:reduce=tree` sends on D ranks, and 2(P-1)/P · tally",
    memory="1/P of the layers, of those 1/T of what is cut: weights + gradients + optimizer; "
    "activations of min(m, P - stage) micro-batches; sequence=yes: those of blocks 1/T",
    stored=Stored("(2 + k)(C/T + R)/P, stages of equal size, C: layers that are cut", _own_part),
    many_ranks=True,
    options=(
        Option("data", 1, "D, how many copies of the model, each on its samples", at_least=1),
        Option("tensor", 1, "T, over how many ranks layers are cut", at_least=1),
        Option("pipeline", 1, "P, how many ranks hold stages one after the other", at_least=1),
        SEQUENCE,
        Option(
            "schedule",
            "1f1b",
            "in which order micro-batches pass the stages",
            {"gpipe": (), "1f1b": (), "interleaved": (CHUNKS,)},
        ),
        Option("reduce", "mean", "how gradients of copies are summed", ("mean", "tree")),
        BY,
    ),
    bitwise_options={"reduce": "tree"},
    agreement=Agreement("staged"),
    mesh=_three_axes,
    even_shares=even_unless_summed,
    rounds_together=True,
    paper="Narayanan et al. 2021, Megatron-LM on GPU clusters, arXiv 2104.04473",
)
