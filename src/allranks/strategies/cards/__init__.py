"""The cards: one per strategy, family by family. Plain data, no framework.

Bytes are what the busiest rank hands to the network in one step, counted for the algorithms of the
field: a ring all-reduce of n bytes sends 2(N-1)/N·n from every rank, an all-gather (N-1)·n of its
own part, an all-to-all the parts that are not its own. The contract test compares them with the
bytes counted at the process group.
"""

from __future__ import annotations

from allranks.strategies.cards.data_parallel import DATA_PARALLEL_CARDS
from allranks.strategies.cards.learners import DECOUPLED_CARD, OUTER_CARDS
from allranks.strategies.cards.model_parallel import (
    CONTEXT_CARD,
    EXPERT_CARD,
    PLACED_CARDS,
    TENSOR_CARD,
)
from allranks.strategies.cards.parameter_server import PARAMETER_SERVER_CARD
from allranks.strategies.cards.pipeline import MESH_CARD, PIPELINE_CARDS
from allranks.strategies.cards.sharded import FSDP_CARDS, ZERO_CARDS
from allranks.strategies.cards.tensorflow import TENSORFLOW_CARDS

CARDS = {
    card.name: card
    for card in (
        *DATA_PARALLEL_CARDS,
        *ZERO_CARDS,
        EXPERT_CARD,
        *FSDP_CARDS,
        *PLACED_CARDS,
        TENSOR_CARD,
        CONTEXT_CARD,
        *PIPELINE_CARDS,
        MESH_CARD,
        DECOUPLED_CARD,
        PARAMETER_SERVER_CARD,
        *TENSORFLOW_CARDS,
        *OUTER_CARDS,
    )
}

TAKE_WHEN = {
    "single": "there is one device, or as the reference for others.",
    "dp": "one process has several devices, and ranks are not wanted.",
    "model-parallel": "the model is too large for one device, and one process has several.",
    "ddp-plain": "the code of `ddp` is in doubt: it is slower.",
    "ddp": "the model fits on every rank. On a slow link: reduce=power-sgd, late=1.",
    "context": "sequences are so long that their activations do not fit.",
    "zero1": "the model fits, but its optimizer state does not.",
    "zero2": "gradients do not fit either; every pass of a step then sends.",
    "expert": "the model is a mixture of experts.",
    "fsdp": "the weights do not fit on a rank, and the link is fast.",
    "hsdp": "weights do not fit, and links within a node are much faster.",
    "branches": "the model has towers or paths that do not need each other.",
    "tensor": "single layers are too large, and the link is very fast (within a node).",
    "gpipe": "the model is a deep stack that does not fit, and the link is slow.",
    "1f1b": "`gpipe` keeps too many activations.",
    "interleaved": "`1f1b` waits too long, and the link is fast.",
    "zero-bubble": "`1f1b` waits too long, and there is memory to spare.",
    "mesh": "neither `tensor` nor a pipeline alone is enough.",
    "local-sgd": "the link is slow, and a result that depends on the ranks is accepted.",
    "slowmo": "the plain means of `local-sgd` lose accuracy.",
    "block-momentum": "`local-sgd` on many ranks learns too slowly.",
    "diloco": "ranks are far apart: they meet every 50 steps.",
    "sparse-loco": "the link is too slow even for `diloco`.",
    "independent": "the highest possible throughput is to be measured.",
    "decoupled": "learners are slow or come and go.",
    "ps": "workers differ much in speed (mode=async).",
    "mirrored": "one TensorFlow process has several devices.",
    "multi-worker-mirrored": "the model fits on every rank: the default on several.",
    "central-storage": "devices have little memory for variables.",
    "parameter-server": "workers differ in speed, or come and go.",
    "tpu": "you have a TPU to try it on: until then it is refused.",
}
"""When to take a strategy: by the memory of a rank, the link, and the shape of the model."""

SYMBOLS = {
    "N": "ranks",
    "K": "ranks that hold one model together",
    "T": "ranks that compute a layer together",
    "E": "ranks that hold the experts together",
    "P": "ranks along the positions (`context`), or stages (`mesh`)",
    "D": "copies of the cut model",
    "L": "learners",
    "C": "bytes of the weights that the strategy cuts",
    "R": "bytes of the other weights",
    "k": "bytes that the optimizer keeps per byte of a weight: AdamW 2, SGD with momentum 1",
    "m": "micro-batches of a step",
    "tally": "the few numbers summed besides gradients: loss, weight, samples",
    "roots": "sums of parts of the batch that a rank holds under reduce=tree",
    "message": "gradients sent at once, and the tally",
    "unit": "a block of the model, gathered as one; the root is the rest",
}
"""What stands in the formulas of cards, where a formula does not say otherwise."""
