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
